"""Builds the module that a checkpoint's files describe. It is transformers' own, but that quantised layers
stand in the place of linear ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from kvloom.exec.card import read_sampling_defaults, read_tokenizer
from kvloom.exec.checkpoint import Checkpoint
from kvloom.exec.experts import Expert, Experts, split_all_experts, split_experts
from kvloom.exec.formats.weights import QuantizedTensors, quantized_weights
from kvloom.exec.gguf import tokenizer as gguf_tokenizer
from kvloom.exec.gguf.architecture import plain_formats
from kvloom.exec.gguf.architecture import read_config as read_gguf_config
from kvloom.exec.gguf.header import GgufHeader
from kvloom.exec.gguf.model import fill, gguf_bytes, take_out_quantized
from kvloom.exec.huggingface import (
    CONFIG_MAPPING,
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    outline,
    some_of,
    without_compiler,
)
from kvloom.exec.mapped import MappedFiles
from kvloom.exec.pooling.files import Pooling, read_pooling
from kvloom.exec.quantized import QuantizedLinear, linear_of, put_quantized
from kvloom.exec.widened import HALVES
from kvloom.types.errors import ConfigError
from kvloom.types.request import SamplingDefaults, Task

# Times the parameters in its files that a config may describe; if it is fewer, what is missing is named.
_SLACK: Final = 2


@dataclass(frozen=True, slots=True)
class Built:
    """A model's module with its weights, and all else that its card is made of."""

    module: Any
    parameters: int
    tokenizer: Any
    sampling: SamplingDefaults


class Description(Protocol):
    """A checkpoint whose config was read, and whose weights were not."""

    @property
    def config(self) -> PretrainedConfig: ...

    @property
    def packed(self) -> bool:
        """Returns whether weights are quantised, or may be: it is not served everywhere."""

    @property
    def floats(self) -> bool:
        """Returns whether some weights are quantised to floats (FP8)."""

    @property
    def pooling(self) -> Pooling | None:
        """Returns how texts' states become vectors, if the model makes vectors; None if it generates."""

    def matrices(self) -> Set[str]:
        """Returns safetensors' names of the number formats of the matrices that are not held quantised."""

    def outline(self, dtype: torch.dtype, apart: bool) -> nn.Module:
        """Returns the model without memory for its weights. apart: whether experts of 16 bits may have linear
        layers of their own. Raises ConfigError if the files hold by far too little for it: transformers would
        take memory for what they lack, and fill it with random numbers."""

    def size(self, outlined: nn.Module, dtype: torch.dtype) -> int:
        """Returns the bytes of the model, with what is quantised as it is held. outlined: the model without
        memory, in any format; dtype: of what is not quantised."""

    def tokenizer(self) -> Any:
        """Returns the tokenizer, as transformers reads it."""

    def release(self) -> None:
        """Gives the pages of mapped weights back, which are read again when they are needed."""

    def build(self, outlined: nn.Module, dtype: torch.dtype, widens: bool) -> Built:
        """Returns the module. dtype: of what is not quantised; widens: whether it is to compute in float32
        over matrices of `dtype`. Raises ConfigError if a weight is missing or has another shape."""


def describe(checkpoint: Checkpoint) -> Description:
    """Returns what the checkpoint describes. Raises ConfigError if that is no decoder, or needs code."""
    return _Folder(checkpoint) if checkpoint.gguf is None else _GgufFile(checkpoint.gguf)


class _GgufFile:
    """Satisfies `Description` with a GGUF file."""

    packed = True
    floats = False
    pooling = None

    def __init__(self, header: GgufHeader) -> None:
        self.config = read_gguf_config(header)
        self._header = header

    def matrices(self) -> Set[str]:
        return plain_formats(self._header)

    def outline(self, dtype: torch.dtype, apart: bool) -> nn.Module:
        module = outline(self.config, dtype)
        take_out_quantized(module, self._header)
        return module

    def size(self, outlined: nn.Module, dtype: torch.dtype) -> int:
        return gguf_bytes(self._header, dtype)

    def tokenizer(self) -> Any:
        return gguf_tokenizer.read_tokenizer(self._header)

    def release(self) -> None:
        """Does nothing: only the embedding is mapped, and few of its pages are read."""

    def build(self, outlined: nn.Module, dtype: torch.dtype, widens: bool) -> Built:
        module = outline(self.config, dtype)
        parameters = fill(module, self._header, dtype, torch.float32 if widens else dtype)
        return Built(module, parameters, self.tokenizer(), gguf_tokenizer.read_sampling(self._header))


class _Folder:
    """Satisfies `Description` with a folder of safetensors, some of which may be quantised."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._folder = str(checkpoint.folder)
        _no_code(self._folder)
        raw, _ = PretrainedConfig.get_config_dict(self._folder)
        self.pooling = read_pooling(checkpoint.folder, raw)
        self._stored = quantized_weights(checkpoint)
        self._files = MappedFiles(checkpoint.weights) if self._stored is None else self._stored.files
        self.config = AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
        if getattr(self.config, "is_encoder_decoder", False):
            raise ConfigError("it is an encoder-decoder; kvloom serves decoders")

    @property
    def packed(self) -> bool:
        return self._stored is not None

    @property
    def floats(self) -> bool:
        return self._stored is not None and self._stored.floats

    @property
    def _task(self) -> Task:
        return "generate" if self.pooling is None else self.pooling.task

    def matrices(self) -> Set[str]:
        if self._stored is None:
            return {one.get_dtype() for one in self._files.tensors() if len(one.get_shape()) > 1}
        return {one.format for one in self._stored.plain.values() if len(one.shape) > 1}

    def outline(self, dtype: torch.dtype, apart: bool) -> nn.Module:
        module = outline(self.config, dtype, self._task)
        stored, elements = self._stored, self._checkpoint.elements
        if stored is not None:
            _take_out(module, stored)
            elements = sum(math.prod(tensor.shape) for tensor in stored.plain.values())
        parameters: int = sum(one.numel() for one in module.parameters())
        if parameters > _SLACK * elements:
            plain = "" if stored is None else " that are not quantised"
            raise ConfigError(
                f"its config describes {parameters:,} parameters{plain}, and its files hold {elements:,}"
            )
        if apart and dtype in HALVES and stored is None:
            split_all_experts(module)
        return module

    def size(self, outlined: nn.Module, dtype: torch.dtype) -> int:
        tables = sum(one.numel() * one.itemsize for one in outlined.buffers())
        parameters = sum(one.numel() for one in outlined.parameters())
        return parameters * dtype.itemsize + tables + (0 if self._stored is None else self._stored.nbytes)

    def tokenizer(self) -> Any:
        return read_tokenizer(self._folder)

    def release(self) -> None:
        self._files.release()

    def build(self, outlined: nn.Module, dtype: torch.dtype, widens: bool) -> Built:
        module = self._plain(outlined, dtype)
        parameters = sum(p.numel() for p in module.parameters())
        if self._stored is not None:
            split_experts(module, self._stored)
            put_quantized(module, self._stored)
        elif widens:
            split_all_experts(module)
        for weight in _weights(module):
            self._files.release_after(weight)
        return Built(module, parameters, self.tokenizer(), read_sampling_defaults(self._folder))

    def _plain(self, outlined: Any, dtype: torch.dtype) -> Any:
        """Returns the module with the plain tensors, each of which is converted by itself. In the place of
        each quantised weight the module has one number that is told to be all of them, without memory for
        more."""
        config, stored = outlined.config, self._stored
        state: dict[str, Any] = {tensor.name: tensor for tensor in self._files.tensors()}
        if stored is not None:
            for part in (config, config.get_text_config()):
                part.__dict__.pop("quantization_config", None)
            state = {name: tensor.values for name, tensor in stored.plain.items()}
            for name, layout in stored.layouts.items():
                if not isinstance(outlined.get_submodule(name.rpartition(".")[0]), Expert):
                    state[f"{name}.weight"] = torch.zeros((), dtype=dtype).expand(layout.shape)
            for name, experts in outlined.named_modules():
                for part, shape in experts.stacked.items() if isinstance(experts, Experts) else ():
                    state[f"{name}.{part}"] = torch.zeros((), dtype=dtype).expand(shape)
        generation = (Path(self._folder) / "generation_config.json").is_file()
        with without_compiler():
            module, info = type(outlined).from_pretrained(
                None,
                config=config,
                state_dict=state,
                generation_config=GenerationConfig.from_pretrained(self._folder) if generation else None,
                dtype=dtype,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # reported, and refused below with both shapes
                output_loading_info=True,
            )
        if self._task == "embed":  # what a model's own pooler makes is not asked for
            info["missing_keys"] = {key for key in info["missing_keys"] if not key.startswith("pooler.")}
        _whole(info)
        return module


def _take_out(module: nn.Module, stored: QuantizedTensors) -> None:
    """Takes the weights that are quantised out of a module. Raises ConfigError for one that is no linear
    layer's, or has another shape, or a bias that the layer has not, and for experts that are quantised in
    part."""
    split_experts(module, stored)
    for name, layout in stored.layouts.items():
        linear = linear_of(module, name, layout.shape)
        bias = stored.plain.get(f"{name}.bias")
        if bias is not None and linear.bias is None and bias.read().any():  # AutoGPTQ adds some of zeros
            raise bias.error("is a bias, and the layer has none in its config")
        linear.register_parameter("weight", None)
    for name, experts in module.named_modules():
        whole = [part for part, _ in experts.named_parameters()] if isinstance(experts, Experts) else []
        if whole:
            raise ConfigError(
                f"{name}.{whole[0]} is not quantised, or missing, and others of these experts are quantised; "
                "all of them are right"
            )


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors in which the module's weights lie."""
    yield from module.parameters()
    for one in module.modules():
        if isinstance(one, QuantizedLinear):
            yield one.quantized.codes


def _no_code(path: str) -> None:
    """Refuses a checkpoint that brings its own model: transformers would ask at the terminal, or go on with a
    class of its own that may be another model."""
    config, _ = PretrainedConfig.get_config_dict(path)
    wanted = {"AutoConfig", "AutoModelForCausalLM"} & set(config.get("auto_map") or ())
    if wanted and config.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError("it needs code of its own (auto_map in its config), and kvloom runs none")


def _whole(info: dict[str, Any]) -> None:
    """Refuses a checkpoint that leaves a weight to chance."""
    if info["missing_keys"]:
        raise ConfigError(f"its files lack {some_of(info['missing_keys'])}")
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise ConfigError(f"{name} has shape {list(found)} in its files and {list(wanted)} in its config")
