"""The laws, as they must hold after a run, whatever went wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import at
from kvloom.cluster.state import ABSENT
from kvloom.engine.sequence import Sequence
from kvloom.lab.faults.faults import VOCAB, FaultScenario
from kvloom.lab.faults.guides import begin_guide
from kvloom.lab.faults.host import FaultyHost
from kvloom.lab.faults.invariants import lone_answer
from kvloom.lab.faults.journal import ClientAnswer
from kvloom.offload.planner import OffloadingPlanner
from kvloom.router.router import Router
from kvloom.types.errors import BadRequest, OutOfBlocks, QueueFull
from kvloom.types.load import UnitLoad
from kvloom.types.request import EndEvent, StartGenerate

_REFUSALS = (BadRequest, QueueFull, OutOfBlocks)  # what a request may be told if nothing has gone wrong


@dataclass(frozen=True, slots=True)
class Broken:
    law: str
    what: str

    def __str__(self) -> str:
        return f"{self.law}: {self.what}"


CONSERVATION = "law 1, conservation"
SAME_TOKENS = "law 2, same tokens"
EXACTLY_ONCE = "law 3, exactly once"
NOTHING_LEAKS = "law 4, nothing leaks"
NO_STARVATION = "law 5, no starvation"
OUTLIVES = "streams outlive engines"
NO_CRASH = "no crash"


def check_answer(answer: ClientAnswer, scenario: FaultScenario) -> Iterator[Broken]:
    """Yields the laws that a request has broken which is over."""
    name = answer.client.body.request
    for what in (*answer.broken, *_ending(answer, scenario)):
        yield Broken(EXACTLY_ONCE, f"{name}: {what}")
    for what in _tokens(answer, scenario):
        yield Broken(SAME_TOKENS, f"{name}: {what}")
    for what in _fate(answer, scenario):
        yield Broken(NO_STARVATION, f"{name}: {what}")
    if scenario.survivable and answer.tokens and (problem := _problem(answer)):
        yield Broken(OUTLIVES, f"{name}: it had begun, and engines have died at most: {problem}")


def _problem(answer: ClientAnswer) -> str:
    """Returns the error that a client was told instead of its rest; nothing if there was none."""
    errors = [end.message for end in answer.ends.values() if end.reason == "error"]
    return answer.error.message if answer.error else next(iter(errors), "")


def _tokens(answer: ClientAnswer, scenario: FaultScenario) -> Iterator[str]:
    body = answer.client.body
    for choice, tokens in answer.tokens.items():
        lone = lone_answer(body, choice, context=scenario.contexts[body.model], vocab=VOCAB)
        if tokens != lone[: len(tokens)]:
            yield f"choice {choice} is {tokens}, alone it is {lone}"


def _ending(answer: ClientAnswer, scenario: FaultScenario) -> Iterator[str]:
    """Yields what a stream has left out that has ended, and what it has said that none may."""
    body = answer.client.body
    if answer.fate == "ended" and len(answer.ends) < body.n:
        yield f"its stream ended, but of {body.n} choices only {sorted(answer.ends)} have"
    if answer.fate == "ended" and body.sampling.prompt_logprobs is not None and not answer.aborted:
        found = answer.prompt and len(answer.prompt.logprobs)
        failed = any(end.reason == "error" for end in answer.ends.values())
        if found != len(body.prompt) - 1 and not failed:
            yield f"its report is of {found} prompt tokens, not of {len(body.prompt) - 1}"
    for choice, end in answer.ends.items():
        yield from _end(answer, choice, end, scenario)


def _end(answer: ClientAnswer, choice: int, end: EndEvent, scenario: FaultScenario) -> Iterator[str]:
    body, tokens = answer.client.body, answer.tokens.get(choice, [])
    whole = len(body.prompt) + len(tokens)
    match end.reason:
        case "length" if len(tokens) != body.sampling.max_tokens and whole not in _contexts(
            body.model, scenario
        ):
            yield f"choice {choice} ends for its length after {len(tokens)} tokens"
        case "stop" if not tokens or (
            tokens[-1] not in body.sampling.stop_token_ids and not _guide_done(body, tokens)
        ):
            yield f"choice {choice} stops without a stop token, and without the end of a guide"
        case "abort" if not (
            (answer.aborted and answer.client.choice in (None, choice)) or choice in answer.stopped
        ):
            yield f"choice {choice} is aborted, but nobody has asked for it"
        case "error" if scenario.harmless:
            yield f"choice {choice} ends with an error where nothing has failed: {end.message}"
        case "error" if not end.message or "\n" in end.message:
            yield f"choice {choice} ends with an error that says {end.message!r}"


def _guide_done(body: StartGenerate, tokens: SequenceOf[int]) -> bool:
    if body.sampling.guide is None:
        return False
    guide = begin_guide(body.sampling.guide, VOCAB)
    return all(guide.accepts(token) for token in tokens) and guide.done


def _contexts(model: str, scenario: FaultScenario) -> set[int]:
    """Returns how many tokens of the model each unit that serves it can hold."""
    found = set()
    for unit in scenario.all_units:
        if model in unit.shapes:
            geometry = unit.shapes[model].geometry(unit.spec.block_bytes)
            most = unit.most_blocks(model) // geometry.blocks_per_page * geometry.tokens_per_block
            found.add(min(most, scenario.contexts[model]))
    return found


def _fate(answer: ClientAnswer, scenario: FaultScenario) -> Iterator[str]:
    error = answer.error
    if error is None:
        return
    if not error.message or "\n" in error.message:
        yield f"its error says {error.message!r}"
    if scenario.harmless and not answer.aborted and not isinstance(error, _REFUSALS):
        yield f"nothing has failed, but it is told: {error.message}"


def check_pool(host: FaultyHost) -> Iterator[Broken]:
    """Checks law 1, at any moment."""
    if host.process is None:
        return
    try:
        host.process.engine.pool.check()
        if loan := _loan(host):
            loan.pool.check()
    except AssertionError as error:
        yield Broken(CONSERVATION, f"{host.name}: {error}")


def _loan(host: FaultyHost) -> OffloadingPlanner[Sequence] | None:
    """Returns what the unit's model has borrowed, if it borrows."""
    spec = host.unit.spec
    if host.process is None or spec.weave is None:
        return None
    return host.process.engine.borrower.loan(spec.models[0].name)


def check_idle(host: FaultyHost, load: UnitLoad) -> Iterator[Broken]:
    """Yields what is left at a unit that has nothing to do, and whose leases have run out."""
    yield from check_pool(host)
    for model, one in load.models.items():
        for what in ("waiting", "running", "used_blocks", "pinned_blocks"):
            left = getattr(one, what)
            if left:
                yield Broken(NOTHING_LEAKS, f"{host.name}: {left} {what} of {model} are left")
    if host.process is not None:
        pool, ledger = host.process.engine.pool, host.process.transport.ledger
        if pool.available + pool.lent + pool.weights != pool.total:
            yield Broken(NOTHING_LEAKS, f"{host.name}: {pool.available} of {pool.total} blocks can be had")
        if len(ledger) > bool(pool.lent):  # what is lent has a ticket as long as it is
            yield Broken(NOTHING_LEAKS, f"{host.name}: {len(ledger)} reservations are in its ledger")
        if (loan := _loan(host)) and (loan.count or loan.pool.available + loan.pool.lent != loan.pool.total):
            yield Broken(NOTHING_LEAKS, f"{host.name}: {loan.count} sequences are offloaded still")


def check_invariants(host: FaultyHost) -> Iterator[Broken]:
    for checker in host.checkers:
        for what in checker.wrong[:3]:
            yield Broken(SAME_TOKENS, f"{host.name}: {what}")


def check_fleet(controller: Controller) -> Iterator[Broken]:
    """Checks law 5: a fleet of which nothing more is wanted is what it is to be."""
    spec, processes = controller.spec, controller.status.processes
    if spec.rolling is not None:
        yield Broken(NO_STARVATION, f"a rolling restart is not over, at {at(spec.rolling)}")
    for name, unit in spec.units.items():
        process = processes.get(name, ABSENT)
        there = process.phase == "ready" and process.generation == unit.generation
        if unit.removed or (unit.wanted and not there) or (not unit.wanted and process.phase != "absent"):
            wanted = "removed" if unit.removed else f"generation {unit.generation}, wanted: {unit.wanted}"
            yield Broken(NO_STARVATION, f"{name} is {process.phase} of {process.generation}, not {wanted}")


def check_router(router: Router) -> Iterator[Broken]:
    """Yields what is left in a router that has no request."""
    for name, unit in router.units.items():
        if not unit.up and unit.outlook != "away":
            yield Broken(NO_STARVATION, f"the router still takes {name} to be down")
        if unit.calls:
            yield Broken(NOTHING_LEAKS, f"the router counts {unit.calls} calls at {name}")
        for replica in unit.replicas.values():
            if replica.calls or replica.queue:
                yield Broken(
                    NOTHING_LEAKS, f"{replica}: {replica.calls} calls and {replica.queue} tokens are counted"
                )
