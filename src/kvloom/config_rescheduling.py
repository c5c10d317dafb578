"""How requests are rescheduled, as a config says it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from kvloom.cluster.freeness import Thresholds
from kvloom.config_fields import Period, Section, Steps
from kvloom.types.service import GroupSpec
from kvloom.types.spec import EngineSpec, SchedulerSpec

OFF = "none"


class ReschedulingConfig(Section):
    """The fleet scheduler's period in seconds, and its thresholds of freeness in decode steps."""

    period: Period = SchedulerSpec().period
    out: Steps = SchedulerSpec().out
    into: Steps = SchedulerSpec().into

    @model_validator(mode="after")
    def _apart(self) -> Self:
        Thresholds(self.out, self.into)
        return self

    def scheduler(
        self, engines: Iterable[EngineSpec], groups: Mapping[str, GroupSpec]
    ) -> SchedulerSpec | None:
        """None where no model is on two units that send and receive K and V, so that nothing can move, and no
        unit comes or goes."""
        models = [model.name for engine in engines if engine.tensor_parallel == 1 for model in engine.models]
        if len(set(models)) == len(models) and not groups:
            return None
        return SchedulerSpec(self.period, self.out, self.into)


def _off(value: Any) -> Any:
    return None if value == OFF else value


Rescheduling = Annotated[ReschedulingConfig | None, BeforeValidator(_off)]
