"""Prefill jobs on a device: their inputs and their forward, the draws of any job, and the forwards that are
run at the start to see that a model works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvloom.exec.cuda.device import GpuDevice
from kvloom.exec.cuda.model import DecodeState, DeviceModel, DevicePageMap, Places, PrefillState
from kvloom.exec.cuda.staging import Staging, widened
from kvloom.exec.sampler import draw, sample
from kvloom.kernels.draw_reference import streams
from kvloom.kv.arena import view_blocks
from kvloom.types.geometry import AnyArray
from kvloom.types.job import Job, PageCopy, SampleRow
from kvloom.types.request import SamplingParams, TokenLogprob

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draws:
    """The tokens that a job is to draw."""

    rows: tuple[SampleRow, ...]
    greedy: bool  # whether the largest logit is all that anybody wants
    arrays: dict[str, AnyArray]
    """Arrays of [R] each, but stream [steps, R], to be sent with the job's inputs. They are empty if the
    draw is greedy, and if the host has a say in it (penalties, masks, log-probabilities)."""

    @classmethod
    def of(cls, rows: tuple[SampleRow, ...], steps: int = 1) -> Draws:
        if all(row.params.plain and row.allowed is None for row in rows):
            return cls(rows, True, {})
        if not all(_simple(row) for row in rows):
            return cls(rows, False, {})
        params = [row.params for row in rows]
        keys = np.asarray([row.key for row in rows], dtype=np.uint64)
        indices = np.asarray([row.index for row in rows]) + np.arange(steps)[:, None]
        numbers = {name: [getattr(one, name) for one in params] for name in ("temperature", "top_p", "min_p")}
        arrays: dict[str, AnyArray] = {
            **{name: np.asarray(values, dtype=np.float32) for name, values in numbers.items()},
            "top_k": np.asarray([one.top_k for one in params], dtype=np.int64),
            "stream": streams(keys, indices),
        }
        return cls(rows, False, arrays)

    @property
    def on_device(self) -> bool:
        """Whether the host has no say."""
        return self.greedy or bool(self.arrays)

    def take(
        self, logits: Tensor, sent: Mapping[str, Tensor], step: int = 0
    ) -> tuple[Tensor, Sequence[TokenLogprob | None]]:
        """Takes logits [R, V] of a step and the arrays on the device, and returns ids [R] there, and
        log-probabilities if they were asked for. It waits for the device only if the host has a say."""
        if self.on_device:
            ids = logits.argmax(-1)
            if self.arrays:
                names = ("temperature", "top_k", "top_p", "min_p")
                numbers = [*(sent[name] for name in names), sent["stream"][step]]
                drawn = draw(logits.float(), *numbers)
                ids = torch.where(sent["temperature"] > 0, drawn, ids)
            return ids, ()
        tokens, reports = sample(logits, self.rows)
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device), reports


def _simple(row: SampleRow) -> bool:
    """Returns whether the draw is from the logits as they are."""
    params = row.params
    bent = params.penalised or params.logit_bias or (params.min_tokens and params.stop_token_ids)
    return not bent and row.allowed is None and params.logprobs is None and params.guide is None


def prefill_inputs(job: Job) -> dict[str, AnyArray]:
    """Returns the arrays that a forward needs on the device; those of a recording come first."""
    plan = job.plan
    return {
        "tokens": job.tokens,
        "positions": plan.positions,
        "slot_page": plan.slot_page,
        "slot_offset": plan.slot_offset,
        "starts": plan.starts.astype(np.int32),
        "cu_seqlens": np.concatenate(([0], np.cumsum(plan.appends))).astype(np.int32),
        "kept": job.kept,
        "tables": widened(plan.tables),
    }


def run_prefill(
    model: DeviceModel,
    arrays: Mapping[str, Tensor],
    multiprocessors: int,
    written: Callable[[int], None] = lambda layer: None,
    poll: Callable[[], None] = lambda: None,
) -> Tensor:
    """Returns the logits of the rows `kept` [R, V]. multiprocessors, written, poll: see `PrefillState`."""
    places = Places(
        model.arena, model.page_map.blocks, arrays["tables"], arrays["slot_page"], arrays["slot_offset"]
    )
    new = arrays["starts"], arrays["cu_seqlens"]
    state = PrefillState(model.operations, places, *new, multiprocessors, written, poll)
    return model.logits(arrays["tokens"], arrays["positions"], state, arrays["kept"])


def rehearse(model: DeviceModel, tokens: int, device: GpuDevice) -> None:
    """Runs a prefill of so many tokens that are written nowhere, copies of no tokens, a draw, and the kernel
    that leads from one step to the next, so that all of them are compiled."""
    lane, none = device.partitions.whole, np.zeros(tokens, dtype=np.int32)
    draws = Draws.of((SampleRow(0, 0, 0, SamplingParams(max_tokens=1, seed=0, temperature=1.0)),))
    arrays: dict[str, AnyArray] = {
        "tokens": np.zeros(tokens, dtype=np.int64),
        "positions": np.arange(tokens),
        "slot_page": none - 1,
        "slot_offset": none,
        "tables": widened(np.zeros((1, model.geometry.pages(tokens)), dtype=np.int32)),
        "starts": none[:1],
        "cu_seqlens": np.asarray([0, tokens], dtype=np.int32),
        "kept": np.asarray([tokens - 1]),
        "lengths": none[:1],
        **draws.arrays,
        **model.copies((PageCopy(0, 0, 0),)),
    }
    with torch.inference_mode(), lane.entered():
        sent = Staging(device).send(arrays)
        model.copy_pages(sent)
        model.rehearse_sends(sent)
        logits = run_prefill(model, sent.arrays, lane.compute)
        ids, _ = draws.take(logits, sent.arrays)
        model.advance(sent, ids)
    lane.mark().wait()


_CLOSE: Final = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}  # of the largest logit


def prove_flash(model: DeviceModel, device: GpuDevice) -> DeviceModel:
    """Returns the model with FlashAttention or without it, and logs which. FlashAttention stays if the logits
    of a short prompt, in two parts and a decode step, are those that the kernels here give: a package may be
    built without a form of attention, or not for this torch. A model that has been compared before stays as
    it is."""
    if model.proved:
        return model
    model, flash = replace(model, proved=True), model.operations.flash
    if flash is None:
        _log.info("%s attends by kvloom's kernels", model.card.name)
        return model
    own = replace(model, operations=replace(model.operations, flash=None))
    try:
        found, wanted = (_short_logits(one, device) for one in (model, own))
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
        why = f"its logits differ by {error:.1e}"
        if error < _CLOSE[model.arena.dtype]:
            _log.info("%s attends by FlashAttention 3: %s", model.card.name, flash.name)
            return model
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        why = " ".join(str(error).split())[:200]
    _log.warning("%s attends by kvloom's kernels, and not by %s: %s", model.card.name, flash.name, why)
    return own


def _short_logits(model: DeviceModel, device: GpuDevice) -> Tensor:
    """Returns logits [3, V], float32, of a prompt's last tokens over two pages of an arena of its own: of its
    first part, of its second, and of a decode step."""
    geometry, pages, width = model.geometry, 2, max(2, model.widest(2))  # as wide as a recording's
    size = geometry.tokens_per_block
    count = min(size + 2, model.card.context_length)
    memory = torch.zeros(
        pages * geometry.blocks_per_page * geometry.block_bytes, dtype=torch.uint8, device=device.torch
    )
    arena = view_blocks(memory, geometry.block_bytes, geometry.head_dim, model.arena.dtype)
    page_map = DevicePageMap(geometry, pages, device.torch)
    page_map.blocks.copy_(torch.arange(page_map.blocks.numel()).view(page_map.blocks.shape))
    short, found, lane = replace(model, arena=arena, page_map=page_map), [], device.partitions.whole
    with torch.inference_mode(), lane.entered():
        for start, end in ((0, count - 2), (count - 2, count - 1), (count - 1, count)):
            positions = np.arange(start, end)
            arrays: dict[str, AnyArray] = {
                "tokens": positions % model.card.vocab_size,
                "positions": positions,
                "slot_page": (positions // size).astype(np.int32),
                "slot_offset": (positions % size).astype(np.int32),
                "starts": np.asarray([start], dtype=np.int32),
                "cu_seqlens": np.asarray([0, end - start], dtype=np.int32),
                "lengths": np.asarray([end], dtype=np.int32),
                "kept": np.asarray([end - start - 1]),
                "tables": np.pad(np.arange(pages, dtype=np.int32), (0, width - pages))[None],
            }
            sent = Staging(device).send(arrays).arrays
            if end < count:
                found.append(run_prefill(short, sent, lane.compute))
                continue
            places = Places(arena, page_map.blocks, sent["tables"], sent["slot_page"], sent["slot_offset"])
            state = DecodeState(short.operations, places, sent["lengths"], lane.compute)
            found.append(short.logits(sent["tokens"], sent["positions"], state))
        lane.mark().wait()
    return torch.cat(found).float()
