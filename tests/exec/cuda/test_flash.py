"""FlashAttention 3 behind the GPU's executor: a twin of its function gives what the kernels here give."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.engine.engine import Engine
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.operations import Operations, plain_operations
from kvloom.kernels import reference
from kvloom.kernels.cuda.flash import FlashAttention, HeadSequences, find_flash
from tests.checkpoints import make_checkpoint
from tests.engines import Answer, ask, body, running, spec_of
from tests.exec.cuda.devices import COMPUTE
from tests.exec.cuda.engines import running_on_device
from tests.exec.cuda.flash import flash, flash_attn_with_kvcache
from tests.kernels.paged import paged

FORMS = [
    {},
    {"window": 1},
    {"window": 5, "softcap": 2.0},
    {"group": 1, "kv_heads": 3, "tokens": 1},
    {"group": 5, "kv_heads": 1, "tokens": 37, "waste": 60, "window": 40},
]
BLOCKS = 3  # of a page of `a`
PROMPTS = [[(11 * i + 3 * j) % 250 for j in range(7 + 9 * i)] for i in range(4)]
TABLES = plain_operations().block_tables


def split(form: dict[str, Any]) -> tuple[dict[str, Any], tuple[float, int, float]]:
    """Returns what a pool is made of, and scale, window and softcap."""
    rest = {name: value for name, value in form.items() if name not in ("window", "softcap")}
    return rest, (0.3, form.get("window", 0), form.get("softcap", 0.0))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_decode_step_is_that_of_the_kernels(form: dict[str, Any]) -> None:
    """With a row of padding, and q a part of wider rows."""
    pool, scoring = split(form)
    p = paged(3, [1, 40, 0, 77], **pool)
    q, size = p.queries(4), p.arena.shape[2]
    heads = HeadSequences.of_steps(TABLES, p.page_map, p.tables, p.lengths, size)
    out, wanted = flash().attend(q, p.arena, heads, 1, *scoring, multiprocessors=2), torch.empty_like(q)
    reference.decode_attention(wanted, q, *p.cache, p.lengths, *scoring)
    torch.testing.assert_close(out[p.lengths > 0], wanted[p.lengths > 0], rtol=2e-5, atol=2e-5)
    assert not out[2].any()
    assert out.is_contiguous()  # others' rows are written into it


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_prefill_is_that_of_the_kernels(form: dict[str, Any]) -> None:
    """Prompts that are new, in part cached, cached but for a token, and empty, with rows of padding."""
    pool, scoring = split(form)
    p, new = paged(4, [33, 90, 12, 5], **pool), torch.tensor([33, 40, 1, 0], dtype=torch.int32)
    starts, begins = p.lengths - new, F.pad(new.cumsum(0), (1, 0)).int()
    q, size = p.queries(int(new.sum()) + 3), p.arena.shape[2]
    heads = HeadSequences.of_prompts(TABLES, p.page_map, p.tables, starts, begins, len(q), size)
    out, wanted = flash().attend(q, p.arena, heads, 1, *scoring, multiprocessors=2), torch.zeros_like(q)
    reference.prefill_attention(wanted, q, *p.cache, starts, begins, *scoring)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


class Counted:
    """Operations with FlashAttention's twin, which count what attends."""

    def __init__(self, **how: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.margins: set[int] = set()
        plain = plain_operations()

        def watched(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def attend(*given: Any, **named: Any) -> Any:
                if name == "flash":
                    self.margins.add(named["sm_margin"])
                    self.calls["steps"] += named["cu_seqlens_q"] is None
                self.calls[name] += 1
                return run(*given, **named)

            return attend

        self.operations: Operations = replace(
            plain,
            decode_attention=watched("own", plain.decode_attention),
            prefill_attention=watched("own", plain.prefill_attention),
            flash=flash(watched("flash", flash_attn_with_kvcache), **how),
        )


async def answers(engine: Engine) -> list[dict[int, list[int]]]:
    """Returns the tokens of prompts side by side, the last alone in the end; and then of one of many pages.
    They are greedy and drawn, and one begins like another, so that it may read what that has cached."""
    prompts, long = [*PROMPTS, [*PROMPTS[3], 1, 2]], [(7 * j) % 250 for j in range(200)]
    found: list[Answer] = []
    for name in ("a", "b"):
        bodies = [
            body(name, prompt, max_tokens=10 + 10 * i, temperature=i % 2) for i, prompt in enumerate(prompts)
        ]
        found += await asyncio.gather(*(ask(engine, one) for one in bodies))
        found.append(await ask(engine, body(name, long, max_tokens=10)))
    return [answer.tokens for answer in found]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """gemma2 has windows and bent scores."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(folder / name, kind) for name, kind in (("a", "qwen3"), ("b", "gemma2"))}


@pytest.fixture(scope="module")
def wanted(paths: dict[str, Path]) -> list[dict[int, list[int]]]:
    async def run() -> list[dict[int, list[int]]]:
        async with running(spec_of(paths)) as engine:
            return await answers(engine)

    return asyncio.run(run())


async def served(paths: dict[str, Path], counted: Counted) -> list[dict[int, list[int]]]:
    """What an engine with it answers. Only calls after its start are counted."""
    async with running_on_device(spec_of(paths, max_running=8), operations=counted.operations) as (engine, _):
        counted.calls.clear()
        counted.margins.clear()
        return await answers(engine)


def test_tokens_are_the_cpus_and_nothing_else_attends(
    paths: dict[str, Path], wanted: list[dict[int, list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Out of recordings, in jobs of several steps, on all of the device or a part, whose margin is kept."""
    caplog.set_level(logging.INFO)
    counted = Counted()
    assert asyncio.run(served(paths, counted)) == wanted
    assert counted.calls["own"] == 0 < counted.calls["flash"]
    assert counted.margins <= {0, COMPUTE // 2}
    assert COMPUTE // 2 in counted.margins
    for name in paths:
        assert f"{name} attends by FlashAttention 3: a twin" in caplog.messages


def test_batches_whose_tables_have_no_room_are_the_kernels(
    paths: dict[str, Path], wanted: list[dict[int, list[int]]]
) -> None:
    """There is room for one sequence of 16 pages of `a`, and for none of `b`."""
    counted = Counted(room=4 * 16 * BLOCKS)
    assert asyncio.run(served(paths, counted)) == wanted
    assert counted.calls["own"]
    assert counted.calls["steps"]


def _fails(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("This flash attention build does not support tanh softcapping.")


def _old(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    return q


def _wrong(*given: Any, **named: Any) -> Tensor:
    return flash_attn_with_kvcache(*given, **named | {"causal": False, "softmax_scale": 0.2})


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(_fails, "does not support tanh"), (_old, "unexpected keyword"), (_wrong, "its logits differ by ")],
)
def test_a_package_that_does_not_do_is_left_alone(
    paths: dict[str, Path], kernel: Callable[..., Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    operations = replace(plain_operations(), flash=flash(kernel))

    async def run() -> GpuExecutor:
        async with running_on_device(spec_of({"a": paths["a"]}, max_running=2), operations=operations) as (
            _,
            made,
        ):
            return made

    assert asyncio.run(run())._models["a"].operations.flash is None
    [line] = [line for line in caplog.messages if "a twin" in line]
    assert line.startswith("a attends by kvloom's kernels, and not by a twin: ")
    assert why in line


def test_what_it_cannot_attend_over_is_told() -> None:
    made = FlashAttention("it", flash_attn_with_kvcache, COMPUTE)
    for tokens, head_dim, dtype, why in (
        (32, 128, torch.bfloat16, ""),
        (64, 64, torch.float16, ""),
        (32, 128, torch.float32, "K and V are in float32"),
        (32, 20, torch.float16, "its heads have 20 numbers, and a multiple of 8 up to 256 is right"),
        (128, 64, torch.float16, "its blocks hold 128 tokens, and fewer than 128 are right"),
        (64, 256, torch.float16, "its blocks hold 64 tokens, and fewer than 64 are right"),
    ):
        assert made.refuses(torch.empty(1, 2, tokens, head_dim, dtype=dtype, device="meta")) == why


def test_the_package_is_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    here = {
        "no_such_module": "none",
        "tests.exec.cuda.devices": "without it",
        "tests.exec.cuda.flash": "torch",
    }
    found = find_flash((9, 0), COMPUTE, here)
    assert found is not None
    assert found.kernel is flash_attn_with_kvcache
    assert found.name == f"torch {torch.__version__}"
    assert ["without it is not used" in line for line in caplog.messages] == [True]
    assert find_flash((8, 0), COMPUTE, here) is None
    assert find_flash((9, 0), COMPUTE, {"no_such_module": "none"}) is None
