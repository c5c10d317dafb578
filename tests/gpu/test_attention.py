"""Attention's kernels on a GPU in bfloat16, float16 and float32: every option, in contexts of 32k tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvloom.exec.cuda.operations import Operations, triton_operations
from kvloom.kernels.cuda.flash import PACKAGES, find_flash
from tests.gpu.attention import Form, check_decode, check_prefill

FORMS = (
    Form(64, torch.bfloat16),
    Form(64, torch.bfloat16, group=1, tokens=37),
    Form(80, torch.float16, softcap=20.0, group=7),
    Form(96, torch.bfloat16, window=300),
    Form(128, torch.bfloat16, group=8),
    Form(128, torch.bfloat16, window=4096, softcap=30.0),
    Form(128, torch.float32, group=3),
    Form(192, torch.float16, window=4096),
    Form(256, torch.bfloat16, softcap=50.0, group=2, tokens=16),
    Form(256, torch.float32, window=1000, softcap=30.0, group=2),
)
LENGTHS = [1, 0, 37, 129, 4097, 32768]


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_decode_step_of_short_and_long_contexts(form: Form) -> None:
    check_decode(form, triton_operations(), LENGTHS)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_new_tokens_after_cached_ones(form: Form) -> None:
    check_prefill(form, triton_operations(), LENGTHS, [1, 0, 37, 2, 600, 65])


@pytest.fixture
def with_flash() -> Operations:
    properties = torch.cuda.get_device_properties(0)
    flash = find_flash((properties.major, properties.minor), properties.multi_processor_count)
    if flash is None:
        pytest.skip(f"not installed, or not for this device: {' or '.join(PACKAGES.values())}")
    return replace(triton_operations(), flash=flash)


HALVES = [form for form in FORMS if form.dtype != torch.float32]


@pytest.mark.parametrize("form", HALVES, ids=str)
def test_flash_attention_in_decode_steps(form: Form, with_flash: Operations) -> None:
    check_decode(form, with_flash, LENGTHS)


@pytest.mark.parametrize("form", HALVES, ids=str)
def test_flash_attention_after_cached_tokens(form: Form, with_flash: Operations) -> None:
    check_prefill(form, with_flash, LENGTHS, [1, 0, 37, 2, 600, 65])
