"""The units that lend to others, as a config names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

from pydantic import PlainValidator

from kvloom.config_errors import nearest
from kvloom.config_fields import Auto, Part, Section
from kvloom.types.spec import Control, Plane, Splitting, WeaveSpec

_CPU: Final = "cpu"


def _share(value: Any) -> float | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{str(value)[:40]}; a number from 0 to 1, or `auto`, is right")
    return float(value)


class WeaveConfig(Section):
    """The unit `cold` lends `part` of its pool to the one model of `hot`, and attends over it; `share` of the
    hot unit's sequences are there. With `auto` it is such that decode steps of `cold` take at most `bound`
    longer. `control`, `split` and `waits` say how soon `cold` attends (Weaver, section 4): between which of
    its own doings it looks for tasks, whether it splits operators for that, and how much of a step of `hot`
    waiting may take."""

    hot: str
    cold: str
    share: Annotated[float | Auto, PlainValidator(_share)] = 0.45
    part: Part = 0.3
    bound: Part = 0.15
    control: Control = "operators"
    split: Splitting = "auto"
    waits: Part = 0.05


class PairedUnit(NamedTuple):
    """What matters of a unit that lends or borrows."""

    models: int
    device: str
    ranks: int


def weave_units(
    relations: Sequence[WeaveConfig], units: Mapping[str, PairedUnit], transport: Plane
) -> dict[str, WeaveSpec]:
    """Returns the relations by hot unit. Raises ValueError if one cannot be."""
    for i, one in enumerate(relations):
        for key, name in (("hot", one.hot), ("cold", one.cold)):
            where = f"weave.{i}.{key}"
            if name not in units:
                raise ValueError(f"{where}: no unit {name!r}; {nearest(name, list(units))}")
            unit = units[name]
            if unit.ranks > 1 or transport != "shm":
                raise ValueError(f"{where}: {name}; a unit of one rank, with the transport shm, is right")
            if sum(getattr(other, key) == name for other in relations) > 1:
                raise ValueError(f"{where}: {name} is {key} twice; one loan at a time is right")
        if one.hot == one.cold:
            raise ValueError(f"weave.{i}.cold: {one.cold} would lend to itself; another unit is right")
        kinds = [units[name].device for name in (one.hot, one.cold)]
        if kinds.count(_CPU) == 1:
            raise ValueError(
                f"weave.{i}.cold: {one.cold} is on {kinds[1]}, {one.hot} on {kinds[0]}; "
                "two CPU units, or two GPU units, are right"
            )
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"weave.{i}.cold: {one.cold} is on {kinds[1]}, {one.hot} on {kinds[0]}; "
                "two units of one GPU are right (units go round the GPUs in their order)"
            )
        if units[one.hot].models > 1:
            raise ValueError(
                f"weave.{i}.hot: {one.hot} has {units[one.hot].models} models; a unit of one is right"
            )
    return {
        one.hot: WeaveSpec(one.cold, one.share, one.part, one.bound, one.control, one.split, one.waits)
        for one in relations
    }
