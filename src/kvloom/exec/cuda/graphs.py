"""One model's decode steps and short prefills on one lane, recorded once for each size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvloom.exec.cuda.device import PartitionLane, Recording
from kvloom.exec.cuda.model import DecodeState, DeviceModel, Places
from kvloom.exec.cuda.prefill import prefill_inputs, run_prefill
from kvloom.exec.cuda.staging import Layout, SentInputs, padded, widened
from kvloom.types.errors import Unavailable
from kvloom.types.geometry import AnyArray
from kvloom.types.job import Job

_log = logging.getLogger(__name__)

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Returns the sizes to record, the largest first, so that the smaller ones fit into its memory."""
    more = range(BUCKETS[-1] * 2, most + BUCKETS[-1], BUCKETS[-1]) if most > BUCKETS[-1] else ()
    sizes = sorted({min(size, most) for size in (*BUCKETS, *more)})
    return tuple(reversed(sizes))


PROMPT_TOKENS: Final = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536)
"""The tokens of prefills that are recorded, as far as `WORK` allows."""
PROMPTS: Final = 8
"""Sequences of a recorded prefill."""
WORK: Final = 1 << 37
"""The tokens of a prefill times the parameters of a layer, by estimate, for which the device takes as long as
the host does to ask for that layer. If there are more, padding costs more than a recording spares."""
PADDING: Final = 1 / 8
"""The part of a whole chunk that may be padding, if it is recorded for the sake of those that have none."""


def most_padded(parameters: int, layers: int) -> int:
    """Returns the tokens up to which prefills run by the next larger recording, whatever the padding."""
    return WORK * layers // max(1, parameters)


def prefill_sizes(chunk: int, parameters: int, layers: int) -> tuple[int, ...]:
    """Returns the tokens of the prefills to record for a model, the largest first: `chunk`, of which no job
    has more, and others up to `most_padded`."""
    most = most_padded(parameters, layers)
    return tuple(sorted({chunk, *(size for size in PROMPT_TOKENS if size <= min(most, chunk))}, reverse=True))


def fitting(most: int, rows: int) -> int:
    """Returns the size to record for a batch of `rows`; 0 if it is larger than all."""
    return min((size for size in buckets_up_to(most) if size >= rows), default=0)


class Buffers:
    """The memory that all recordings of a lane read and write: they run one after the other."""

    def __init__(self, rows: int, pages: int, chunk: int, device: torch.device) -> None:
        """rows: sequences of the largest batch. chunk: tokens of the largest prefill."""
        self.rows = rows
        self.prompts = min(rows, PROMPTS)
        sizes = Layout(_arrays(rows)).size, Layout(_prompt_arrays(chunk, self.prompts)).size
        self.inputs = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        self.tables = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self._logits = torch.empty(0, dtype=torch.uint8, device=device)

    def logits(self, like: Tensor) -> Tensor:
        """Returns room for such logits. A larger one is made when it is needed; recordings keep theirs."""
        size = like.numel() * like.itemsize
        if self._logits.numel() < size:
            self._logits = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._logits[:size].view(like.dtype).view(like.shape)


@dataclass(frozen=True, slots=True)
class _Step:
    rows: int  # of tokens
    pages: int  # of a sequence, at most
    recording: Recording
    logits: Tensor


def _record(
    model: DeviceModel,
    lane: PartitionLane,
    buffers: Buffers,
    arrays: Mapping[str, AnyArray],
    tables: Tensor,
    forward: Callable[[Mapping[str, Tensor]], Tensor],
    unasked: Callable[[], AbstractContextManager[None]],
) -> _Step | None:
    """Records a forward over inputs like `arrays`, padding alone, and `tables`. Returns None if the model
    cannot be recorded. Raises torch's OutOfMemoryError."""
    views = Layout(arrays).views(buffers.inputs)
    inputs = {**views, "tables": tables}

    def step() -> None:
        logits.copy_(forward(inputs))

    try:
        with torch.inference_mode(), lane.entered():
            for name, array in arrays.items():
                views[name].copy_(torch.from_numpy(array))
            logits = buffers.logits(forward(inputs))
            with unasked():
                step()  # has compiled and loaded all that it needs
            recording = lane.record(step)
    except torch.OutOfMemoryError:
        raise  # at one rank alone, perhaps: what the others exchange would not be what this one does
    except (RuntimeError, Unavailable) as error:  # one of an exchange between ranks among them
        _log.warning("%s runs without graphs: %s", model.card.name, " ".join(str(error).split())[:200])
        return None
    return _Step(len(arrays["tokens"]), tables.shape[1], recording, logits)


def _replay(step: _Step, arrays: Mapping[str, AnyArray], buffers: Buffers, sent: SentInputs) -> None:
    """Runs a recording for the inputs that were sent. Their first arrays are like `arrays`, for which it was
    recorded."""
    tables, size = sent.arrays["tables"], Layout(arrays).size
    width = min(tables.shape[1], buffers.tables.shape[1])
    buffers.inputs[:size].copy_(sent.memory[:size])
    buffers.tables[: len(tables), :width].copy_(tables[:, :width])
    step.recording.replay()


class DecodeSteps:
    """Runs a batch by the smallest recording that holds it; if there is none, without a recording. poll:
    called after each layer's attention, and recorded with it. state: what layers call."""

    def __init__(
        self,
        model: DeviceModel,
        lane: PartitionLane,
        buffers: Buffers,
        poll: Callable[[], None] = lambda: None,
        state: Callable[..., DecodeState] = DecodeState,
    ) -> None:
        self._model = model
        self._lane = lane
        self._buffers = buffers
        self._poll = poll
        self._state = state
        self._pages = model.geometry.pages(model.card.context_length)
        self._steps: list[_Step] = []  # the smallest first
        self._short: set[int] = set()  # sizes for which there was no room

    def record(self, rows: int, unasked: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Records for batches of up to `rows` sequences. unasked: a context in which a step that waits for
        the device raises an error, so that it is found before recording. Returns False if the model cannot be
        recorded, and runs step by step. Raises torch's OutOfMemoryError."""
        for pages in self._model.widths(rows):
            tables = self._buffers.tables[:rows, :pages]
            step = _record(
                self._model, self._lane, self._buffers, _arrays(rows), tables, self._forward, unasked
            )
            if step is None:
                return False
            self._steps = sorted([*self._steps, step], key=lambda step: (step.rows, step.pages))
        return True

    def record_late(self, rows: int, plain: set[str]) -> None:
        """Records for a batch of `rows` while serving, if the device has room for it when it is first wanted,
        and the model is none of the `plain`, which cannot be recorded."""
        name, size = self._model.card.name, fitting(self._buffers.rows, rows)
        if not size or name in plain or size in self._short or any(s.rows == size for s in self._steps):
            return
        try:
            if not self.record(size):
                plain.add(name)
        except torch.OutOfMemoryError as error:
            self._short.add(size)
            _log.warning("%s decodes without a graph of %d rows: %s", name, size, str(error)[:200])

    def arrays(self, job: Job) -> dict[str, AnyArray]:
        """Returns the arrays that `run` needs on the device; those of a recording come first, as they lie in
        its inputs."""
        plan = job.plan
        step = self._step(job.tokens.size, plan.tables.shape[1])
        rows = step.rows if step else job.tokens.size
        positions = plan.positions
        if job.offloaded is not None:  # rows of their own, which have no place here
            positions = np.concatenate((positions, job.offloaded.plan.positions))
        fixed = {
            "tokens": padded(job.tokens, rows),
            "positions": padded(positions, rows),
            "slot_page": padded(plan.slot_page, rows, fill=-1),
            "slot_offset": padded(plan.slot_offset, rows),
            "lengths": padded((plan.starts + 1).astype(np.int32), rows),
        }
        return fixed | {"tables": padded(widened(plan.tables), job.tokens.size)}

    def run(self, sent: SentInputs) -> Tensor:
        """Returns logits [B, V], there until the lane's next step. The recording that `sent` was made for is
        used, whatever has been recorded since."""
        rows = len(sent.arrays["tokens"])
        step = self._step(rows, sent.arrays["tables"].shape[1])
        if step is None or step.rows != rows:
            return self._forward(sent.arrays)
        _replay(step, _arrays(rows), self._buffers, sent)
        return step.logits[: len(sent.arrays["tables"])]

    def _step(self, rows: int, pages: int) -> _Step | None:
        """Returns the smallest recording for so many rows and pages; tables are sent wider than that."""
        pages = min(pages, self._pages)
        return next((step for step in self._steps if step.rows >= rows and step.pages >= pages), None)

    def _forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        model, names = self._model, ("tables", "slot_page", "slot_offset")
        places = Places(model.arena, model.page_map.blocks, *(inputs[name] for name in names))
        state = self._state(model.operations, places, inputs["lengths"], self._lane.compute, self._poll)
        return model.logits(inputs["tokens"], inputs["positions"], state)


class PrefillSteps:
    """Runs prefills of few sequences by the smallest recording that holds them. It does so if they have few
    tokens, so that the host takes longer to ask for them than the device to compute them, or nearly as many
    tokens as the recording."""

    def __init__(self, model: DeviceModel, lane: PartitionLane, buffers: Buffers) -> None:
        self._model = model
        self._lane = lane
        self._buffers = buffers
        self._tables = buffers.tables[: buffers.prompts, : model.widest(buffers.prompts + 1)]
        self._padded = most_padded(model.card.parameters, model.geometry.layers)
        self._steps: list[_Step] = []  # the smallest first

    def record(self, tokens: int, unasked: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Records for up to `tokens` tokens; see `DecodeSteps.record`."""
        arrays = _prompt_arrays(tokens, self._buffers.prompts)
        step = _record(self._model, self._lane, self._buffers, arrays, self._tables, self._forward, unasked)
        if step is not None:
            self._steps = sorted([*self._steps, step], key=lambda step: step.rows)
        return step is not None

    def arrays(self, job: Job) -> dict[str, AnyArray] | None:
        """Returns the arrays that `run` needs on the device; None if the job fits no recording."""
        step = next((step for step in self._steps if step.rows >= job.tokens.size), None)
        kept, most = job.kept, self._buffers.prompts
        sequences, pages = job.plan.tables.shape
        if step is None or max(sequences, kept.size) > most or pages > step.pages:
            return None
        if step.rows > self._padded and step.rows - job.tokens.size > PADDING * step.rows:
            return None
        found, rows = prefill_inputs(job), step.rows
        for name, size, fill in (
            ("tokens", rows, 0),
            ("positions", rows, 0),
            ("slot_page", rows, -1),
            ("slot_offset", rows, 0),
            ("starts", most, 0),
            ("cu_seqlens", most + 1, job.tokens.size),
            ("kept", most, 0),
        ):
            found[name] = padded(found[name], size, fill)
        return found

    def run(self, sent: SentInputs, kept: int) -> Tensor:
        """Returns logits [kept, V], there until the lane's next step."""
        rows = len(sent.arrays["tokens"])
        step = next(step for step in self._steps if step.rows == rows)
        _replay(step, _prompt_arrays(rows, self._buffers.prompts), self._buffers, sent)
        return step.logits[:kept]

    def _forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return run_prefill(self._model, inputs, self._lane.compute)


def _padding(rows: int) -> dict[str, AnyArray]:
    """Returns those inputs of a job that have an entry for each row, of padding alone."""
    return {
        "tokens": np.zeros(rows, dtype=np.int64),
        "positions": np.zeros(rows, dtype=np.int64),
        "slot_page": np.full(rows, -1, dtype=np.int32),
        "slot_offset": np.zeros(rows, dtype=np.int32),
    }


def _arrays(rows: int) -> dict[str, AnyArray]:
    """Returns the inputs of a step of padding alone."""
    return {**_padding(rows), "lengths": np.zeros(rows, dtype=np.int32)}


def _prompt_arrays(tokens: int, prompts: int) -> dict[str, AnyArray]:
    """Returns the inputs of a prefill of padding alone, in the order of `prefill_inputs`."""
    return {
        **_padding(tokens),
        "starts": np.zeros(prompts, dtype=np.int32),
        "cu_seqlens": np.zeros(prompts + 1, dtype=np.int32),
        "kept": np.zeros(prompts, dtype=np.int64),
    }
