"""What compressed-tensors' own package packs is what we read, and it reads what our tests pack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

from kvloom.exec.checkpoint import CONFIG, WHOLE, open_checkpoint
from kvloom.exec.formats.weights import quantized_weights
from kvloom.exec.quantized import QuantizedWeight
from tests.exec.packing import FORMATS, Format

COMPRESSED = [name for name, made in FORMATS.items() if made.config["quant_method"] == "compressed-tensors"]
ROWS, COLUMNS = 40, 96  # no multiple of 32 rows, so that packed zero points end in a part of a word


def compressor(made: Format) -> tuple[Any, QuantizationScheme]:
    """The package's own of this format, and the scheme that the config says."""
    config = QuantizationConfig.model_validate(dict(made.config))
    scheme = config.config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(config.format), scheme


def dequantised(made: Format, parts: dict[str, Tensor]) -> Tensor:
    own, scheme = compressor(made)
    in_float32 = {"weight_scale": parts["weight_scale"].to(torch.float32)}
    found: Tensor = own.decompress(parts | in_float32, scheme)["weight"]
    return found


def read(path: Path, made: Format, parts: dict[str, Tensor]) -> QuantizedWeight:
    """What we make of them."""
    save_file({f"a.{name}": one for name, one in parts.items()}, path / WHOLE)
    (path / CONFIG).write_text("{}")
    weights = quantized_weights(replace(open_checkpoint(str(path)), quantization=dict(made.config)))
    assert weights is not None
    return weights["a"]


@pytest.mark.parametrize("form", COMPRESSED)
def test_it_reads_what_our_tests_pack(form: str) -> None:
    made = FORMATS[form]
    matrix = made.draw(ROWS, COLUMNS, np.random.default_rng(3))
    assert dequantised(made, made.parts(matrix)).equal(matrix.dense)


@pytest.mark.parametrize("form", COMPRESSED)
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
def test_we_read_what_it_packs(tmp_path: Path, form: str, scales: torch.dtype) -> None:
    made = FORMATS[form]
    generator = torch.Generator().manual_seed(0)
    groups = 1 if made.group == -1 else COLUMNS // made.group
    state = {
        "weight": torch.randn(ROWS, COLUMNS, generator=generator),
        "weight_scale": (torch.rand(ROWS, groups, generator=generator) / (1 << made.bits)).to(scales),
    }
    if not made.symmetric:
        most = 1 << (made.bits - 1)
        zeros = torch.randint(-most, most, (ROWS, groups), generator=generator)
        state["weight_zero_point"] = zeros.to(torch.int8)
    own, scheme = compressor(made)
    parts = own.compress(state, scheme)
    assert read(tmp_path, made, parts).dequantized().equal(dequantised(made, parts))


@pytest.mark.parametrize("form", COMPRESSED)
def test_scales_of_32_bits_are_right_to_the_last_bits(tmp_path: Path, form: str) -> None:
    """A product by such a scale is rounded, and ours is taken before the zero."""
    made = FORMATS[form]
    matrix = made.draw(ROWS, COLUMNS, np.random.default_rng(4))
    parts = made.parts(matrix)
    scales = torch.rand(parts["weight_scale"].shape, generator=torch.Generator().manual_seed(1))
    parts["weight_scale"] = scales
    found, expected = read(tmp_path, made, parts).dequantized(), dequantised(made, parts)
    assert (found - expected).abs().max() <= (1 << made.bits) * torch.finfo(torch.float32).eps
    if made.bits == 8 and made.symmetric:
        assert found.equal(expected)
