"""Triton's interpreter, for tests without a GPU.

Triton reads TRITON_INTERPRET when it is imported and where it runs a kernel. It is set there, and nowhere
else, so that no other test and no process of one sees it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

INSTALLED = importlib.util.find_spec("triton") is not None
_KERNELS = "activation", "copy", "decode", "draw", "merge", "norm", "prefill", "rotary", "write"


def load() -> None:
    """Import triton and the kernels to be interpreted, for the rest of this process. Done while tests are
    collected, before anything else imports triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in _KERNELS:
            importlib.import_module(f"kvloom.kernels.triton.{name}")
        language = importlib.import_module("triton.language")
    if type(language.sum).__name__ != "InterpretedFunction":
        raise ImportError("triton: want to import it for its interpreter, but something imported it before")


@contextmanager
def interpreting() -> Iterator[None]:
    """Run kernels; an exponential that overflows is infinite, as it is on a GPU."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        patch.setenv("TRITON_INTERPRET", "1")
        yield
