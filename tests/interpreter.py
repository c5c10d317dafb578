"""Where tests run the Triton kernels: on a GPU, or in Triton's interpreter where there is none.

Triton reads TRITON_INTERPRET while it is imported, which torch or transformers may do at any time, while
kernels are, and while they run. It is set then, and at no other time, so that no process of a test sees it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import numpy as np
import pytest

INSTALLED = importlib.util.find_spec("triton") is not None


class _Watch(MetaPathFinder):
    """Waits for the import of triton."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "triton":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def interpreted(module: ModuleType) -> None:
                with interpreting():
                    execute(module)

            vars(spec.loader)["exec_module"] = interpreted
        return spec


def watch() -> None:
    """To be called before anything imports triton."""
    sys.meta_path.insert(0, _Watch())


def load() -> None:
    """Import the kernels."""
    with interpreting():
        package = importlib.import_module("kvloom.kernels.cuda")
        for kernels in pkgutil.iter_modules(package.__path__):
            if kernels.name != "compile":
                importlib.import_module(f"{package.__name__}.{kernels.name}")
        interpreted = type(importlib.import_module("triton.language").sum).__name__ == "InterpretedFunction"
        if interpreted != ("TRITON_INTERPRET" in os.environ):
            raise ImportError("triton: want tests/conftest.py before its first import, but something was")


@contextmanager
def interpreting() -> Iterator[None]:
    """Import or run kernels; new tensors are where they run. What overflows is infinite, as on a GPU."""
    import torch  # noqa: PLC0415 - not in a run of tests that do without

    if torch.cuda.is_available():
        with torch.device("cuda"):
            yield
    else:
        quiet = np.errstate(over="ignore", divide="ignore", invalid="ignore")
        with pytest.MonkeyPatch.context() as patch, quiet:
            patch.setenv("TRITON_INTERPRET", "1")
            _convert_by_torch(patch)
            yield


def _convert_by_torch(patch: pytest.MonkeyPatch) -> None:
    """Gives the interpreter torch's conversions from and to FP8. Its own lose what rounding carries over, do
    not saturate, and read NaN as 480; GPUs do none of this."""
    import torch  # noqa: PLC0415 - as above

    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    own: Any = vars(interpreter)["_convert_float"]
    kinds = {
        "fp8e4nv": torch.float8_e4m3fn,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
    }

    def convert(values: Any, from_: Any, to: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (from_.name, to.name):
            return own(values, from_, to, rounding)
        held = torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).view(kinds[from_.name])
        made = held.to(kinds[to.name]).view(getattr(torch, f"uint{to.primitive_bitwidth}"))
        return made.numpy().reshape(values.shape)

    patch.setattr(interpreter, "_convert_float", convert)
