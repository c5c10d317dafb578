"""Adapters beside a fused decoder's weights: packed as the one-kernel step reads them, and applied to the
rows of each adapter when a forward runs layer by layer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvloom.exec.adapters import Adapter, LayerName, read_adapter
from kvloom.kernels.cpu.half import FORMATS
from kvloom.kernels.cpu.low_rank import RANK, RECORD, TABLE, LowRankArguments
from kvloom.kernels.cpu.panels import PANEL
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I64

QKV, O, GATED, DOWN = range(4)  # noqa: E741 -- as the layer is called
"""The stages of a layer: the inputs that its products have."""
STAGES: Final = (
    (("q_proj", "k_proj", "v_proj"),),
    (("o_proj",),),
    (("gate_proj",), ("up_proj",)),
    (("down_proj",),),
)
"""The products of each stage, and the linear layers that are side by side in each."""
BASE: Final = -1
"""Stands for the rows of the base itself."""
Shapes = Mapping[LayerName, tuple[int, int]]
_ITEMS: Final = 4  # a thread has of a stage's products with A, if there are as many


@dataclass(frozen=True, slots=True, eq=False)
class PanelRun:
    """Neighbouring panels that read the same columns of low: weights [panels, count, 64]."""

    first: int
    begin: int
    weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """An adapter's part of a stage: A of all its layers [rank, K], and of each product the runs of panels of
    B."""

    a: Tensor
    products: tuple[tuple[PanelRun, ...], ...]

    @property
    def bytes(self) -> int:
        return self.a.nbytes + sum(run.weights.nbytes for runs in self.products for run in runs)

    def add(self, x: Tensor, scale: float, outs: Sequence[Tensor], rows: Tensor) -> None:
        """Adds scale · (x · Aᵀ) · Bᵀ to the rows of outs, one for each product. x [N, K]: its rows alone are
        read."""
        first, last = int(rows[0]), int(rows[-1])
        run = slice(first, last + 1) if last - first + 1 == len(rows) else None  # which needs no copies
        low = (x[rows if run is None else run] @ self.a.float().t()).mul_(scale)
        for out, runs in zip(outs, self.products, strict=True):
            for one in runs:
                panels, count, _ = one.weights.shape
                b = one.weights.float().transpose(0, 1).reshape(count, panels * PANEL)
                columns = out[:, one.first * PANEL : (one.first + panels) * PANEL]
                part, b = low[:, one.begin : one.begin + count], b[:, : columns.shape[1]]
                if run is None:
                    columns.index_add_(0, rows, part @ b)
                else:
                    columns[run].addmm_(part, b)


class PackedAdapter:
    """An adapter's weights, and the records by which the kernel finds them."""

    def __init__(self, adapter: Adapter, shapes: Shapes) -> None:
        self.scale = adapter.scale
        self.digest = adapter.digest
        first = next(iter(adapter.weights.values()))[0]
        self.form = FORMATS[first.dtype]
        layers = 1 + max(layer for layer, _ in shapes)
        self.stages = [
            [_stage(adapter, shapes, layer, products) for products in STAGES] for layer in range(layers)
        ]
        self.bytes = sum(stage.bytes for stages in self.stages for stage in stages if stage is not None)
        self._tables: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
        self.records = np.zeros((layers, RECORD), np.int64)
        self.rank = 0  # the most columns of low that a stage has
        for record, stages in zip(self.records, self.stages, strict=True):
            which = 0
            for number, (stage, products) in enumerate(zip(stages, STAGES, strict=True)):
                if stage is not None:
                    record[number], record[RANK + number] = stage.a.data_ptr(), len(stage.a)
                    self.rank = max(self.rank, len(stage.a))
                    for i, runs in enumerate(stage.products):
                        record[TABLE + which + i] = self._table(runs)
                which += len(products)

    def _table(self, runs: Sequence[PanelRun]) -> int:
        """Returns the address of the table of a product's panels, or 0 if it has none."""
        if not runs:
            return 0
        last = runs[-1]
        table = np.zeros((last.first + len(last.weights), 3), np.int64)
        for run in runs:
            for i, panel in enumerate(run.weights):
                table[run.first + i] = panel.data_ptr(), run.begin, panel.shape[0]
        self._tables.append(table)
        address: int = table.ctypes.data
        return address


def _stage(adapter: Adapter, shapes: Shapes, layer: int, products: Sequence[Sequence[str]]) -> Stage | None:
    """Packs a layer's stage; None if the adapter changes none of its products."""
    rows, packed, begin = list[Tensor](), list[tuple[PanelRun, ...]](), 0
    for names in products:
        parts, at = list[tuple[int, int, Tensor]](), 0  # of the product: first output, first of low, B
        for name in names:
            outputs, _ = shapes[layer, name]
            if both := adapter.weights.get((layer, name)):
                a, b = both
                rows.append(a)
                parts.append((at, begin, b))
                begin += len(a)
            at += outputs
        packed.append(tuple(_runs(parts, at)))
    return Stage(torch.cat(rows).contiguous(), tuple(packed)) if rows else None


def _runs(parts: Sequence[tuple[int, int, Tensor]], width: int) -> Iterable[PanelRun]:
    """Packs B of layers that are side by side. A panel over the border of two reads the columns of low of
    both, with zeros where a layer has no part in it."""

    def columns(panel: int) -> tuple[int, int]:
        inside = [
            (begin, begin + b.shape[1])
            for at, begin, b in parts
            if at < (panel + 1) * PANEL and at + len(b) > panel * PANEL
        ]
        return (inside[0][0], inside[-1][1]) if inside else (0, 0)

    for (begin, end), group in groupby(range(-(-width // PANEL)), columns):
        panels = list(group)
        if begin == end:
            if parts and panels[-1] + 1 == -(-width // PANEL):
                yield PanelRun(panels[-1], 0, torch.zeros(1, 0, PANEL))  # so that the table has all panels
            continue
        low = panels[0] * PANEL
        weights = torch.zeros(end - begin, len(panels) * PANEL, dtype=parts[0][2].dtype)
        for at, start, b in parts:
            first, last = max(at, low), min(at + len(b), low + len(panels) * PANEL)
            if first < last:
                rows = slice(start - begin, start - begin + b.shape[1])
                weights[rows, first - low : last - low] = b[first - at : last - at].t()
        shaped = weights.view(end - begin, len(panels), PANEL).transpose(0, 1).contiguous()
        yield PanelRun(panels[0], begin, shaped)


class AdaptedRows:
    """The adapters of a forward's rows: `index` [N] says which of `adapters` a row has, or BASE."""

    def __init__(self, adapters: Sequence[PackedAdapter], index: I64) -> None:
        self._adapters = adapters
        self._index = index
        self._groups = [
            (adapter, torch.from_numpy(rows))
            for i, adapter in enumerate(adapters)
            if (rows := np.flatnonzero(index == i)).size
        ]

    def taken(self, rows: Tensor) -> AdaptedRows:
        """Returns the adapters of these rows alone."""
        return AdaptedRows(self._adapters, self._index[rows.numpy()])

    def add(self, layer: int, stage: int, x: Tensor, outs: Sequence[Tensor]) -> None:
        """Adds what adapters make of x [N, K] to the outputs of a stage's products, in place."""
        for adapter, rows in self._groups:
            if found := adapter.stages[layer][stage]:
                found.add(x, adapter.scale, outs, rows)

    def arguments(self, threads: int) -> StepAdapters:
        return StepAdapters(self._groups, len(self._index), threads)


class StepAdapters:
    """The arguments of a one-kernel step for the rows that have adapters. It holds what its addresses
    need."""

    def __init__(self, groups: Sequence[tuple[PackedAdapter, Tensor]], rows: int, threads: int) -> None:
        order = torch.cat([at for _, at in groups]).to(torch.int32)
        runs, first = np.empty((len(groups), 4), np.int64), 0
        for run, (adapter, at) in zip(runs, groups, strict=True):
            run[:] = adapter.records.ctypes.data, first, len(at), adapter.form
            first += len(at)
        scales = np.array([adapter.scale for adapter, _ in groups], np.float32)
        low = torch.empty(rows, max(adapter.rank for adapter, _ in groups))
        self._held = order, runs, scales, low
        self._call = LowRankArguments(
            runs=runs.ctypes.data,
            count=len(groups),
            scales=scales.ctypes.data,
            order=order.data_ptr(),
            low=low.data_ptr(),
            low_row=low.stride(0) * 4,
            slices=max(1, min(-(-_ITEMS * threads // len(groups)), 4 * _ITEMS)),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._call)


class ServedAdapters:
    """The adapters of one base that are in memory, by name."""

    def __init__(self, shapes: Shapes) -> None:
        """shapes: those of the base's linear layers."""
        self._shapes = shapes
        self._adapters: dict[str, PackedAdapter] = {}

    @property
    def names(self) -> list[str]:
        return [*self._adapters]

    def load(self, name: str, path: str) -> PackedAdapter:
        """Reads and packs an adapter. Raises ConfigError that names it."""
        return self.put(name, self.read(name, path))

    def read(self, name: str, path: str) -> Adapter:
        """Reads an adapter. Raises ConfigError that names it."""
        try:
            return read_adapter(path, self._shapes)
        except ConfigError as error:
            raise ConfigError(f"models.{name}: {error.message}") from error
        except (OSError, ValueError, RuntimeError) as error:  # whatever safetensors makes of its files
            reason = " ".join(str(error).split())[:400]
            raise ConfigError(f"models.{name}: {path} cannot be loaded: {reason}") from error

    def put(self, name: str, adapter: Adapter) -> PackedAdapter:
        """Packs an adapter that fits the base, and keeps it."""
        packed = self._adapters[name] = self.pack(adapter)
        return packed

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Packs an adapter that fits the base."""
        return PackedAdapter(adapter, self._shapes)

    def drop(self, name: str) -> None:
        """Lets go of an adapter, if it is in memory. A forward that has it already, from `having`, keeps
        it."""
        self._adapters.pop(name, None)

    def having(self, names: Sequence[str]) -> Mapping[str, PackedAdapter]:
        """Returns the adapters of these names, of which "" is the base's, as they are now."""
        return {name: self._adapters[name] for name in dict.fromkeys(names) if name}

    def rows(self, names: Sequence[str], appends: I64) -> AdaptedRows | None:
        """Does what `adapted_rows` does, with the adapters that are in memory."""
        return adapted_rows(names, appends, self.having(names))


def adapted_rows(
    names: Sequence[str], appends: I64, adapters: Mapping[str, PackedAdapter]
) -> AdaptedRows | None:
    """Returns the adapters of a forward whose sequences have these, "" for the base, and append so many
    tokens; None if all are the base's."""
    if not adapters:
        return None
    places = {name: i for i, name in enumerate(adapters)} | {"": BASE}
    index = np.repeat(np.array([places[name] for name in names], np.int64), appends)
    return AdaptedRows([*adapters.values()], index)
