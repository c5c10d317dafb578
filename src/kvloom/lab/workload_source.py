"""A workload out of whatever file describes one: a spec in YAML or JSON, a workload, a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kvloom.config.fields import explain
from kvloom.config.file import read_yaml
from kvloom.types.errors import ConfigError
from kvloom.workload.ask import Ask
from kvloom.workload.files import VERSION, Header, Workload, read_workload, some
from kvloom.workload.make import make_asks
from kvloom.workload.replay import replay
from kvloom.workload.spec import WorkloadSpec

SPECS: Final = (".yaml", ".yml", ".json")


def open_workload(path: Path, **changes: Any) -> Workload:
    """changes: keys of a spec that are otherwise than in its file. Raises ConfigError."""
    if path.suffix.lower() not in SPECS:
        return read_workload(path)
    spec = read_spec(path, **changes)
    header = Header(
        kvloom_workload=VERSION,
        name=spec.name or path.stem,
        seed=spec.seed,
        vocab=spec.vocab,
        models=tuple(spec.models),
    )
    return Workload(header, lambda: _asks(path, spec))


def read_spec(path: Path, **changes: Any) -> WorkloadSpec:
    """Raises ConfigError."""
    settings = read_yaml(path) | changes
    if "models" not in settings:
        raise ConfigError(f"{path}: models: is missing; a list of the models' names is right")
    try:
        return WorkloadSpec.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, WorkloadSpec, {})}") from error


def _asks(path: Path, spec: WorkloadSpec) -> Iterator[Ask]:
    if spec.replay is None:
        return some(path, make_asks(spec))
    trace = path.parent / Path(spec.replay.file).expanduser()
    return some(path, replay(read_workload(trace).asks(), spec))
