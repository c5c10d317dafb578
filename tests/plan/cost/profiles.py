"""A profile of a machine that is a formula."""

from __future__ import annotations

from kvloom.plan.cost.profile import Colocated, Computer, EngineStep, MeasuredJob, Profile, Timed
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=320, itemsize=4)
MODELS = ("one", "two")
CORES = 4
SLOWER = 1.4  # beside another on half of the cores


def true_seconds(work: Work) -> float:
    """What a job takes alone: on twice the cores 0.6 as long."""
    weight = 1.0 if work.model == "one" else 3.0
    hands: float = (work.share * CORES) ** -0.737
    if work.phase is Phase.DECODE:
        steps = 2e-3 + 1e-4 * work.batch + 5e-5 * max(0, work.batch - 16)
        return weight * hands * (steps + 2e-7 * work.context)
    tokens = 1e-3 + 2e-4 * work.tokens
    return weight * hands * (tokens + 1e-8 * work.pairs + 1e-6 * work.context + 1e-4 * work.batch)


def works(model: str, share: float) -> list[Work]:
    found = []
    for size in (1, 4, 16, 64, 128):
        found += [Work.decode(model, share, [context] * size) for context in (16, 200, 1000)]
        found += [Work.prefill(model, share, [4 * size] * prompts) for prompts in (1, 3)]
        tokens, context = 4 * size, 700
        pairs = tokens * context + tokens * (tokens + 1) // 2
        found.append(Work(model, Phase.PREFILL, share, 1, tokens, 1, pairs, context))
    return found


def make_profile() -> Profile:
    jobs, colocated = [], []
    for model in MODELS:
        for cores in (1, 2, 4):
            for work in works(model, cores / CORES):
                took = true_seconds(work)
                jobs.append(Timed(job=MeasuredJob.of(work, cores), seconds=(took, 0.99 * took, 9 * took)))
        work, other = Work.prefill(model, 0.5, [256]), Work.decode("one", 0.5, [100] * 8)
        for job, beside in ((work, other), (other, work)):
            alone = true_seconds(job)
            colocated.append(
                Colocated(
                    job=MeasuredJob.of(job, 2),
                    beside=MeasuredJob.of(beside, 2),
                    alone=alone,
                    seconds=SLOWER * alone,
                )
            )
    return Profile(
        computer=Computer(cpu="a formula", cores=CORES, memory=1 << 30, load=0.0, system="none", versions={}),
        cores=CORES,
        block_bytes=4096,
        temperature=0.0,
        shapes=dict.fromkeys(MODELS, SHAPE),
        jobs=tuple(jobs),
        colocated=tuple(colocated),
        steps=tuple(
            EngineStep(model="one", sequences=n, gap=1e-4 + 1e-5 * n, step=step, context=16 * n)
            for n in (1, 8, 64)
            for step in (true_seconds(Work.decode("one", 1.0, [16] * n)),)
        ),
    )
