"""The quantised weights of a checkpoint: its packed integers become `QuantizedWeight`s, without a copy of all
in another number format.

Which layers are quantised is told by the names of the tensors alone; a checkpoint's config says how, and is
refused if the tensors contradict it. Its patterns of layers' names are not looked at: they are regular
expressions of strangers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvloom.exec.checkpoint import Checkpoint
from kvloom.exec.formats.compressed_tensors import CODES, compressed_tensors
from kvloom.exec.formats.gptq import awq, gptq
from kvloom.exec.formats.tensors import Layout, Parts, Reader, StoredTensor, config_error
from kvloom.exec.mapped import MappedFiles
from kvloom.exec.quantized import QuantizedWeight

_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Reader]]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
}

_MIXTRAL: Final = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])")
_MIXTRAL_LAYERS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class QuantizedTensors(Mapping[str, QuantizedWeight]):
    """The quantised weights of a checkpoint, by the names of their layers. Each is made from the mapped files
    when it is asked for, and not kept."""

    def __init__(
        self, layouts: Mapping[str, Layout], plain: Mapping[str, StoredTensor], files: MappedFiles
    ) -> None:
        self.layouts = layouts
        self.plain = plain
        """The tensors that are stored as they are, biases of quantised layers among them."""
        self.files = files

    def __getitem__(self, name: str) -> QuantizedWeight:
        return self.layouts[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def nbytes(self) -> int:
        """Returns the most bytes that all quantised weights take together."""
        return sum(layout.nbytes for layout in self.layouts.values())

    @property
    def floats(self) -> bool:
        """Returns whether some of them have codes that are floats."""
        return any(layout.floats for layout in self.layouts.values())


def quantized_weights(checkpoint: Checkpoint) -> QuantizedTensors | None:
    """Returns the quantised weights of a checkpoint, or None if its config names none. Nothing but tensors of
    two numbers is read yet. Raises ConfigError for a format that is not served, for tensors that are missing,
    and for those that have another shape or number format than the config and the other tensors say; with the
    file's and the tensor's name, also when a weight is read."""
    config = checkpoint.quantization
    if config is None:
        return None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise config_error("quant_method", method, *_READERS)
    reader = _READERS[method](config)
    modules: dict[str, dict[str, StoredTensor]] = {}
    files = MappedFiles(checkpoint.weights)
    for tensor in files.tensors():
        module, _, part = tensor.name.rpartition(".")
        modules.setdefault(module, {})[part] = StoredTensor(tensor.name, tensor.file, tensor)
    layouts: dict[str, Layout] = {}
    plain: dict[str, StoredTensor] = {}
    for module, parts in modules.items():
        quantized = not reader.names.isdisjoint(parts) or _holds_codes(parts)
        if quantized:
            layouts[module_name(module)] = reader.layout(parts)
        left = {"bias"} if quantized else parts.keys()
        plain |= {one.name: one for part, one in parts.items() if part in left}
    return QuantizedTensors(layouts, plain, files)


def module_name(stored: str) -> str:
    """Returns transformers' name of a linear layer, which for Mixtral's experts is another than in files."""
    match = _MIXTRAL.fullmatch(stored)
    return f"{match[1]}.mlp.experts.{match[2]}.{_MIXTRAL_LAYERS[match[3]]}" if match else stored


def _holds_codes(parts: Parts) -> bool:
    return "weight" in parts and parts["weight"].format in CODES
