"""The actions by which a fleet's status becomes what its specification says."""

from __future__ import annotations

from msgspec import Struct


class StartProcess(Struct, frozen=True, tag=True):
    """Starts a process of this generation for the component."""

    component: str
    generation: int
    node: str = ""
    """The node on which it starts; empty for the controller's host."""
    device: str = ""
    """The device of that node that a unit is given; empty for the one that it specifies."""
    memory: int = 0
    """Bytes of that node's memory that a unit takes."""


class DrainUnit(Struct, frozen=True, tag=True):
    """Gives the unit no new request, because its process is to end: once it has none, or at `until`. (The
    order `unit drain` is `UnitSpec.drained`, and ends no process.)"""

    component: str
    until: float | None


class ReadmitUnit(Struct, frozen=True, tag=True):
    """Lets a unit that drains have requests again, because it is to stay."""

    component: str


class RetireGateway(Struct, frozen=True, tag=True):
    """Lets a gateway bring its requests to their end, because another one serves. It is killed at `until`."""

    component: str
    until: float


class BeginServing(Struct, frozen=True, tag=True):
    """Tells a gateway what the fleet is, so that it serves."""

    component: str


class StopProcess(Struct, frozen=True, tag=True):
    """Tells the component's process to end."""

    component: str


class Kill(Struct, frozen=True, tag=True):
    """Kills the component's process, which has not ended by itself or does not answer."""

    component: str


class Forget(Struct, frozen=True, tag=True):
    """Forgets a component that has no process and is to have none."""

    component: str


class RaiseGeneration(Struct, frozen=True, tag=True):
    """Raises the component's generation, because its turn has come in a rolling restart."""

    component: str


class PassOver(Struct, frozen=True, tag=True):
    """Passes over a unit in a rolling restart, because it has no process or is about to lose it."""

    component: str


class EndTurn(Struct, frozen=True, tag=True):
    """Ends the component's turn in a rolling restart. With a `problem` it has failed, and so has the
    whole."""

    component: str
    problem: str = ""


class RevertProgram(Struct, frozen=True, tag=True):
    """Goes back to the program before, because the gateway has died, or hung, soon after another was set."""

    problem: str


class ProveProgram(Struct, frozen=True, tag=True):
    """Ends the program's probation, which it has passed."""


class TellLack(Struct, frozen=True, tag=True):
    """Tells what a unit that is to have a process waits for; empty if it is for nothing any more."""

    component: str
    lack: str


class MoveUnit(Struct, frozen=True, tag=True):
    """Has a unit start anew, because its node is drained."""

    component: str


class LoseNode(Struct, frozen=True, tag=True):
    """Takes a silent node as lost, because its lease is over: nothing there answers any more."""

    node: str


class ForgetNode(Struct, frozen=True, tag=True):
    """Forgets a node that was lost, or has left, long ago."""

    node: str


class Wait(Struct, frozen=True, tag=True):
    """Nothing else is due before `until`."""

    until: float


Action = (
    StartProcess
    | DrainUnit
    | ReadmitUnit
    | RetireGateway
    | BeginServing
    | StopProcess
    | Kill
    | Forget
    | RaiseGeneration
    | PassOver
    | EndTurn
    | RevertProgram
    | ProveProgram
    | TellLack
    | MoveUnit
    | LoseNode
    | ForgetNode
    | Wait
)
