"""A component's status changes by what the controller does, and by what is reported of its process."""

from __future__ import annotations

from msgspec.structs import replace

from kvloom.cluster.launcher import Answered, Ended, FoundProcess, Missed, Report, Started, UnitSeen
from kvloom.cluster.reconcile import (
    TIMING,
    BeginServing,
    DrainUnit,
    Forget,
    Kill,
    ReadmitUnit,
    RetireGateway,
    StartProcess,
    StopProcess,
    Timing,
)
from kvloom.cluster.state import NEXT, SCHEDULER, ComponentStatus, FleetSpec, Phase, generation_of, is_gateway

Deed = StartProcess | DrainUnit | ReadmitUnit | RetireGateway | BeginServing | StopProcess | Kill | Forget
"""An action that changes what there is of its component."""


def after(
    deed: Deed, process: ComponentStatus, spec: FleetSpec, now: float, timing: Timing = TIMING
) -> ComponentStatus | None:
    """Returns the component's status once the action is carried out; None if nothing is kept of it."""
    match deed:
        case StartProcess(generation=generation):
            made = _started(process, generation, now)
        case DrainUnit(until=until):
            made = _enter_phase(process, "draining", now, until=until)
        case ReadmitUnit():
            made = _enter_phase(process, "ready", now)
        case RetireGateway(until=until):
            made = _enter_phase(process, "retiring", now, until=until)
        case BeginServing():
            made = replace(process, begun=True)
        case StopProcess(component=name):
            again = generation_of(name, spec) > 0
            made = _enter_phase(process, "ending", now, until=now + timing.stop, replaces=again, failures=0)
        case Kill():
            made = replace(process, killed=True)
        case Forget():
            return None
    return made


def _started(process: ComponentStatus, generation: int, now: float) -> ComponentStatus:
    another = process.generation != generation and process.phase in ("waiting", "failed")
    return ComponentStatus(
        phase=_legal(process.phase, "starting"),
        since=now,
        generation=generation,
        serial=process.serial + 1,
        problem=process.problem,
        failures=0 if another else process.failures,
        pause=0.0 if another else process.pause,
        proven=process.proven,
        replaces=process.replaces or (another and process.phase == "waiting"),
    )


def heard(
    report: Report, process: ComponentStatus, spec: FleetSpec, now: float, timing: Timing = TIMING
) -> ComponentStatus:
    """Returns the component's status once the report is taken in. One that is out of date changes nothing."""
    match report:
        case Started(pid=pid, node=node):
            return replace(process, pid=pid, node=node)
        case Answered(endpoint=endpoint, chat=chat) if process.phase == "starting":
            ready = _enter_phase(process, "ready", now, problem="", replaces=False, proven=process.generation)
            return replace(ready, endpoint=endpoint, chat=chat)
        case Ended(component=name, how=how):
            return _ended(name, how, process, spec, now, timing)
        case Missed(misses=misses):
            return replace(process, misses=misses)
        case UnitSeen(generation=generation, problem=problem):
            if process.phase == "ready" and process.generation == generation:
                return replace(process, seen=True, problem=problem)
    return process


def _ended(
    name: str, how: str, process: ComponentStatus, spec: FleetSpec, now: float, timing: Timing
) -> ComponentStatus:
    again = generation_of(name, spec) > 0
    gone = replace(process, pid=None, killed=False, misses=0, begun=False, seen=False, calls=None)
    if process.phase not in ("starting", "ready"):
        replaces = again and not is_gateway(name)
        proven = process.proven if again else 0
        return _enter_phase(
            gone, "absent", now, replaces=replaces, proven=proven, problem="", failures=0, pause=0.0
        )
    if process.killed:
        late = (
            f"gave no answer in {timing.start:g} s"
            if is_gateway(name) or name == SCHEDULER
            else f"did not load its models in {timing.load:g} s (`load_timeout`) and was killed"
        )
        how = late if process.phase == "starting" else "did not answer any more and was killed"
    lived = now - process.since if process.phase == "ready" else 0.0
    pause = timing.pause(process.pause, lived)
    phase: Phase = "waiting" if _is_tried_again(name, process) else "failed"
    failures = 1 if lived >= timing.healthy else process.failures + 1
    return _enter_phase(
        gone, phase, now, until=now + pause, pause=pause, failures=failures, problem=how, replaces=False
    )


def _is_tried_again(name: str, process: ComponentStatus) -> bool:
    """Returns whether a process that has died is started again. One that has never worked is not, so that a
    person reads why; the fleet scheduler is, because the others do well without it."""
    return name == SCHEDULER or process.phase == "ready" or process.proven > 0


def adopted(found: FoundProcess, spec: FleetSpec, now: float, timing: Timing = TIMING) -> ComponentStatus:
    """Returns the status of a process that an earlier controller has started. What it had of its time to end
    it has anew."""
    ready = found.phase == "ready"
    left = {"ending": timing.stop, "retiring": spec.drain + timing.margin}.get(found.phase)
    return ComponentStatus(
        phase=found.phase,
        since=now,
        until=None if left is None else now + left,
        generation=found.generation,
        pid=found.pid,
        node=found.node,
        endpoint=found.endpoint,
        proven=found.generation if ready else 0,
        begun=is_gateway(found.component),
        seen=ready,
    )


def _enter_phase(process: ComponentStatus, phase: Phase, now: float, **changes: object) -> ComponentStatus:
    return replace(process, phase=_legal(process.phase, phase), since=now, **({"until": None} | changes))


def _legal(phase: Phase, following: Phase) -> Phase:
    assert following in NEXT[phase], f"a component that is {phase} cannot become {following}"
    return following
