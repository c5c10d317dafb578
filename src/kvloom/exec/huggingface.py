"""The parts of transformers that kvloom uses.

While transformers is imported it marks functions for torch's compiler and looks for torch's distributed
tensors. For these torch imports its compiler, Triton and sympy: 900 modules, and half of the time for which
an engine imports. kvloom runs modules eagerly and shares them out among ranks itself, so transformers is
imported, and builds modules, as if torch had neither.

It also reads its own files, 2,000 of them, for the names that they define. These names are kept in a file.
"""

from __future__ import annotations

import copy
import functools
import marshal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from kvloom.types.files import replacing
from kvloom.types.request import Task

_COMPILER: Final = "torch._dynamo"
_READER: Final = "create_import_structure_from_path"  # transformers' function that reads its files
_NAMES: Final = Path(__file__).parent / "__pycache__" / f"transformers.{sys.implementation.cache_tag}.names"


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
    """A context in which torch seems to have no compiler and no distributed tensors."""
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


@contextmanager
def _keeping_names() -> Iterator[None]:
    """Gives transformers, if it is imported meanwhile, the names in its models' files as they were found the
    first time. Its own cache of them is smaller than one round, so that it would read all files twice."""
    cached = functools.lru_cache

    def keeping(*arguments: Any, **options: Any) -> Any:
        if arguments and getattr(arguments[0], "__name__", None) == _READER:
            return kept_names(arguments[0], _NAMES)
        return cached(*arguments, **options)

    functools.lru_cache = keeping  # transformers decorates the reader with it
    try:
        yield
    finally:
        functools.lru_cache = cached


def kept_names(read: Callable[[Any], Any], file: Path) -> Callable[[Any], Any]:
    """Returns `read` with a cache: its result for the folder of all models is kept in `file`, and used as
    long as that folder is the same."""

    @functools.wraps(read)
    def names(path: str | Path) -> Any:
        folder = Path(path)
        folder = folder.parent if folder.suffix == ".py" else folder
        if (folder.parent.name, folder.name) != ("transformers", "models"):
            return read(path)
        version = sys.modules["transformers"].__version__
        key = str(folder), folder.stat().st_mtime_ns, version
        with suppress(OSError, ValueError, EOFError, TypeError):  # there is none, or it is cut short
            known, found = marshal.loads(file.read_bytes())
            if known == key:
                return found
        found = read(path)
        with suppress(OSError), replacing(file, 0o666) as made:  # kvloom's folder may be read-only
            made.write(marshal.dumps((key, found)))
        return found

    return names


with without_compiler(), _keeping_names():
    import torch.fx.experimental.symbolic_shapes  # which modules without weights need: forks are to share it
    import transformers
    import transformers.generation.utils  # what the modules of all models import
    import transformers.modeling_layers

from transformers import (  # noqa: E402
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES  # noqa: E402
from transformers.utils import cached_file  # noqa: E402

__all__ = [
    "CONFIG_MAPPING",
    "GATED",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "QKV",
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "GenerationConfig",
    "PreTrainedTokenizerFast",
    "PretrainedConfig",
    "cached_file",
    "children",
    "hide_progress",
    "outline",
    "some_of",
    "without_compiler",
]


_CLASSES: Final[dict[Task, Any]] = {
    "generate": AutoModelForCausalLM,
    "embed": AutoModel,
    "score": AutoModelForSequenceClassification,
}


def outline(config: PretrainedConfig, dtype: torch.dtype, task: Task = "generate") -> nn.Module:
    """Returns the model that a config describes, without memory for its weights. task: what it is to do."""
    with without_compiler(), torch.device("meta"):
        module: nn.Module = _CLASSES[task].from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    return module


def some_of(names: Iterable[str]) -> str:
    """Returns a text for an error: the first of the names, and how many more there are."""
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


def hide_progress() -> None:
    """Turns off transformers' progress bars, which are noise in a log."""
    transformers.logging.disable_progress_bar()


# the names that transformers' decoders give to their linear layers
QKV: Final = ("q_proj", "k_proj", "v_proj")
GATED: Final = ("gate_proj", "up_proj", "down_proj")


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields every module with its parent and its name there, each before its own children. One that is
    replaced meanwhile is not kept, nor are its children yielded, so that its weights can be let go."""
    for name in [name for name, _ in model.named_children()]:
        child = model.get_submodule(name)
        yield model, name, child
        if getattr(model, name) is child:
            yield from children(child)
