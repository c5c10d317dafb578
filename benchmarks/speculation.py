"""The pace of requests with drafts against the same engine without, and whether tokens are alike.

python -m benchmarks.speculation [--shape A] [--rounds 5] [--requests 0] [--only TEXT]. Engines in this
process have one random checkpoint, and some of them speculate. They take the same requests in turns, and a
ratio is the median of the rounds' ratios. Texts: `repeats`, greedy, which goes round in circles as random
weights with tied embeddings do; `random`, in which nothing comes twice; `few tokens`, random out of 8 tokens,
so that n-grams are found all the time and foretell nothing; `sampled`, drawn at a low temperature.
--requests: as many short requests of the first three kinds, with n-grams and without, 16 at a time, whose
tokens are compared. --only: the rows in whose names TEXT stands, of which more rounds can be made in the same
time.

A model drafts for one of shape `PAIR`: its own first layer, with the embedding and the head. The large one's
other layers are made to change little, by `REST`, so that both agree as often as that has it: nothing was
trained, and the figure says what agreement brings, and not how often models agree. `stranger` is a model of
the same size with other weights, which is hardly ever right.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec.structs import replace
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.engines import MODEL, spec_of
from benchmarks.places import BENCH, checkpoint
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import load_executor
from kvloom.types.clock import WallClock
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent
from kvloom.types.spec import EngineSpec, ModelSpec
from kvloom.types.transfer import NoTransport

PAIR: Final = "A"
DRAFT: Final = "draft"
REST: Final = 0.1  # of what all layers but the first of the large model add
WORDS: Final = 8000  # of the vocabulary, from which prompts are drawn
MANY: Final = 16
LEAST_REPEATED: Final = 1.6
LEAST: Final = 0.97


def _bodies(kind: str, seed: int, count: int, tokens: int) -> list[StartGenerate]:
    rng, made = random.Random(seed), list[StartGenerate]()
    for i in range(count):
        prompt = [rng.randrange(300, WORDS) for _ in range(40)]
        more: dict[str, Any] = {}
        if kind == "random":
            more = {"temperature": 1.5}
        if kind == "few tokens":
            more = {"temperature": 1.0, "logit_bias": dict.fromkeys(prompt[:8], 100.0)}
        if kind == "sampled":
            more = {"temperature": 0.05}
        sampling = SamplingParams(max_tokens=tokens, seed=seed + i, **more)
        made.append(
            StartGenerate(model=MODEL, request=f"{kind}-{seed}-{i}", prompt=prompt, sampling=sampling)
        )
    return made


async def _tokens(engine: Engine, body: StartGenerate) -> list[int]:
    return [
        event.token
        async for frame in engine.start_generate(body)
        for event in frame
        if isinstance(event, TokenEvent)
    ]


async def _seconds(engine: Engine, bodies: list[StartGenerate]) -> tuple[float, list[list[int]]]:
    """Returns the seconds from the first token's request to the last token, of all together."""
    began = time.perf_counter()
    found = await asyncio.gather(*(_tokens(engine, body) for body in bodies))
    return time.perf_counter() - began, found


def _pair() -> dict[str, Path]:
    """Returns the checkpoints of the large model, of the one that drafts for it, and of a stranger of that
    one's size, which are made on first use."""
    made = {name: BENCH / "checkpoints" / f"{PAIR}-{name}" for name in ("pair", DRAFT, "stranger")}
    if all((path / "model.safetensors").exists() for path in made.values()):
        return made
    for name, path in made.items():
        model = AutoModelForCausalLM.from_pretrained(checkpoint(PAIR))
        layers = model.model.layers
        if name == "stranger":
            for weight in model.parameters():
                weight.data = weight.data.flip(0)
        for layer in layers[1:]:
            layer.self_attn.o_proj.weight.data *= REST
            layer.mlp.down_proj.weight.data *= REST
        if name != "pair":
            del layers[1:]
            model.config.num_hidden_layers = 1
        model.save_pretrained(path)
        for file in checkpoint(PAIR).glob("*token*"):
            shutil.copy(file, path)
        for file in checkpoint(PAIR).glob("*.jinja"):
            shutil.copy(file, path)
    return made


def _spec(how: str, path: Path, threads: int, draft: Path | None = None) -> EngineSpec:
    spec = spec_of(PAIR, f"unit-{how}", kv_bytes=512 << 20, threads=threads)
    large = replace(spec.models[0], path=str(path), speculation=how)
    small = (ModelSpec(name=DRAFT, path=str(draft)),) if draft else ()
    return replace(spec, models=(large, *small))


@asynccontextmanager
async def _engine(spec: EngineSpec) -> AsyncIterator[Engine]:
    executor = load_executor(spec)
    engine = Engine(executor, NoTransport(spec.unit), spec, WallClock())
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
    executor.close()


CASES: Final = (
    ("repeats", 1),
    ("random", 1),
    ("few tokens", 1),
    ("repeats", MANY),
    ("random", MANY),
    ("few tokens", MANY),
)
DRAFT_CASES: Final = (("sampled", 1), ("sampled", MANY))


@dataclass
class _Measured:
    """What has been measured so far."""

    rows: list[list[Cell]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    raw: dict[str, object] = field(default_factory=dict)


async def _compare(
    found: _Measured,
    what: str,
    plain: Engine,
    drafting: Engine,
    case: tuple[str, int],
    rounds: int,
    tokens: int,
) -> None:
    """Measures one kind of text, so many requests at a time, on both sides in turns. what: who drafts."""
    name = _name(what, case)
    (kind, count), ratios, paces = case, list[float](), list[float]()
    before = (await drafting.load()).models[MODEL]
    for seed in range(rounds + 1):
        bodies = _bodies(kind, 1000 * seed + count, count, tokens)
        sides = (plain, drafting) if seed % 2 else (drafting, plain)
        took = {id(side): await _seconds(side, bodies) for side in sides}
        if seed:  # the first round warms both
            ratios.append(took[id(plain)][0] / took[id(drafting)][0])
            paces.append(count * tokens / took[id(plain)][0])
    load = (await drafting.load()).models[MODEL]
    drafted = load.drafted_tokens_total - before.drafted_tokens_total
    right = load.accepted_tokens_total - before.accepted_tokens_total
    ratio = median(ratios)
    found.rows.append(
        [name, median(paces), median(paces) * ratio, ratio, right / drafted if drafted else 0.0]
    )
    wanted = LEAST_REPEATED if (what, kind, count) == ("n-grams", "repeats", 1) else LEAST
    found.findings.append(Finding(what=name, value=ratio, unit="×", least=wanted))
    found.raw[name] = ratios


def _name(what: str, case: tuple[str, int]) -> str:
    return f"{what}: {case[0]}, {case[1]} at a time"


async def measure(
    shape: str, rounds: int, requests: int, threads: int, tokens: int, only: str = ""
) -> Report:
    found = _Measured()
    async with AsyncExitStack() as stack:
        path = checkpoint(shape)
        plain = await stack.enter_async_context(_engine(_spec("none", path, threads)))
        drafting = await stack.enter_async_context(_engine(_spec("ngram", path, threads)))
        for case in CASES:
            if only in _name("n-grams", case):
                await _compare(found, "n-grams", plain, drafting, case, rounds, tokens)
        if requests:
            found.findings += await _compared(plain, drafting, requests)
    pair = _pair()
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(_engine(_spec("none", pair["pair"], threads)))
        for name in (DRAFT, "stranger"):
            spec = _spec(DRAFT, pair["pair"], threads, pair[name])
            drafting = await stack.enter_async_context(_engine(spec))
            for case in DRAFT_CASES:
                what = "its first layer" if name == DRAFT else "a stranger"
                if only in _name(what, case):
                    await _compare(found, what, plain, drafting, case, rounds, tokens)
    return Report(
        name="speculation",
        title=f"Tokens a second without drafts and with them: n-grams with shape {shape}, models with {PAIR}",
        columns=["who drafts, and what", "none", "with", "ratio", "right of drafted"],
        rows=found.rows,
        findings=found.findings,
        machine=this_machine(),
        raw=found.raw,
    )


async def _compared(plain: Engine, drafting: Engine, requests: int) -> list[Finding]:
    kinds, unlike = ("repeats", "random", "few tokens"), 0
    for at in range(0, requests, MANY):
        bodies = [
            _bodies(kinds[i % 3], 7_000_000 + at + i, 1, 24)[0] for i in range(min(MANY, requests - at))
        ]
        (_, one), (_, other) = await _seconds(plain, bodies), await _seconds(drafting, bodies)
        unlike += sum(a != b for a, b in zip(one, other, strict=True))
    load = (await drafting.load()).models[MODEL]
    return [
        Finding(what=f"of {requests:,} requests have other tokens", value=unlike, most=0),
        Finding(what="drafted tokens", value=load.drafted_tokens_total),
        Finding(what="of them right", value=load.accepted_tokens_total, least=1),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="A")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--only", default="", help="rows in whose names this stands")
    o = parser.parse_args()
    publish(asyncio.run(measure(o.shape, o.rounds, o.requests, o.threads, o.tokens, o.only)), Console())


if __name__ == "__main__":
    main()
