"""What tests/gpu asks of a device, in small: the CPU as the device, short contexts, and answers that are
wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvloom.exec.cuda.device import host_device
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import plain_operations
from kvloom.types.request import TokenLogprob
from kvloom.types.spec import Dtype
from tests.checkpoints import make_checkpoint
from tests.engines import Answer
from tests.exec.cuda.flash import flash
from tests.gpu.attention import Form, check_decode, check_prefill
from tests.gpu.exactness import Asked, Stock, check_logprobs, check_tokens, serve, spec

HERE = torch.device("cpu")
ASKED = Asked.of((1, 100), 3)
SIZES = {"max_running": 4, "chunk_tokens": 32}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With windows, bent scores and layers of two kinds."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), "gemma2")


def answers(path: Path, dtype: Dtype, logprobs: int | None = None) -> list[Answer]:
    wanted = spec(path, dtype, SIZES)
    return serve(wanted, load_executor(wanted, host_device(4), plain_operations()), ASKED, logprobs)


def test_a_stock_model_in_pieces_is_the_stock_model(path: Path) -> None:
    whole, pieces = (Stock(path, HERE, torch.float32, chunk=chunk) for chunk in (1000, 30))
    for first in (0, 29, 30, 70):
        found = pieces.logits(ASKED.prompts[1], first)
        assert len(found) == 100 - first
        torch.testing.assert_close(found, whole.logits(ASKED.prompts[1], first), rtol=1e-4, atol=1e-4)


def test_tokens_are_checked(path: Path) -> None:
    stock, found = Stock(path, HERE, torch.float32, chunk=40), answers(path, "float32")
    check_tokens(stock, ASKED, found)
    found[1].tokens[0][2] ^= 1
    with pytest.raises(AssertionError, match="after 100 tokens, token 2"):
        check_tokens(stock, ASKED, found)


def test_logits_are_checked(path: Path) -> None:
    kind = torch.bfloat16
    models = Stock(path, HERE, torch.float32, kind, 40), Stock(path, HERE, kind, chunk=40)
    found = answers(path, "bfloat16", logprobs=0)
    check_logprobs(*models, ASKED, found)
    wrong = found[1].prompt
    assert wrong is not None
    wrong[40:] = [TokenLogprob(one.logprob + 0.3) for one in wrong[40:]]
    with pytest.raises(AssertionError, match="prompt of 100 tokens"):
        check_logprobs(*models, ASKED, found)


@pytest.mark.parametrize("form", [Form(16, torch.bfloat16, 5, 9.0), Form(8, torch.float32, group=1)], ids=str)
def test_attention_is_checked(form: Form) -> None:
    lengths, twins = [1, 0, 37, 129], plain_operations()
    for operations in (twins, replace(twins, flash=flash())):
        check_decode(form, operations, lengths)
        check_prefill(form, operations, lengths, [1, 0, 4, 65])

    def short(*given: object, workspace: object) -> None:
        """It leaves out the last token of the longest."""
        arguments = list(given)
        arguments[6] = torch.tensor([1, 0, 37, 128], dtype=torch.int32)
        twins.decode_attention(*arguments, workspace=workspace)

    with pytest.raises(AssertionError, match="of the outputs"):
        check_decode(form, replace(twins, decode_attention=short), lengths)
