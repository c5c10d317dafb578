"""Prefill jobs on a device: the inputs and the forward of one, and the draws of any job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvloom.exec.cuda.device import GpuDevice
from kvloom.exec.cuda.model import DeviceModel, Places, PrefillState
from kvloom.exec.cuda.staging import Staging, widened
from kvloom.exec.sampler import draw, sample
from kvloom.kernels.draw_reference import streams
from kvloom.types.geometry import AnyArray
from kvloom.types.job import Job, PageCopy, SampleRow
from kvloom.types.request import SamplingParams, TokenLogprob


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
        """Takes logits [R, V] of a step and the arrays on the device, and returns ids [R] there, and what was
        asked for beside, if anything was. It waits for the device only if the host has a say."""
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
    """Returns what a forward needs on the device; the arrays of a recording come first."""
    plan = job.plan
    return {
        "tokens": job.tokens,
        "positions": plan.positions,
        "slot_page": plan.slot_page,
        "slot_offset": plan.slot_offset,
        "starts": plan.starts.astype(np.int32),
        "begins": np.concatenate(([0], np.cumsum(plan.appends))).astype(np.int32),
        "kept": job.kept,
        "tables": widened(plan.tables),
    }


def run_prefill(
    model: DeviceModel, arrays: Mapping[str, Tensor], written: Callable[[int], None], poll: Callable[[], None]
) -> Tensor:
    """Returns the logits of the rows `kept` [R, V]. written, poll: see `PrefillState`."""
    places = Places(
        model.arena, model.page_map.blocks, arrays["tables"], arrays["slot_page"], arrays["slot_offset"]
    )
    state = PrefillState(model.operations, places, arrays["starts"], arrays["begins"], written, poll)
    return model.logits(arrays["tokens"], arrays["positions"], state, arrays["kept"])


def rehearse(model: DeviceModel, tokens: int, device: GpuDevice) -> None:
    """Runs a prefill of so many tokens that are written nowhere, copies of no tokens, a draw, and what lies
    between two steps, so that their kernels are compiled."""
    lane, none = device.partitions.whole, np.zeros(tokens, dtype=np.int32)
    draws = Draws.of((SampleRow(0, 0, 0, SamplingParams(max_tokens=1, seed=0, temperature=1.0)),))
    arrays: dict[str, AnyArray] = {
        "tokens": np.zeros(tokens, dtype=np.int64),
        "positions": np.arange(tokens),
        "slot_page": none - 1,
        "slot_offset": none,
        "tables": widened(np.zeros((1, model.geometry.pages(tokens)), dtype=np.int32)),
        "starts": none[:1],
        "begins": np.asarray([0, tokens], dtype=np.int32),
        "kept": np.asarray([tokens - 1]),
        "lengths": none[:1],
        **draws.arrays,
        **model.copies((PageCopy(0, 0, 0),)),
    }
    with torch.inference_mode(), lane.entered():
        sent = Staging(device).send(arrays)
        model.copy_pages(sent)
        model.rehearse_sends(sent)
        logits = run_prefill(model, sent.arrays, lambda layer: None, lambda: None)
        ids, _ = draws.take(logits, sent.arrays)
        model.advance(sent, ids)
    lane.mark().wait()
