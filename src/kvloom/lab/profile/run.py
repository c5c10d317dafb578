"""A profile from a config: models loaded, jobs measured, the file written, its fit's error told."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import uvloop
from huggingface_hub import try_to_load_from_cache
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvloom.config.config import Config
from kvloom.engine.queues import limit_context
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.exec.huggingface import hide_progress
from kvloom.kv.memory import keep_freed_memory
from kvloom.lab.profile.jobs import WatchedExecutor
from kvloom.lab.profile.serving import LOADS, Bounds, EngineGaps, measure_serving
from kvloom.lab.profile.session import QUICK, Effort, measure, this_computer
from kvloom.plan.cost.measured import ProfiledCostModel, cross_validate
from kvloom.plan.cost.profile import Computer, CpuOverhead, Profile, write_profile
from kvloom.plan.cost.shapes import CONFIG, ModelShape, itemsize_of, read_shape
from kvloom.serve.engine import require_hub
from kvloom.types.errors import ConfigError
from kvloom.types.spec import EngineSpec, ModelSpec

POOL = 2 << 30  # bytes at most; more would measure longer contexts, and take longer
QUIET = 0.5  # load average above which the user is warned that the machine is busy


def run_profile(
    config: Config, output: Path, *, temperature: float, quick: bool, arguments: Sequence[str]
) -> Profile:
    """Profiles the config's machine and writes the file. `arguments` are those of `kvloom serve` for this
    config. Raises ConfigError for a config with `tls`, and for models that cannot be served or profiled."""
    if config.tls is not None:
        raise ConfigError(
            "tls: the server is asked over plain HTTP for a profile; the same config without `tls` is right"
        )
    spec, effort = whole_machine(config), QUICK if quick else Effort()
    require_hub(spec.models)
    for model in spec.models:
        if Path(model.path).is_file():
            raise ConfigError(
                f"models.{model.name}: {model.path}: a GGUF file has several number formats, and a shape has "
                "one; the directory of a checkpoint is right"
            )
    hide_progress()
    console, computer = Console(highlight=False), this_computer()
    if computer.load > QUIET:
        console.print(f"this machine is busy (load {computer.load}): jobs will seem too slow", style="yellow")
    profile, bounds = measure_jobs(config, spec, effort, temperature, computer, console)
    overheads = asyncio.run(measure_server(config, profile, bounds, effort, arguments, console))
    profile = replace(profile, overheads=overheads)
    write_profile(profile, output)
    console.print(errors_table(profile))
    console.print(overhead_table(profile))
    console.print(factors_table(profile))
    alone, mixed, beside = (len(rows) for rows in (profile.jobs, profile.mixed, profile.colocated))
    console.print(f"{output}: {alone} jobs alone, {mixed} mixed ones, {beside} beside another")
    if computer.load > QUIET:
        console.print(f"this machine was busy (load {computer.load}): measure again", style="yellow")
    return profile


def measure_jobs(
    config: Config, spec: EngineSpec, effort: Effort, temperature: float, computer: Computer, console: Console
) -> tuple[Profile, dict[str, Bounds]]:
    """Measures all that needs no running server. Returns it, and what the server may be asked of each model.
    The models are unloaded afterwards."""
    executor = WatchedExecutor.load(
        list(spec.models),
        kv_bytes=spec.kv_bytes,
        block_bytes=spec.block_bytes,
        threads=spec.threads,
        progress=lambda text: console.print(text, style="dim"),
    )
    keep_freed_memory()  # as the process of an engine does
    try:
        shapes = {model.name: measured_shape(executor, model) for model in spec.models}
        columns = BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        with (
            Progress(*columns, console=console) as bar,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            task = bar.add_task("", total=1.0)
            profile = runner.run(
                measure(
                    executor,
                    spec,
                    shapes,
                    computer,
                    effort,
                    temperature,
                    lambda what, done: bar.update(task, description=what, completed=done),
                )
            )
        return profile, bounds_of(config, executor)
    finally:
        executor.close()


def bounds_of(config: Config, executor: TorchExecutor) -> dict[str, Bounds]:
    """Returns by model what all engines of the config that have it can take."""
    found: dict[str, Bounds] = {}
    for engine in config.engines:
        for model in engine.models:
            card, geometry = executor.cards[model.name], executor.geometries[model.name]
            context = limit_context(card, geometry, engine.kv_bytes // engine.block_bytes).context_length
            own = Bounds(min(context, model.max_context or context), engine.max_waiting)
            found[model.name] = Bounds(*map(min, own, found.get(model.name, own)))
    return found


async def measure_server(
    config: Config,
    profile: Profile,
    bounds: Mapping[str, Bounds],
    effort: Effort,
    arguments: Sequence[str],
    console: Console,
) -> tuple[CpuOverhead, ...]:
    """Starts `kvloom serve` and measures it. Returns what it does besides jobs. Raises ConfigError if it does
    not answer."""
    cost = ProfiledCostModel(profile)
    with _with_key(config, arguments) as (key, given):
        return await measure_serving(
            given,
            key,
            EngineGaps(
                cost.step_gap,
                fmean(row.gap for row in profile.prefill_gaps) if profile.prefill_gaps else 0.0,
            ),
            [load.requests(cost, bounds, effort.load_seconds) for load in LOADS],
            lambda text: console.print(f"serving: {text}", style="dim"),
        )


@contextmanager
def _with_key(config: Config, arguments: Sequence[str]) -> Iterator[tuple[str | None, Sequence[str]]]:
    """Yields an API key, or None if the server wants none, and the `serve` arguments that accept it. Of named
    keys only hashes are stored, so a temporary key is made."""
    if config.keys is None or config.api_key_file is not None:
        yield min(config.api_keys(), default=None), arguments
        return
    with tempfile.NamedTemporaryFile("w", prefix="kvloom-") as file:
        key = secrets.token_hex()
        file.write(key)
        file.flush()
        yield key, [*arguments, "--api-key-file", file.name]


def whole_machine(config: Config) -> EngineSpec:
    """Returns one engine with the models and the cores of all engines of the config."""
    engines = config.engines
    models = {model.name: model for engine in engines for model in engine.models}
    return replace(
        engines[0],
        models=tuple(models.values()),
        kv_bytes=min(POOL, sum(engine.kv_bytes for engine in engines)),
        threads=sum(engine.threads for engine in engines),
        transport="shm",
    )


def measured_shape(executor: WatchedExecutor, model: ModelSpec) -> ModelShape:
    """Returns what the checkpoint's config says, and what attention was seen to keep."""
    geometry, folder = executor.geometries[model.name], Path(model.path)
    card = executor.cards[model.name]
    if not folder.is_dir():
        config = try_to_load_from_cache(model.path, CONFIG, revision=model.revision)
        folder = Path(config).parent if isinstance(config, str) else folder
    return replace(
        read_shape(folder, itemsize_of(card.dtype)),
        kv_dtype=None if card.kv_dtype == card.dtype else card.kv_dtype,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
    )


def errors_table(profile: Profile) -> Table:
    """Returns a table of how far the fit is from jobs that it has not seen."""
    rows = [
        (key, str(spread.rows), f"{spread.median:.1%}", f"{spread.p90:.1%}", f"{spread.bias:+.1%}")
        for key, spread in cross_validate(profile).items()
    ]
    return _table("Error on jobs that a fit has not seen", ("", "jobs", "median", "P90", "bias"), rows)


def overhead_table(profile: Profile) -> Table:
    """Returns a table of the CPU time that each role spends besides jobs."""
    rows = [
        (
            one.role,
            *(f"{1e6 * seconds:,.1f}" for seconds in (one.request, one.prompt, one.token, one.turn)),
        )
        for one in profile.overheads
    ]
    heads = ("", "a request", "a token of a prompt", "a token", "each time tokens come")
    return _table("Microseconds of CPU besides jobs", heads, rows)


def factors_table(profile: Profile) -> Table:
    """Returns a table of how many times longer than the fit says decode steps under an engine take, and mixed
    jobs."""
    cost = ProfiledCostModel(profile)
    rows = [(name, *(f"{factor:.2f}×" for factor in cost.factors(name))) for name in profile.shapes]
    return _table("Factors of jobs over the fit", ("", "decode steps", "mixed jobs"), rows)


def _table(title: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        table.add_row(*row)
    return table
