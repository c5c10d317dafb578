"""Quantised checkpoints of tiny plain ones, packed as each format's definition says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvloom.exec.checkpoint import WHOLE
from tests.exec.loading import reconfigure

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Matrix:
    """scales · (codes - zeros) [N, K], in groups of neighbours in a row."""

    bits: int
    codes: Numbers  # [N, K], from 0 to 2^bits - 1
    zeros: Numbers  # [N, G], as codes
    scales: NDArray[np.float16]  # [N, G]

    @property
    def dense(self) -> Tensor:
        group = self.codes.shape[1] // self.zeros.shape[1]
        zeros, scales = (values.repeat(group, axis=1) for values in (self.zeros, self.scales))
        return torch.from_numpy((scales.astype(np.float64) * (self.codes - zeros)).astype(np.float32))


def words(numbers: Numbers, bits: int) -> Tensor:
    """Rows of numbers, each `bits` wide, in rows of 32 bits, the first number in the lowest bits."""
    each = 32 // bits
    rows, columns = numbers.shape
    padded = np.pad(numbers, ((0, 0), (0, -columns % each))).reshape(rows, -1, each)
    together = sum(padded[:, :, i] << (bits * i) for i in range(each))
    return torch.from_numpy(np.asarray(together).astype(np.uint32).view(np.int32).copy())


def of_numbers(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


Parts = dict[str, Tensor]


def packed(matrix: Matrix) -> Parts:
    return {
        "weight_packed": words(matrix.codes, matrix.bits),
        "weight_scale": of_numbers(matrix.scales, torch.float16),
        "weight_shape": torch.tensor(matrix.codes.shape),
    }


def packed_with_zeros(matrix: Matrix) -> Parts:
    zeros = words(matrix.zeros.T, matrix.bits).T.contiguous()
    return packed(matrix) | {"weight_zero_point": zeros}


def integers(matrix: Matrix) -> Parts:
    return {
        "weight": of_numbers(matrix.codes - 128, torch.int8),
        "weight_scale": of_numbers(matrix.scales, torch.bfloat16).to(torch.float32),
    }


def integers_with_zeros(matrix: Matrix) -> Parts:
    return integers(matrix) | {"weight_zero_point": of_numbers(matrix.zeros - 128, torch.int8)}


def gptq(matrix: Matrix, less: int = 1) -> Parts:
    """less: what the stored zeros lack, in each word as a whole."""
    zeros = words(matrix.zeros.T, matrix.bits)
    ones = words(np.full_like(matrix.zeros.T, less), matrix.bits)
    groups, columns = matrix.zeros.shape[1], matrix.codes.shape[1]
    return {
        "qweight": words(matrix.codes, matrix.bits).T.contiguous(),
        "qzeros": zeros - ones,
        "scales": of_numbers(matrix.scales.T, torch.float16),
        "g_idx": (torch.arange(columns) // (columns // groups)).int(),
    }


def gptq_v2(matrix: Matrix) -> Parts:
    return gptq(matrix, less=0)


def awq(matrix: Matrix) -> Parts:
    def shuffled(numbers: Numbers) -> Numbers:
        eights = numbers.reshape(len(numbers), -1, 8)
        return eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape)

    return {
        "qweight": words(shuffled(matrix.codes.T), 4),
        "qzeros": words(shuffled(matrix.zeros.T), 4),
        "scales": of_numbers(matrix.scales.T, torch.float16),
    }


def floats(matrix: Matrix) -> Parts:
    return {
        "weight": of_numbers(matrix.codes - matrix.zeros, torch.float8_e4m3fn),
        "weight_scale": of_numbers(matrix.scales, torch.bfloat16),
    }


@dataclass(frozen=True)
class Format:
    """How a checkpoint is quantised, and what its config says of it."""

    parts: Callable[[Matrix], Parts]
    bits: int
    group: int  # -1 for a whole row
    symmetric: bool
    config: Mapping[str, Any]

    def draw(self, rows: int, columns: int, random: np.random.Generator) -> Matrix:
        """Zeros are never 0, which no format's first version can say of each."""
        most = 1 << self.bits
        groups = 1 if self.group == -1 else columns // self.group
        codes = random.integers(0, most, (rows, columns))
        zeros = random.integers(1, most, (rows, groups))
        if self.symmetric:
            zeros[:] = most // 2
        scales = random.uniform(0.5, 1.0, (rows, groups)) / most
        # of bfloat16's bits, so that any of the formats of scales holds it
        exact = torch.from_numpy(scales).to(torch.bfloat16).to(torch.float16).numpy()
        return Matrix(self.bits, codes, zeros, exact)


class FloatFormat(Format):
    """Its codes are whole numbers that float8_e4m3fn holds."""

    def draw(self, rows: int, columns: int, random: np.random.Generator) -> Matrix:
        matrix = super().draw(rows, columns, random)
        return replace(matrix, codes=matrix.zeros + matrix.codes % 33 - 16)


def float_format() -> Format:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return FloatFormat(floats, 8, -1, True, config)


def compressed(
    parts: Callable[[Matrix], Parts], bits: int, group: int, *, symmetric: bool = True, form: str = ""
) -> Format:
    strategy = "channel" if group == -1 else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if group != -1:
        weights["group_size"] = group
    config = {
        "quant_method": "compressed-tensors",
        "format": form or ("int-quantized" if parts in (integers, integers_with_zeros) else "pack-quantized"),
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return Format(parts, bits, group, symmetric, config)


def gptq_format(bits: int, group: int, *, symmetric: bool, version: str = "") -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    if version:
        config["checkpoint_format"] = version
    return Format(gptq_v2 if version == "gptq_v2" else gptq, bits, group, symmetric, config)


def awq_format(group: int) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(awq, 4, group, False, config)


FORMATS: dict[str, Format] = {
    "packed 4": compressed(packed, 4, 32),
    "packed 4 row": compressed(packed, 4, -1),
    "packed 4 zeros": compressed(packed_with_zeros, 4, 32, symmetric=False),
    "packed 8": compressed(packed, 8, 16),
    "packed 8 zeros": compressed(packed_with_zeros, 8, -1, symmetric=False),
    "integers": compressed(integers, 8, -1),
    "integers groups": compressed(integers, 8, 32),
    "integers zeros": compressed(integers_with_zeros, 8, -1, symmetric=False),
    "floats": float_format(),
    "gptq 4": gptq_format(4, 32, symmetric=True),
    "gptq 4 zeros": gptq_format(4, 32, symmetric=False, version="gptq"),
    "gptq 4 row": gptq_format(4, -1, symmetric=False, version="gptq_v2"),
    "gptq 8": gptq_format(8, 16, symmetric=True),
    "gptq 8 zeros": gptq_format(8, -1, symmetric=False, version="gptq"),
    "gptq 8 v2": gptq_format(8, 32, symmetric=False, version="gptq_v2"),
    "awq": awq_format(32),
    "awq row": awq_format(-1),
}


def is_quantised(name: str) -> bool:
    """Whether we quantise the weight of this name: those of the layers, but for the second one's way down, or
    its experts, which stay plain."""
    linear = name.endswith("_proj.weight") or (".experts." in name and name.endswith(".weight"))
    return linear and "layers.1.mlp.down" not in name and not ("layers.1." in name and ".experts." in name)


def quantise(path: Path, made: Format, seed: int = 0) -> dict[str, Matrix]:
    """Quantises a plain checkpoint in place. Returns the matrices by their layers' names, and puts the plain
    checkpoint with what they stand for into `twin(path)`."""
    random = np.random.default_rng(seed)
    state = load_file(path / WHOLE)
    matrices: dict[str, Matrix] = {}
    stored: Parts = {}
    for name, values in sorted(state.items()):
        if is_quantised(name):
            module = name.removesuffix(".weight")
            matrix = matrices[module] = made.draw(values.shape[0], values.shape[1], random)
            stored |= {f"{module}.{part}": one for part, one in made.parts(matrix).items()}
            state[name] = matrix.dense
        else:
            stored[name] = values
    shutil.copytree(path, twin(path))
    save_file(state, twin(path) / WHOLE, metadata={"format": "pt"})
    save_file(stored, path / WHOLE, metadata={"format": "pt"})
    reconfigure(path, quantization_config=made.config)
    return matrices


def twin(path: Path) -> Path:
    return path.with_name(f"{path.name}-dense")
