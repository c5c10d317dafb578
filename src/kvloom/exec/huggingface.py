"""The parts of transformers that kvloom uses.

While transformers is imported it marks functions for torch's compiler and looks for torch's distributed
tensors. For these torch imports its compiler, Triton and sympy: 900 modules, and half of the time for which
an engine imports. kvloom runs modules eagerly and shares them out among ranks itself, so transformers is
imported, and builds modules, as if torch had neither.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

_COMPILER: Final = "torch._dynamo"


class _NoCompiler(ModuleType):
    """Stands for torch's compiler. Its decorators leave functions as they are; modules in it can be
    imported."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        spec = find_spec(_COMPILER)
        assert spec is not None
        self.__path__ = spec.submodule_search_locations or []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unmarked


def _unmarked(function: Any = None, *_: object, **__: object) -> Any:
    return _unmarked if function is None else function


@contextmanager
def without_compiler() -> Iterator[None]:
    """Hides torch's compiler, and whether torch can be distributed, from what runs meanwhile."""
    if _COMPILER in sys.modules:  # there is nothing to save any more
        yield
        return
    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False  # transformers asks once and remembers it
    sys.modules[_COMPILER] = _NoCompiler()
    try:
        yield
    finally:
        del sys.modules[_COMPILER]
        torch.distributed.is_available = available


with without_compiler():
    import transformers
    import transformers.generation.utils  # what the modules of all models import
    import transformers.modeling_layers

from transformers import (  # noqa: E402
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.utils import cached_file  # noqa: E402

__all__ = [
    "CONFIG_MAPPING",
    "GATED",
    "QKV",
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "PretrainedConfig",
    "cached_file",
    "children",
    "hide_progress",
    "without_compiler",
]


def hide_progress() -> None:
    """Turns off transformers' progress bars, which are noise in a log."""
    transformers.logging.disable_progress_bar()


# the names that transformers' decoders give to their linear layers
QKV: Final = ("q_proj", "k_proj", "v_proj")
GATED: Final = ("gate_proj", "up_proj", "down_proj")


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields every module with its parent and its name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child
