"""Loading: a checkpoint becomes a model that kvloom serves, or is refused with the reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from kvloom.exec.architectures.attention import reach_attention
from kvloom.exec.attention import NAME, Forward, Modular, Scoring, attend_dense
from kvloom.exec.build import Built, Description, describe
from kvloom.exec.card import card_of, check_tokenizer
from kvloom.exec.checkpoint import open_checkpoint
from kvloom.exec.parallel.group import RankTeam
from kvloom.exec.parallel.slicing import slice_model
from kvloom.exec.pooling.files import Pooling
from kvloom.exec.pooling.model import PoolingModel, prove_pooling_model
from kvloom.exec.quantized import QuantizedLinear
from kvloom.exec.widened import computes_in_float32, widen
from kvloom.types.errors import ConfigError, Unavailable
from kvloom.types.geometry import SCALED, Geometry, KVDtype
from kvloom.types.request import ModelCard
from kvloom.types.spec import ModelSpec

_PROBE_TOKENS: Final = 9
_PROBE_PART: Final = 5  # of these that come first
# The kinds of layers that the config may name. Chunks are as long as the context at least; see `card`.
_KINDS: Final = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
_LARGE: Final = 1 << 18  # bytes of a matrix that counts for sure while weights sleep
_EDGES: Final = 1 << 13  # of its pages, in which other things lie too


class LoadTarget(Protocol):
    """The kind of device for which a model is loaded: makes of transformers' model one that the device runs
    well. The loader calls the methods in their order."""

    def check_floats(self) -> None:
        """Raises ConfigError if the device has no products over weights in FP8."""

    def check_pooling_model(self) -> None:
        """Raises ConfigError if the device runs no models that make vectors."""

    def own_format(self, config: Any, matrices: Callable[[], Set[str]]) -> torch.dtype:
        """Returns the number format in which a checkpoint's weights may be held if none is asked for.
        matrices: returns the formats that its files have for matrices that are not quantised."""

    def choose_format(self, own: torch.dtype, outline: nn.Module, say: Callable[[str], None]) -> torch.dtype:
        """Returns the number format that `auto` means: `own`, or one that is quicker here. outline: the model
        in its own format, without weights. say: is told if there was a choice."""

    def check_room(self, size: int) -> None:
        """Raises ConfigError if there is no room for weights of `size` bytes, before they are read."""

    def widens(self, outline: nn.Module, dtype: torch.dtype) -> bool:
        """Returns whether a model with weights in `dtype` is to compute in float32 over them. outline: the
        model without weights."""

    def kv_dtype(self, wanted: KVDtype, dtype: torch.dtype) -> torch.dtype:
        """Returns the number format of K and V of a model that computes in `dtype`. Raises ConfigError if
        they cannot be kept in the format that is wanted."""

    def place(self, module: nn.Module) -> None:
        """Brings the weights, which lie in mapped files, to the device that uses them. Raises ConfigError if
        they do not fit."""

    def fuse(self, module: nn.Module) -> None:
        """Replaces stock modules in place by fused ones that agree with them."""

    def settle(self, module: nn.Module) -> None:
        """Lets go of what the finished module does not need."""

    def check_scorings(self, scorings: Mapping[int, Scoring]) -> None:
        """Raises ConfigError if the device's kernels do not score as a layer asks for."""

    def fuse_decoder(
        self, module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry
    ) -> Forward | None:
        """Returns a faster forward than the module's own, if there is one."""

    def round_inputs(self, module: nn.Module) -> None:
        """Lets products over weights of few bits round their inputs from now on, if that is quicker."""


class Observer:
    """Stands in for the forward state while the loader notes what each layer asks of attention."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int]] = {}
        self.scorings: dict[int, Scoring] = {}
        self.heads: set[int] = set()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        self.layers[layer] = (k.shape[1], k.shape[2])
        self.scorings[layer] = scoring
        self.heads.add(q.shape[1])
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attend_dense(q, k, v, 0, scoring).transpose(0, 1)


class _Continued:
    """Stands in for the forward state of a prompt that comes in parts. It keeps K and V, and nothing else."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        q, k, v = (x.transpose(0, 1).clone() for x in (q, k, v))
        offset = 0
        if layer in self._kept:
            offset = self._kept[layer][0].shape[1]
            k, v = (torch.cat(pair, 1) for pair in zip(self._kept[layer], (k, v), strict=True))
        self._kept[layer] = k, v
        return attend_dense(q, k, v, offset, scoring).transpose(0, 1)


def prove(
    module: Any, team: RankTeam | None, target: LoadTarget, release: Callable[[], None] = lambda: None
) -> Observer:
    """Notes what the stock model asks of our attention, brings it to the device on which it is to run, slices
    and fuses it, and compares logits on a short prompt that comes in two parts. If there are several ranks,
    the first one alone runs the whole model, and over the mapped files, so that no rank's device need hold
    all of it. release: gives back what the stock model has read of these files. Raises ConfigError."""
    if team is None:
        target.place(module)
    observer, expected = Observer(), None
    with _released_by_layer(module, release), torch.inference_mode():
        if team is None or team.group.rank == 0:
            probe = _probe(module)
            expected = module(input_ids=probe["input_ids"], use_cache=False).logits
            release()
        if not reach_attention(module):
            module.set_attn_implementation(NAME)
        if expected is not None:
            module(**probe, kv=observer)
            _uniform(module, observer)
            release()
        if team is not None:
            observer = _slice(module, observer, team, target)
        target.fuse(module)
        found = _in_parts(module)
    if expected is not None:
        _compare(found, expected.to(found.device))
    return observer


@contextmanager
def _released_by_layer(module: nn.Module, release: Callable[[], None]) -> Iterator[None]:
    """Calls `release` after each quantised layer: a forward does not bring a whole file into memory."""
    hooks = [
        layer.register_forward_hook(lambda *_: release())
        for layer in module.modules()
        if isinstance(layer, QuantizedLinear)
    ]  # and nothing else here holds a layer, which is let go when it is packed
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _probe(module: Any) -> dict[str, Any]:
    """Returns a short prompt on the module's device."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (1, _PROBE_TOKENS), generator=generator)
    positions = torch.arange(_PROBE_TOKENS)[None]
    return {
        "input_ids": ids.to(module.device),
        "position_ids": positions.to(module.device),
        "use_cache": False,
    }


def _in_parts(module: Any) -> Tensor:
    """Returns the logits of a short prompt whose tokens come in two parts."""
    probe, state = _probe(module), _Continued()
    parts = []
    for tokens in (slice(0, _PROBE_PART), slice(_PROBE_PART, None)):
        ids, positions = probe["input_ids"][:, tokens], probe["position_ids"][:, tokens]
        parts.append(module(input_ids=ids, position_ids=positions, use_cache=False, kv=state).logits)
    return torch.cat(parts, 1)


def _slice(module: Any, whole: Observer, team: RankTeam, target: LoadTarget) -> Observer:
    """Cuts the module down to this rank's slice. Returns the observer of what the slice asks of attention."""
    for heads, _ in whole.layers.values():
        if heads % team.group.size:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"{team.group.size} ranks cannot share its {heads} KV heads evenly; "
                f"a `tensor_parallel` of {fits} is right"
            )
    team.meet()
    slice_model(module, team.group)
    with torch.inference_mode(False):  # as in `slice_model`
        target.place(module)
    observer = Observer()
    module(**_probe(module), kv=observer)
    _uniform(module, observer)
    return observer


def _compare(found: Tensor, expected: Tensor) -> None:
    """Raises ConfigError if logits differ by more than roundings do."""
    errors = (found - expected).abs().amax((0, 2)) / expected.abs().max().clamp_min(1e-6)
    error, first = float(errors.max()), float(errors[:_PROBE_PART].max())
    bound = 1e-4 if expected.dtype == torch.float32 else 5e-2
    if first < bound and not error < bound:
        raise ConfigError(
            f"its logits differ by {error:.1e} once a prompt comes in parts: its layers keep a state beside "
            "keys and values, which kvloom's pool does not hold"
        )
    if not error < bound:
        raise ConfigError(f"its logits under kvloom's attention differ from transformers' own by {error:.1e}")


def _uniform(module: Any, observer: Observer) -> None:
    """Raises ConfigError if the pool cannot hold the state of all layers in pages of one shape."""
    layers = getattr(module.config, "num_hidden_layers", len(observer.layers))
    if not observer.layers:
        raise ConfigError("it does not use transformers' attention interface")
    if sorted(observer.layers) != list(range(layers)):
        raise ConfigError(
            f"only {len(observer.layers)} of its {layers} layers are attention; others keep a state of their "
            "own, which kvloom's pool does not hold"
        )
    if len(set(observer.layers.values())) != 1:
        raise ConfigError(
            f"its layers differ in KV heads or head size: {sorted(set(observer.layers.values()))}"
        )
    kinds = getattr(module.config, "layer_types", None) or []
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and not observer.scorings[layer].window:
            raise ConfigError(
                f"its layer {layer} has a sliding window that the attention interface is not told"
            )
        if kind not in _KINDS:
            raise ConfigError(f"its layer {layer} is of the kind {kind}, which kvloom does not have")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, with the facts that the pool and the engine need."""

    module: nn.Module
    forward: Forward
    kv_dtype: torch.dtype
    geometry: Geometry
    card: ModelCard
    pooling_model: PoolingModel | None = None
    """Runs texts instead of `forward`, if the model makes vectors of them."""
    heads: int = 0  # of q, in all layers; 0 if they differ, or have sinks or slopes, which no mailbox takes
    identity: str = ""  # a digest over the weights and all else that K and V of given tokens depend on


def load_models(
    models: Sequence[ModelSpec],
    block_bytes: int,
    target: LoadTarget,
    progress: Callable[[str], None] = lambda _: None,
    team: RankTeam | None = None,
    finish: Callable[[str, LoadedModel], None] = lambda name, model: None,
) -> dict[str, LoadedModel]:
    """Loads each model as `load_model` does, and calls `finish` with it before the next one is loaded.
    Returns them by name."""
    loaded: dict[str, LoadedModel] = {}
    for i, spec in enumerate(models):
        progress(f"loading model {spec.name} ({i + 1}/{len(models)})")
        loaded[spec.name] = load_model(spec, block_bytes, target, team, progress)
        finish(spec.name, loaded[spec.name])
    return loaded


def load_model(
    spec: ModelSpec,
    block_bytes: int,
    target: LoadTarget,
    team: RankTeam | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Builds, fuses and proves a checkpoint. target: the device on which it is to run; team: the ranks that
    share it, each of which loads its own slice at the same time. Raises ConfigError naming the model and what
    is wrong with it, Unavailable if a rank of the team is gone."""
    with _named(spec):
        return _load(spec, block_bytes, team, target, lambda text: progress(f"model {spec.name}: {text}"))


def check_model(spec: ModelSpec) -> None:
    """Reads all of a checkpoint but the numbers of its weights, and those too if they must have a digest. It
    may be called beside running jobs. Raises ConfigError for most of what loading would refuse."""
    with _named(spec):
        checkpoint = open_checkpoint(spec.path, spec.revision)
        described = describe(checkpoint)
        described.outline(torch.float32, apart=False)  # the default format, which is all threads'
        check_tokenizer(described.tokenizer())
        checkpoint.require_digest(spec.sha256)


def least_bytes(spec: ModelSpec, target: LoadTarget) -> int:
    """Returns the bytes that a model's weights take at the least, by its config and the headers of its files:
    those of large matrices that are not quantised. Raises ConfigError."""
    with _named(spec):
        described = describe(open_checkpoint(spec.path, spec.revision))
        outlined, dtype = _outlined(spec, described, target, True, lambda _: None)
        sizes = (one.numel() * dtype.itemsize for one in outlined.parameters() if one.dim() > 1)
        return sum(size - _EDGES for size in sizes if size >= _LARGE)


@contextmanager
def _named(spec: ModelSpec) -> Iterator[None]:
    """Raises ConfigError with the model's name for whatever its files are refused for meanwhile."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"models.{spec.name}: {error.message}") from error
    except Unavailable:
        raise
    except Exception as error:  # whatever transformers, huggingface_hub or safetensors make of its files
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(f"models.{spec.name}: {spec.path} cannot be loaded: {reason}") from error


def _load(
    spec: ModelSpec, block_bytes: int, team: RankTeam | None, target: LoadTarget, say: Callable[[str], None]
) -> LoadedModel:
    checkpoint = open_checkpoint(spec.path, spec.revision)
    described = describe(checkpoint)
    if described.packed and team is not None:
        raise ConfigError(
            "its weights are quantised, or in a GGUF file, and ranks share neither; a `tensor_parallel` "
            "of 1 is right"
        )
    if described.floats:
        target.check_floats()
    if described.pooling is not None:
        _check_pooling_model(described, team, target)
    outlined, dtype = _outlined(spec, described, target, team is None, say)
    target.check_room(described.size(outlined, dtype))
    if team is None or team.group.rank == 0:
        checkpoint.require_digest(spec.sha256)
    widens = bool(described.matrices()) and target.widens(outlined, dtype)
    built = described.build(outlined, dtype, widens)
    module = built.module.eval().requires_grad_(False)
    if widens:
        widen(module)
    if described.pooling is not None:
        return _load_pooling_model(spec, block_bytes, described.pooling, built, module, target)
    kept = target.kv_dtype(spec.kv_dtype, torch.float32 if computes_in_float32(module) else dtype)
    observer = prove(module, team, target, described.release)
    target.settle(module)
    target.check_scorings(observer.scorings)
    heads, head_dim = next(iter(observer.layers.values()))
    ranks = 1 if team is None else team.group.size
    kv_name = str(kept).removeprefix("torch.")
    geometry = Geometry(
        len(observer.layers), heads, head_dim, kept.itemsize, block_bytes, ranks, kv_name in SCALED
    )
    decoder = target.fuse_decoder(module, observer.scorings, geometry)
    if team is not None and not team.group.agree(decoder is not None):
        decoder = None  # all ranks must exchange the same
    if spec.dtype == "auto":
        target.round_inputs(module)  # after all comparisons, which are closer than that
    card = card_of(spec, module, built.parameters, built.tokenizer, built.sampling, kv_name)
    plain = all(one.sinks is None and one.slopes is None for one in observer.scorings.values())
    q_heads = next(iter(observer.heads)) if plain and len(observer.heads) == 1 else 0
    facts = (checkpoint.identity(), spec.dtype, str(dtype), kv_name, decoder is None, *_program())
    identity = hashlib.sha256(repr(facts).encode()).hexdigest()
    return LoadedModel(module, decoder or Modular(module), kept, geometry, card, None, q_heads, identity)


def _check_pooling_model(described: Description, team: RankTeam | None, target: LoadTarget) -> None:
    target.check_pooling_model()
    if described.packed or team is not None:
        raise ConfigError(
            "it makes vectors of texts, which is served of weights that are not quantised, by one rank; a "
            "`tensor_parallel` of 1 is right"
        )


def _load_pooling_model(
    spec: ModelSpec, block_bytes: int, pooling: Pooling, built: Built, module: Any, target: LoadTarget
) -> LoadedModel:
    """Loads a model that makes vectors: it keeps no K and V, so its blocks are as small as can be."""

    def prepare(module: nn.Module) -> None:
        target.place(module)
        target.fuse(module)

    card = card_of(spec, module, built.parameters, built.tokenizer, built.sampling, "float32")
    if pooling.lower and built.tokenizer("ABC")["input_ids"] != built.tokenizer("abc")["input_ids"]:
        raise ConfigError("its texts are to be in small letters, and its tokenizer does not see to that")
    types = "token_type_ids" in built.tokenizer.model_input_names
    pooling_model = prove_pooling_model(module, pooling, prepare, types=types)
    target.settle(module)
    with torch.inference_mode():
        size = pooling_model(np.zeros(1, np.int64), np.ones(1, np.int64), (0,)).shape[1]
    most = min(card.context_length - pooling_model.first, pooling.most_tokens or card.context_length)
    card = structs.replace(
        card,
        context_length=most,
        chat_template=None,
        task=pooling.task,
        dimensions=size,
        prefix=pooling.prefix,
    )
    geometry = Geometry(1, 1, 1, torch.float32.itemsize, block_bytes)
    return LoadedModel(module, Modular(module), torch.float32, geometry, card, pooling_model)


def _program() -> tuple[str, ...]:
    """Returns a name for all on which numbers may depend besides the model: our own code, torch and the
    processor's kind."""
    own = hashlib.sha256()
    package = Path(__file__).parents[1]
    for room in ("exec", "kernels"):
        for file in sorted((package / room).rglob("*.py")):
            own.update(file.read_bytes())
    return own.hexdigest(), torch.__version__, torch.backends.cpu.get_cpu_capability()


def _outlined(
    spec: ModelSpec, described: Description, target: LoadTarget, whole: bool, say: Callable[[str], None]
) -> tuple[nn.Module, torch.dtype]:
    """Returns the model without memory for its weights, and the number format that it is to have. whole:
    whether one rank has it all; several ranks cut transformers' own experts."""
    if spec.dtype != "auto":
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return described.outline(dtype, whole), dtype
    own = target.own_format(described.config, described.matrices)
    outlined = described.outline(own, whole)
    return outlined, target.choose_format(own, outlined, say)


def count_blocks(models: Mapping[str, LoadedModel], kv_bytes: int, block_bytes: int, ranks: int) -> int:
    """Returns the blocks of each rank, which share `kv_bytes` evenly. Raises ConfigError if they hold no page
    of a model."""
    blocks = kv_bytes // (ranks * block_bytes)
    for name, model in models.items():
        if model.geometry.blocks_per_page > blocks:
            raise ConfigError(
                f"kv_memory: {kv_bytes:,} bytes, which this unit has of it, hold no page of {name}; at least "
                f"{model.geometry.blocks_per_page * block_bytes * ranks:,} for each unit are needed"
            )
    return blocks
