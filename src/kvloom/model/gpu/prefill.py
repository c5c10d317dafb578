"""A prefill job on a device: its inputs and its forward, which is not recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from kvloom.core.arrays import AnyArray
from kvloom.core.job import Job, SampleRow
from kvloom.core.plan import PageCopy
from kvloom.core.sampling import SamplingParams
from kvloom.model.gpu.device import Device
from kvloom.model.gpu.model import DeviceModel
from kvloom.model.gpu.partitions import Lane
from kvloom.model.gpu.sampling import Draws
from kvloom.model.gpu.staging import Sent, Staging, widened
from kvloom.model.gpu.state import Places, PrefillState


def _inputs(job: Job) -> dict[str, AnyArray]:
    """What a forward needs on the device."""
    plan = job.plan
    return {
        "tokens": job.tokens,
        "positions": plan.positions,
        "slot_page": plan.slot_page,
        "slot_offset": plan.slot_offset,
        "tables": widened(plan.tables),
        "starts": plan.starts.astype(np.int32),
        "begins": np.concatenate(([0], np.cumsum(plan.appends))).astype(np.int32),
        "kept": job.kept,
    }


def _run(
    model: DeviceModel, arrays: Mapping[str, Tensor], written: Callable[[int], None], poll: Callable[[], None]
) -> Tensor:
    """→ logits of the rows `kept` [R, V]. written, poll: see `PrefillState`."""
    places = Places(
        model.arena, model.page_map.blocks, arrays["tables"], arrays["slot_page"], arrays["slot_offset"]
    )
    state = PrefillState(model.operations, places, arrays["starts"], arrays["begins"], written, poll)
    return model.logits(arrays["tokens"], arrays["positions"], state, arrays["kept"])


def ask_prefill(
    model: DeviceModel, job: Job, lane: Lane, staging: Staging, draws: Draws, poll: Callable[[], None]
) -> tuple[Tensor, Sent]:
    """In a turn of the lane → logits [samples and prompts, V], and what was sent. poll: as of a state."""
    plan, arrays = job.plan, _inputs(job) | draws.arrays | model.copies(job.plan.copies)
    sent = model.page_map.refresh(plan, lane, lambda rows: staging.send({**arrays, **rows}))
    model.copy_pages(sent)

    def written(layer: int) -> None:
        for send in plan.sends:
            send.shipment.put(send.parcel(plan.page_map, layer))

    return _run(model, sent.arrays, written, poll), sent


def rehearse(model: DeviceModel, tokens: int, device: Device) -> None:
    """A prefill of so many tokens that are written nowhere, a copy of no tokens, a draw, and what lies
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
        logits = _run(model, sent.arrays, lambda layer: None, lambda: None)
        ids, _ = draws.take(logits, sent.arrays)
        model.advance(sent, ids)
    lane.mark().wait()
