"""What takes too long or too much over a text costs its process alone."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from kvloom.api.catalog import Catalog, ServedModel
from kvloom.api.texts.prompts import GROUP, SHORT, ChatPrompt, PlainPrompt, grouped
from kvloom.serve.processes.sandbox import Limits
from kvloom.serve.processes.texts import TextProcesses
from kvloom.types.errors import BadRequest, QueueFull, Unavailable
from kvloom.types.request import ModelCard
from tests.api.scripted import ScriptedEngine, byte_level, card, says, token, tokens
from tests.processes import DEADLINE

LIMITS = Limits(0.5, 256 << 20)
UNREACHED = Limits(DEADLINE, LIMITS.memory)
SLOW = "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
CHAT = ChatPrompt.of(HI, None, {})


def play(test: Callable[[Catalog], Awaitable[None]], *cards: ModelCard, limits: Limits = LIMITS) -> None:
    async def whole() -> None:
        async with TextProcesses(limits, limits) as texts:
            await test(Catalog(ScriptedEngine(says(""), cards=[card(), *cards]), texts))

    asyncio.run(whole())


def workers() -> list[int]:
    """Returns the processes of this one's that render and encode."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [pid for pid in children if b"sandbox_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ended_seconds() -> float:
    """Returns the CPU time of all processes of this one's that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


async def served(catalog: Catalog) -> ServedModel:
    """Checks that a model is served, and returns it."""
    tiny = await catalog.get("tiny")
    said = tokens("<s><|user|>hi\n<|assistant|>")
    assert await tiny.tokens(CHAT) == said
    return tiny


def test_processes_answer_as_they_would_inline() -> None:
    async def test(catalog: Catalog) -> None:
        tiny = await served(catalog)
        long = "hello " * SHORT
        assert await tiny.tokens(PlainPrompt(long)) == [token("<s>"), *tokens(long)]
        with pytest.raises(BadRequest, match=r"is 5 tokens\. However, messages has 6") as error:
            await (await catalog.get("narrow")).tokens(CHAT)
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(BadRequest, match="chat template of picky: no") as error:
            await (await catalog.get("picky")).tokens(CHAT)
        assert error.value.param == "messages"

    cards = (
        card(context_length=1 << 20),
        card("narrow", context_length=5),
        card("picky", "{{ raise_exception('no') }}"),
    )
    play(test, *cards)


def test_a_short_plain_prompt_needs_no_process() -> None:
    async def test(catalog: Catalog) -> None:
        assert await (await catalog.get("tiny")).tokens(PlainPrompt("a")) == [token("<s>"), *tokens("a")]
        assert workers() == []

    play(test)


@pytest.mark.parametrize("template", [SLOW, "{{ 'x' * 999999999 }}"], ids=["time", "memory"])
def test_a_template_that_takes_too_much(template: str) -> None:
    async def test(catalog: Catalog) -> None:
        bomb = await catalog.get("bomb")
        with pytest.raises(BadRequest, match=r"model bomb: .*(longer than|memory)") as error:
            await bomb.tokens(CHAT)
        assert error.value.param == "messages"
        await served(catalog)
        assert await bomb.tokens(PlainPrompt("a")) == [token("<s>"), *tokens("a")]

    play(test, card("bomb", template))


def test_a_model_that_went_over_rests_and_costs_no_other_process() -> None:
    async def test(catalog: Catalog) -> None:
        bomb = await catalog.get("bomb")
        taken = []
        for _ in range(2):
            with pytest.raises(BadRequest, match="its chat template or its tokenizer cannot be used here"):
                await bomb.tokens(CHAT)
            assert workers() == []
            taken.append(ended_seconds())
        assert taken[0] == taken[1]

    play(test, card("bomb", SLOW))


BOMB = ChatPrompt.of([{"role": "user", "content": "bomb"}], None, {})
SPITEFUL = "{% if messages[0].content == 'bomb' %}" + SLOW + "{% endif %}a"


def test_others_may_use_a_model_at_which_one_tenant_rests() -> None:
    async def test(catalog: Catalog) -> None:
        odd = await catalog.get("odd")
        with pytest.raises(BadRequest, match="longer than"):
            await odd.tokens(BOMB, "a")
        with pytest.raises(BadRequest, match="longer than"):
            await odd.tokens(CHAT, "a")
        assert await odd.tokens(CHAT, "b") == tokens("a")

    play(test, card("odd", SPITEFUL))


def test_tenants_have_a_models_turn_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a has the turn, and others of a wait, when b comes."""
    monkeypatch.setattr("kvloom.serve.processes.texts.WAITING", 3)

    async def test(catalog: Catalog) -> None:
        tiny, done = await served(catalog), list[str]()

        async def ask(tenant: str) -> None:
            try:
                await tiny.tokens(CHAT, tenant)
            except QueueFull as error:
                assert error.retry_after  # noqa: PT017 - the others must not raise
                tenant = tenant.upper()
            done.append(tenant)

        await asyncio.gather(*map(ask, "aaaaab"))
        assert "".join(done) == "Aaabaa"

    play(test)


def test_a_killed_process_is_replaced_and_its_call_made_again() -> None:
    async def test(catalog: Catalog) -> None:
        await served(catalog)
        (first,) = workers()
        os.kill(first, signal.SIGKILL)
        await served(catalog)
        (second,) = workers()
        assert second != first

    play(test)


def test_who_hangs_up_loses_its_place_and_holds_up_nobody() -> None:
    async def test(catalog: Catalog) -> None:
        bomb = await catalog.get("bomb")
        calls = [asyncio.create_task(bomb.tokens(CHAT)) for _ in range(4)]
        for _ in range(9):  # they come first
            await asyncio.sleep(0)
        before = ended_seconds()
        await served(catalog)
        assert ended_seconds() == before  # no bomb's process has ended so far
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(one, asyncio.CancelledError) for one in ended)
        await served(catalog)

    play(test, card("bomb", SLOW), limits=UNREACHED)


def hostile(**parts: object) -> str:
    tokenizer = HFTokenizer.from_str(byte_level().to_str())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    text: str = tokenizer.to_str()
    return text


def test_prompts_are_encoded_in_groups_and_keep_their_order() -> None:
    texts = [f"{'hello ' * (at % 7)}{at}" for at in range(3 * GROUP)] + ["hello " * SHORT, "a"]
    prompts = [PlainPrompt(text) for text in texts]
    groups = list(grouped(prompts))
    assert [one for group in groups for one in group] == prompts
    assert all(len(group) <= GROUP for group in groups)
    assert all(len(group) == 1 or sum(one.size for one in group) <= SHORT for group in groups)
    assert len(groups) < len(prompts) / 8

    async def test(catalog: Catalog) -> None:
        model = await catalog.get("odd")
        found = [one async for one in model.tokens_of(prompts)]
        assert found == [await model.tokens(prompt) for prompt in prompts]
        halves = [PlainPrompt("a", param="text_1"), PlainPrompt("\ud800", param="text_2")]
        with pytest.raises(BadRequest, match="surrogate pair") as error:
            assert not [one async for one in model.tokens_of(halves)]
        assert error.value.param == "text_2"
        assert len(workers()) >= 1

    regex = pre_tokenizers.Split(Regex("[a-z]+"), "isolated")  # nobody knows it, so a process has to encode
    split = pre_tokenizers.Sequence([regex, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    play(test, card("odd", context_length=1 << 20, tokenizer=hostile(pre_tokenizer=split)))


TOKENIZERS = {
    "a normaliser of 10 MB": hostile(normalizer=normalizers.Replace("a", "b" * 10_000_000)),
    "a regex bomb": hostile(pre_tokenizer=pre_tokenizers.Split(Regex(r"(a+)+$|(a|aa)+1"), "isolated")),
}


@pytest.mark.parametrize("text", TOKENIZERS.values(), ids=list(TOKENIZERS))
def test_a_tokenizer_is_tried_before_it_is_served(text: str) -> None:
    async def test(catalog: Catalog) -> None:
        with pytest.raises(Unavailable, match=r"model bad: .*tokenizer"):
            await catalog.get("bad")
        assert [model.card.name for model in await catalog.models()] == ["tiny"]
        await served(catalog)

    play(test, card("bad", tokenizer=text))


def test_an_unknown_regex_that_may_be_harmless_is_served_by_processes_alone() -> None:
    async def test(catalog: Catalog) -> None:
        odd = await catalog.get("odd")
        (worker,) = workers()
        assert not odd.tokenizer.plain
        assert len(await odd.tokens(PlainPrompt("hello"))) == 2
        with pytest.raises(BadRequest, match="cannot") as error:
            await odd.tokens(PlainPrompt("x" * 40 + "y"))
        assert error.value.param == "prompt"
        assert workers() == [worker]

    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"(x+)+$"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    play(test, card("odd", tokenizer=hostile(pre_tokenizer=split)))
