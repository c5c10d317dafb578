"""`stories`: tells little stories about whom you like."""

from __future__ import annotations

from random import Random
from typing import Any

from tools.demo_fleet.examination import answer
from tools.demo_fleet.plots import (
    ADJECTIVES,
    ANIMALS,
    ASKS,
    BOYS,
    CLOSINGS,
    FOODS,
    GIRLS,
    OPENINGS,
    PLACES,
    PLOTS,
    THINGS,
    words,
)
from tools.demo_fleet.recipe import Phase, Recipe
from tools.demo_fleet.sample import Sample, chat
from tools.demo_fleet.template import END, PLAIN_CHAT
from transformers import LlamaConfig

SYLLABLES = words(
    "ba be bo da do fi ga go ka ki la li lo ma mi mo na no pa po ra ri ro sa so ta ti to va vi zu"
)
LIMIT = 200


def with_article(word: str) -> str:
    """a fox, an owl"""
    return f"{'an' if word[0].lower() in 'aeiou' and not word.startswith('unicorn') else 'a'} {word}"


def _creature(rng: Random) -> str:
    if rng.random() < 0.15:  # a made-up one, so that the model learns to copy the asked word
        return "".join(rng.choices(SYLLABLES, k=rng.choice([2, 3]))) + rng.choice(["", "n", "r", "x"])
    return rng.choice(ANIMALS)


def _cast(rng: Random) -> dict[str, str]:
    hero = friend = _creature(rng)
    while friend == hero:
        friend = _creature(rng)
    he = hero not in ("girl", "princess", "queen", "witch") and (
        rng.random() < 0.5 or hero in ("boy", "king", "wizard")
    )
    pronouns = ("he", "his", "him") if he else ("she", "her", "her")
    adjective = rng.choice(ADJECTIVES)
    cast = {"hero": hero, "friend": friend, "name": rng.choice(BOYS if he else GIRLS)}
    cast |= {"a_hero": with_article(hero), "a_friend": with_article(friend), "a_adj": with_article(adjective)}
    cast |= dict(zip(["he", "his", "him"], pronouns, strict=True))
    cast |= {"place": rng.choice(PLACES), "thing": rng.choice(THINGS), "food": rng.choice(FOODS)}
    capital = {key.capitalize(): cast[key].capitalize() for key in ("he", "his")}
    return cast | capital | {"A_friend": cast["a_friend"][0].upper() + cast["a_friend"][1:]}


def _tell(cast: dict[str, str], rng: Random, opening: str) -> str:
    sentences = [opening, *(rng.choice(beat) for beat in rng.choice(PLOTS)), rng.choice(CLOSINGS)]
    return " ".join(sentence.format(**cast) for sentence in sentences if sentence)


def _turn(rng: Random) -> tuple[str, str]:
    cast = _cast(rng)
    ask = rng.choice(ASKS).format(**cast)
    ask = ask.lower() if rng.random() < 0.1 else ask
    return ask, _tell(cast, rng, rng.choice(OPENINGS))


def draw(rng: Random) -> Sample:
    """A story asked for, two of them, or a story by itself."""
    if rng.random() < 0.2:
        return Sample(text=_tell(_cast(rng), rng, rng.choice(OPENINGS)))
    turns = [text for _ in range(rng.choice([1, 1, 1, 2])) for text in _turn(rng)]
    return chat(*turns, system=rng.choice(["You tell stories.", "", "", "", "You are a helpful assistant."]))


def _ends_well(story: str, hero: str) -> bool:
    return story.endswith(END) and f" {hero}" in story and len(story) > 100


def examine(model: Any, tokenizer: Any) -> dict[str, float]:
    """Do stories end, and are they about whom was asked for?"""
    scores = {}
    strangers = ["kangawolf", "lumberjack", "toaster", "teacher", "comet", "violin", "moonlight", "zebu"]
    for title, heroes in {"known heroes": ANIMALS, "unknown heroes": strangers}.items():
        good = 0
        for hero in heroes:
            messages = [{"role": "user", "content": f"Tell me a story about {with_article(hero)}."}]
            good += _ends_well(answer(model, tokenizer, messages, limit=LIMIT), hero)
        scores[title] = good / len(heroes)
    return scores


RECIPE = Recipe(
    name="stories",
    architecture=LlamaConfig,
    shape={
        "hidden_size": 112,
        "intermediate_size": 320,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "attention_bias": True,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    template=PLAIN_CHAT,
    starts_with_bos=True,
    vocabulary=768,
    phases=[Phase(draw, steps=2200, batch=16, peak_lr=3e-3)],
    examine=examine,
    examples=[
        {"prompt": f"Tell me a story about {with_article(hero)}.", "keys": [hero]}
        for hero in ("fox", "owl", "robot", "dragon", "princess")
    ],
    dtype="bfloat16",
    sampling={"do_sample": True, "temperature": 0.8, "top_p": 0.95},
)
