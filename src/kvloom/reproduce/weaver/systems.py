"""What the paper compares: each is a configuration of kvloom's own engines on two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.reproduce.muxserve.runtime import Hosted, UnderMPS
from kvloom.reproduce.weaver.setup import COLD, HOT, unit
from kvloom.types.spec import Control, Splitting, WeaveSpec

SHARE: Final = 0.45  # of the sequences that are away: the paper's best (section 5.2)
PART: Final = 0.8  # of the cold unit's pool, lent
SIZE: Final = "7b"  # by which MuxServe's estimator knows models like these
SHARES: Final = (0.9, 0.3)  # of MuxServe's decode processes: its largest, and its smallest (ICML 2024)


WAITS: Final = 0.05  # of a step: algorithm 1's threshold


def weave(share: float, control: Control = "operators", split: Splitting = "auto") -> WeaveSpec:
    """The relation of the cold unit to the hot one."""
    return WeaveSpec(COLD, share, PART, control=control, split=split, waits=WAITS)


@dataclass(frozen=True, slots=True)
class System:
    """units: on GPUs of a kind, for requests a second of the hot and of the cold model."""

    name: str
    units: Callable[[str, float, float], list[SimulatedUnit]]


def dedicated(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """A GPU each."""
    return [unit(HOT, device, [HOT]), unit(COLD, device, [COLD])]


def bare_temporal(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """As `temporal`, in a runtime that adds nothing to the device's time."""
    return [unit("both", device, [HOT, COLD], gpus=2, rates=(hot, cold))]


def bare_multiplexed(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """As `multiplexed`, in a runtime that adds nothing to the device's time."""
    return [unit("both", device, [HOT, COLD], gpus=2, policy="adbs", shares=SHARES, rates=(hot, cold))]


def temporal(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Both models on both GPUs, by turns on the whole of them."""
    return [_in_muxserve(one) for one in bare_temporal(device, hot, cold)]


def multiplexed(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
    """Both models on both GPUs, side by side, with MuxServe's batching, quotas and processes of fixed
    shares."""
    return [_in_muxserve(one) for one in bare_multiplexed(device, hot, cold)]


def _in_muxserve(made: SimulatedUnit) -> SimulatedUnit:
    """With what its runtime adds to a step, as in the experiments of its own paper."""
    return replace(made, cost=Hosted(UnderMPS(made.cost, made.spec), {HOT: SIZE, COLD: SIZE}))


def woven(spec: WeaveSpec) -> Callable[[str, float, float], list[SimulatedUnit]]:
    """A GPU each, and the hot model's sequences in part away."""

    def units(device: str, hot: float, cold: float) -> list[SimulatedUnit]:
        return [unit(HOT, device, [HOT], weave=spec), unit(COLD, device, [COLD])]

    return units


def sharing(share: float) -> System:
    """Weaver with another share."""
    return System(f"Weaver, {100 * share:.0f} %", woven(weave(share)))


DEDICATED: Final = System("dedicated", dedicated)
MUXSERVE: Final = System("MuxServe", multiplexed)
TEMPORAL: Final = System("Mux-Temporal", temporal)
BARE_MUXSERVE: Final = System("MuxServe, bare", bare_multiplexed)
BARE_TEMPORAL: Final = System("Mux-Temporal, bare", bare_temporal)
WEAVER: Final = System("Weaver", woven(weave(SHARE)))
