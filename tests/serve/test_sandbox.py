"""A sandbox contains what its work would do to the process that asked for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvloom.engine.guide import Guides, GuideTrial
from kvloom.serve.processes.sandbox import Limits, Refused, Sandbox, grammar_trial
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.request import Guide, SamplingParams, StartGenerate
from tests.api.scripted import card

CHAIN = 5000
ENOUGH = Limits(1.0, 512 << 20)
POISON = {
    "a chain of references": Guide(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(CHAIN)},
                    f"d{CHAIN}": {"type": "string"},
                },
            }
        ),
    ),
    "a chain of rules": Guide(
        "lark", "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(CHAIN)) + f'\nr{CHAIN}: "a"'
    ),
    "a regex of optional characters": Guide("regex", "a?" * 60_000),
    "many properties": Guide(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(20_000)}}),
    ),
}


def play(test: Callable[[Sandbox], Awaitable[None]], limits: Limits = ENOUGH, size: int = 2) -> None:
    async def whole() -> None:
        async with Sandbox("grammars", size, limits) as sandbox:
            await test(sandbox)

    asyncio.run(whole())


@pytest.mark.parametrize("guide", POISON.values(), ids=list(POISON))
def test_a_poisoned_grammar_costs_its_process_alone(guide: Guide) -> None:
    async def test(sandbox: Sandbox) -> None:
        trial = grammar_trial(sandbox)
        with pytest.raises(BadRequest, match="grammar cannot be used: "):
            await trial(card(), guide)
        await trial(card(), Guide("regex", "[ab]+"))  # another process answers

    play(test)


def test_what_keeps_the_process_from_working_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no room for the tokenizer, or no process: the grammar may be tried elsewhere, or later."""

    async def test(sandbox: Sandbox) -> None:
        with pytest.raises(Unavailable, match="for grammars of tiny cannot be used: "):
            await grammar_trial(sandbox)(card(), Guide("regex", "[ab]+"))

    play(test, Limits(1.0, 1 << 14))

    async def nowhere(sandbox: Sandbox) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            with pytest.raises(Unavailable, match="no process can be started for grammars: No such file"):
                await grammar_trial(sandbox)(card(), Guide("regex", "[ab]+"))
        await grammar_trial(sandbox)(card(), Guide("regex", "[ab]+"))

    play(nowhere)


def test_who_is_cancelled_frees_the_process() -> None:
    """The only one works for far longer than the test may take, and is gone with its caller."""

    async def test(sandbox: Sandbox) -> None:
        trial = grammar_trial(sandbox)
        await trial(card(), Guide("regex", "[ab]+"))
        asking = asyncio.create_task(trial(card(), POISON["a regex of optional characters"]))
        (pid,) = children()
        while not asking.done() and cpu_ticks(pid) < 40:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert pid not in children()
        await trial(card(), Guide("regex", "[ab]+"))

    play(test, Limits(600.0, 4 << 30), size=1)


REGEX = Guide("regex", "[ab]+")


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_signal_from_outside_ended_is_done_by_another_process(by: signal.Signals) -> None:
    async def test(sandbox: Sandbox) -> None:
        trial = grammar_trial(sandbox)
        await trial(card(), REGEX)
        asking = await stopped(trial)
        (pid,) = children()
        os.kill(pid, by)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        await asking

    play(test)


def test_what_the_work_raises_is_its_own_fault_and_costs_no_process() -> None:
    async def test(sandbox: Sandbox) -> None:
        await grammar_trial(sandbox)(card(), REGEX)
        before = children()
        with pytest.raises(Refused, match="it fails with ValidationError: "):
            await sandbox.call("tiny", lambda: b"", b"\xff")
        assert children() == before

    play(test)


def test_a_grammar_whose_processes_are_ended_twice_is_not_refused_for_good() -> None:
    async def test(sandbox: Sandbox) -> None:
        guides = Guides({"tiny": card()}, grammar_trial(sandbox))
        asking = asyncio.create_task(guides.compiled(wanting(REGEX), lambda: True))
        ended = set[int]()
        while not asking.done():
            await asyncio.sleep(0)
            for pid in children():
                if pid not in ended:
                    os.kill(pid, signal.SIGKILL)
                    ended.add(pid)
        with pytest.raises(Unavailable, match=r"two processes for grammars .*killed by SIGKILL") as error:
            await asking
        assert error.value.retry_after
        assert len(ended) == 2
        (state,) = await guides.compiled(wanting(REGEX), lambda: True)
        assert state is not None

    play(test)


def test_work_that_stands_still_ends_if_its_process_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.serve.processes.sandbox.WALL", 1e6)
    monkeypatch.setattr("kvloom.serve.processes.sandbox.WANTED", 0.0)

    async def test(sandbox: Sandbox) -> None:
        trial = grammar_trial(sandbox)
        await trial(card(), REGEX)
        asking = await stopped(trial)
        async with asyncio.timeout(120):
            await trial(card("other"), REGEX)
            with pytest.raises(Unavailable, match="has not ended its work"):
                await asking

    play(test, size=1)


async def stopped(trial: GuideTrial) -> asyncio.Task[None]:
    """Asks the only process, which was idle, for what it will never do, as it has been stopped."""
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(trial(card(), REGEX))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    return asking


def wanting(guide: Guide) -> StartGenerate:
    sampling = SamplingParams(max_tokens=4, seed=1, guide=guide)
    return StartGenerate(model="tiny", request="r", prompt=[5], sampling=sampling)


def children() -> list[int]:
    """Returns the sandbox processes of this one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            line = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == os.getpid() and "sandbox_process" in line:
            found.append(int(stat.parent.name))
    return found


def cpu_ticks(pid: int) -> int:
    """Returns the CPU time that a process has had, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
