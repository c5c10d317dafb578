"""The feed of a unit's prefix caches against what the trees really hold."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from random import Random

import pytest

from kvloom.kv.pool import Pool
from kvloom.kv.prefix_feed import PrefixFeed, split_names
from kvloom.types.verbs import CachedSince
from tests.kv.play import OFTEN, Play
from tests.kv.trees import make, nodes, salts, serve


def named(pool: Pool) -> set[bytes]:
    """The names of all full pages, each made anew from all tokens before it."""
    names: set[bytes] = set()
    for model, cache in pool.caches.items():
        width = cache.geometry.tokens_per_block
        for salt in salts(cache.prefixes):
            for path, _ in nodes(cache.prefixes, salt):
                if len(path) % width == 0:
                    name = blake2b(repr((model, width, salt)).encode(), digest_size=8).digest()
                    for at in range(0, len(path), width):
                        run = array("i", path[at : at + width]).tobytes()
                        name = blake2b(name + run, digest_size=8).digest()
                    names.add(name)
    return names


class Follower:
    """Knows of a feed what it was told."""

    def __init__(self, feed: PrefixFeed) -> None:
        self.feed = feed
        self.told = CachedSince(life="", version=0)
        self.names: set[bytes] = set()
        self.wholes = 0

    def ask(self) -> int:
        """Returns how many names came."""
        answer = self.feed.changes(self.told)
        if answer.whole:
            self.names.clear()
            self.wholes += 1
        come, gone = list(split_names(answer.come)), list(split_names(answer.gone))
        assert len({*come, *gone}) == len(come) + len(gone)
        self.names = (self.names - set(gone)) | set(come)
        self.told = CachedSince(life=answer.life, version=answer.version)
        return len(come) + len(gone)


@pytest.mark.parametrize("seed", range(12))
def test_a_follower_knows_what_the_trees_hold(seed: int) -> None:
    play, random = Play(), Random(seed)
    feed = play.pool.feed
    often, seldom = Follower(feed), Follower(feed)
    for move in random.choices(list(OFTEN), list(OFTEN.values()), k=300):
        getattr(play, move)(random)
        often.ask()
        assert often.names == feed.held == named(play.pool)
        if random.random() < 0.05:
            seldom.ask()
            assert seldom.names == feed.held
    assert often.wholes == 1
    assert often.ask() == 0
    play.finish()


@pytest.mark.parametrize("seed", range(20))
def test_who_falls_behind_is_told_all(seed: int) -> None:
    random = Random(seed)
    feed = PrefixFeed(most_changes=8)
    follower, held = Follower(feed), list[bytes]()
    for number in range(400):
        if held and random.random() < 0.45:
            feed.drop(held.pop(random.randrange(len(held))))
        else:
            held.append(number.to_bytes(8, "big"))
            feed.insert(held[-1])
        if random.random() < 0.2:
            follower.ask()
            assert follower.names == set(held)
    assert 1 < follower.wholes < 80


def test_a_feed_of_another_process_is_told_all() -> None:
    first, second = PrefixFeed(), PrefixFeed()
    follower = Follower(first)
    first.insert(b"a" * 8)
    second.insert(b"b" * 8)
    follower.ask()
    follower.feed = second
    follower.ask()
    assert (follower.names, follower.wholes) == ({b"b" * 8}, 2)
    answer = second.changes(CachedSince(life=follower.told.life, version=10**9))  # a version that never was
    assert answer.whole


def test_an_answer_is_bounded() -> None:
    feed = PrefixFeed(most_named=3)
    for number in range(5):
        feed.insert(number.to_bytes(8, "big"))
    answer = feed.changes(CachedSince(life="", version=0))
    assert list(split_names(answer.come)) == [number.to_bytes(8, "big") for number in range(3)]


def test_salts_and_models_share_no_name() -> None:
    pool = make()
    tokens = list(range(8))
    for model in ("m", "t"):
        for salt in ("", "alice", "bob"):
            serve(pool.caches[model], tokens, salt=salt)
    assert len(pool.feed.held) == 3 * (2 + 4)


def test_a_name_costs_eight_bytes_a_page() -> None:
    pool = make(2000)
    cache, follower = pool.caches["m"], Follower(pool.feed)
    follower.ask()
    serve(cache, list(range(160)))
    answer = pool.feed.changes(follower.told)
    assert len(answer.come) == 8 * 40
    assert not answer.gone
