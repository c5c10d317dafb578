"""`python -m tests.attacks [NAME ...]` plays the attacks beside an innocent client, and prints a table.

NAME is the beginning of an attack's name, as `2` or `14 many`; left out, all are played.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from tests.attacks.attacks import (
    ATTACKS,
    Attack,
    Reached,
    bad_requests,
    bad_requests_and_a_kill,
    stopped_gateway,
)
from tests.attacks.fleet import Fleet, Seen, forget_peak, innocent, resident, serving
from tests.attacks.strangers import STRANGERS, TENANTS
from tests.sinks import closed_pipe, full_disk, unread_pipe

LONE_SECONDS: Final = 8.0
AFTER_SECONDS: Final = 2.0
ALL: Final = ATTACKS | STRANGERS
MOST_ELSEWHERE: Final = 5.0  # times the lone p99, and SPARE besides
MOST_BESIDE: Final = 10.0
SPARE: Final = 0.3  # seconds
MOST_GAP: Final = 2.0  # seconds
MOST_MEMORY: Final = 400.0  # MiB


@dataclass(frozen=True, slots=True)
class Client:
    """What an innocent client has seen. Times in seconds."""

    lone_p99: float
    p99: float
    gap: float
    wrong: list[str]

    def excess(self, most: float) -> bool:
        return self.p99 > most * self.lone_p99 + SPARE or self.gap > MOST_GAP or bool(self.wrong)

    def __str__(self) -> str:
        wrong = f", {len(self.wrong)} wrong" if self.wrong else ""
        return f"{self.p99:.2f} ({self.lone_p99:.2f}){wrong}"


@dataclass(frozen=True, slots=True)
class Result:
    """What an attack did to others. Memory in MiB."""

    attack: str
    said: str
    elsewhere: Client
    """Of another model."""
    beside: Client
    """Of the same model."""
    gateway: float
    lost: list[str]
    """Processes of the fleet that are not there any more."""
    reached: bool
    """Whether the attack has reached its own end."""

    @property
    def failed(self) -> list[str]:
        """Returns the bounds that do not hold."""
        found = {
            "reached its end": self.reached,
            "processes lost": bool(self.lost),
            "another model": self.elsewhere.excess(MOST_ELSEWHERE),
            "same model": self.beside.excess(MOST_BESIDE),
            "memory": not self.gateway < MOST_MEMORY,
        }
        return [name for name, over in found.items() if over]

    def row(self) -> str:
        """Returns a row of the table in docs/security.md."""
        gap = max(self.elsewhere.gap, self.beside.gap)
        verdict = "holds" if not self.failed else f"fails: {', '.join(self.failed)}"
        lost = ", ".join(self.lost) or "none"
        cells = (
            self.attack,
            self.said,
            lost,
            self.elsewhere,
            self.beside,
            f"{gap:.2f}",
            f"{self.gateway:.0f}",
        )
        return "| " + " | ".join(map(str, (*cells, verdict))) + " |"


HEAD: Final = """\
| attack | effect | processes lost | p99 on another model (alone), s | on the same model (alone), s | longest gap, s | gateway, MiB | verdict |
|---|---|---|---|---|---|---|---|"""  # noqa: E501


async def under(name: str, fleet: Fleet) -> Result:
    """Plays an attack on `sums` beside innocent clients of another model and of the same one."""
    async with innocent(fleet, "guide") as far, innocent(fleet, "sums") as near:
        await asyncio.sleep(LONE_SECONDS)
    lone = far.p99(), near.p99()
    before, gateway = fleet.processes(), fleet.gateway()
    forget_peak(gateway)
    async with innocent(fleet, "guide") as far, innocent(fleet, "sums") as near:
        reached = False
        try:
            said = await ALL[name](fleet)
        except Reached as error:
            said, reached = str(error), True
        await asyncio.sleep(AFTER_SECONDS)
    after = fleet.processes()
    lost = [one for one, pid in before.items() if after.get(one) != pid and one not in fleet.restarted]
    memory = resident(gateway) if gateway in after.values() else float("nan")
    return Result(name, said, _seen(far, lone[0]), _seen(near, lone[1]), memory, lost, reached)


def _seen(client: Seen, lone: float) -> Client:
    return Client(lone, client.p99(), client.gap, client.wrong)


ALONE: Final[dict[str, tuple[Attack, Callable[[], AbstractContextManager[int | None]]]]] = {
    "4 full disk as log": (bad_requests, full_disk),
    "5 unread pipe as log": (bad_requests_and_a_kill, unread_pipe),
    "4 log without a reader": (bad_requests, closed_pipe),
    "8 stopped gateway": (stopped_gateway, nullcontext),
}
"""The attacks beside which nobody asks, each with what its fleet prints to."""


async def alone(name: str) -> str:
    """Plays one of these. Returns its row."""
    attack, sink = ALONE[name]
    with sink() as output:
        async with serving(output=output) as fleet:
            try:
                said, verdict = await attack(fleet), "holds"
            except Reached as error:
                said, verdict = str(error), "fails: reached its end"
    return f"| {name} | {said} |" + " |" * 5 + f" {verdict} |"


async def beside(name: str) -> str:
    """Plays an attack with innocent clients beside. Returns its row."""
    async with serving(keys=TENANTS.get(name, ())) as fleet:
        result = await under(name, fleet)
    for client in (result.elsewhere, result.beside):
        if client.wrong:
            print(f"{name}: {client.wrong[0]}", file=sys.stderr)
    return result.row()


async def main(names: list[str]) -> None:
    rows = []
    for name in [*ALL, *ALONE]:
        if not names or any(name.startswith(part) for part in names):
            rows.append(await (beside(name) if name in ALL else alone(name)))
            print(rows[-1], flush=True)
    print("\n".join(["", HEAD, *rows]))


def command(names: list[str]) -> int:
    """Returns the exit code: 2 if a name begins no attack's, of which one line tells."""
    known = [*ALL, *ALONE]
    if {"-h", "--help"} & {*names}:
        print((__doc__ or "").strip())
        return 0
    for name in names:
        if not any(one.startswith(name) for one in known):
            print(f"{name!r}: no attack's name begins so; known are {', '.join(known)}", file=sys.stderr)
            return 2
    asyncio.run(main(names))
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
