"""A checkpoint's files, which a stranger may have made: finds them, and refuses what must not become a model.

Weights are read from safetensors or from one GGUF file, never from pickles, and no file outside the
checkpoint's folder is read. The files' sizes, the numbers of the config and the headers of the weights are
checked before memory is taken for what they announce. Nothing here knows torch, so that commands can use it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download

from kvloom.exec.gguf.header import SUFFIX, GgufHeader, read_header
from kvloom.types.errors import ConfigError

CONFIG: Final = "config.json"
WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
ADAPTER: Final = "adapter_config.json"
TEMPLATES: Final = "additional_chat_templates"  # the one folder in a checkpoint that transformers looks into
MODULES: Final = "modules.json"  # sentence-transformers' list of what makes a vector of a text
POOLING: Final = "*_Pooling/config.json"  # what it says of the states

MOST_CONFIG: Final = 4 << 20  # bytes of a config
MOST_INDEX: Final = 32 << 20  # bytes of a weight index
MOST_READ: Final = 256 << 20  # bytes of any other file that is read as a whole: tokenizers, vocabularies
MOST_HEADERS: Final = 64 << 20  # bytes of the headers of all weight files together
_HEAD: Final = 1 << 20  # bytes at a weight file's begin that tell it from others
MOST_DEPTH: Final = 64  # of a config's nesting
MOST_NUMBER: Final = 1 << 40  # of any number in a config
MOST_DIMENSIONS: Final = 16  # of a tensor

SMALL: Final = ("*.json", "*.jinja", "*.txt", "*.model")  # all that is read beside the weights
_WEIGHTS: Final = re.compile(r"\w[\w.+-]*\.safetensors(\.index\.json)?", re.ASCII)
_OF_RANKS: Final = re.compile(r"shard-\d{5}-model-.*\.safetensors")

_NUMBERS: Final[Mapping[int, Sequence[str]]] = {
    1 << 12: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    1 << 16: (
        "num_attention_heads",
        "num_key_value_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "head_dim",
        "num_labels",
    ),
    1 << 20: ("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"),
    1 << 22: ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "moe_intermediate_size"),
    1 << 24: ("vocab_size",),
    1 << 27: (
        *("max_position_embeddings", "original_max_position_embeddings", "n_positions", "n_ctx"),
        *("max_sequence_length", "max_seq_len", "seq_length", "sliding_window"),
    ),
}
"""The most that a config may say for sizes from which modules, tables and positions are made."""
_MOST: Final = {key: most for most, keys in _NUMBERS.items() for key in keys}
_COUNT: Final = re.compile(r"(n|num)_.*|.*_(size|dim|layers|heads|experts)")
_MOST_OF_A_COUNT: Final = 1 << 24
_LAYERS: Final = re.compile(r"(n|num|decoder)(_hidden)?_layers?")
_EXPERTS: Final = re.compile(r"(n|num|moe_num)_(local_|routed_)?experts")
_MOST_EXPERTS: Final = 1 << 16  # of all layers together, each a module of its own

_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The bits of an element, by the names that safetensors has for number formats."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's files, checked."""

    folder: Path
    weights: tuple[Path, ...]
    """The files that hold the weights, by name."""
    elements: int
    """The number of elements of all weights together."""
    quantization: Mapping[str, Any] | None
    """The part of the config that says how the weights are quantised; None if they are not."""
    gguf: GgufHeader | None = None
    """The header of the one file in `folder` if that is a GGUF file; None otherwise."""

    def digest(self) -> str:
        """Returns SHA-256 in hexadecimal over the sorted lines of the weight files' own SHA-256, which is
        what `sha256sum *.safetensors | cut -c-64 | LC_ALL=C sort | sha256sum` prints; of a GGUF file, its
        own. It reads them all."""
        lines: list[str] = []
        for file in self.weights:
            with file.open("rb") as weights:
                lines.append(hashlib.file_digest(weights, "sha256").hexdigest() + "\n")
        if self.gguf is not None:
            return lines[0].strip()
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()

    def identity(self) -> str:
        """Returns an identity of these weights that does not need them to be read: a digest over the config
        and the weight files' names, sizes, headers and, of each, the time of its last change. In the hub's
        cache a file's own name is its digest, and stands for that time. If somebody changes weights in place
        and sets the time back, it stays the same."""
        digest = hashlib.sha256()
        config = self.folder / CONFIG
        if self.gguf is None and config.is_file():
            digest.update(config.read_bytes())
        for file in self.weights:
            target = file.resolve()
            state = target.stat()
            since = target.name if target.parent.name == "blobs" else state.st_mtime_ns
            digest.update(repr((file.name, state.st_size, since)).encode())
            with file.open("rb") as weights:
                digest.update(weights.read(_HEAD))
        return digest.hexdigest()

    def require_digest(self, wanted: str | None) -> None:
        """Raises ConfigError if the weights have another digest than the wanted one; with None nothing is
        read."""
        if wanted is not None and (found := self.digest()) != wanted:
            raise ConfigError(f"its weights have the sha256 {found}, and {wanted} is wanted")


def open_checkpoint(path: str, revision: str | None = None) -> Checkpoint:
    """Returns the checkpoint in the folder `path`, or in the GGUF file of this path, or that of the hub id,
    which is downloaded if it is not in the hub's cache. Raises ConfigError if its files are not to be read,
    and what the hub's client raises."""
    folder = Path(path)
    if folder.suffix == SUFFIX and not folder.is_dir():
        return _open_gguf(folder)
    if not folder.is_dir():
        folder = _download(path, revision)
    _check_whole(folder)
    config = _read_config(folder)
    weights = tuple(folder / name for name in _weight_names(folder, config))
    return Checkpoint(folder, weights, count_elements(weights), _quantization(config))


def _open_gguf(file: Path) -> Checkpoint:
    if not file.is_file():
        raise ConfigError(f"{file} does not exist, or is no file; a GGUF file is right")
    header = read_header(file)
    return Checkpoint(file.parent, (file,), header.elements, quantization=None, gguf=header)


# -- where the files are --------------------------------------------------------------------------------


def _download(path: str, revision: str | None) -> Path:
    """Returns the folder in the hub's cache, with the weights that the model is made from and no others."""
    small = snapshot_download(path, revision=revision, allow_patterns=list(SMALL), ignore_patterns="*/*")
    folder = Path(small)
    _check_whole(folder)
    names = _weight_names(folder, _read_config(folder), there=False)
    beside = [POOLING] if (folder / MODULES).is_file() else []
    return Path(snapshot_download(path, revision=folder.name, allow_patterns=[*names, *beside]))


def _check_whole(folder: Path) -> None:
    """Checks the files of a folder that is to hold a whole model. Raises ConfigError."""
    check_files(folder)
    if (folder / ADAPTER).exists():
        raise ConfigError(
            f"it is an adapter, or has one ({ADAPTER}); a whole model is right, and `{{base, adapter}}` for "
            "an adapter"
        )


def check_files(folder: Path) -> None:
    """Refuses files that lie elsewhere, are no files, or are larger than what is read at once may be. Links
    may lead to other files of the folder, and in the hub's cache to the blobs beside it."""
    root = folder.resolve()
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    for file in _files(root):
        try:
            target = file.resolve()
        except (OSError, RuntimeError) as error:  # a link to itself
            raise ConfigError(f"its {file.name} is a link that leads nowhere") from error
        if not any(target.is_relative_to(place) for place in inside):
            raise ConfigError(f"its {file.name} is a link that leaves its folder, to {target}")
        if not target.exists() or target.is_dir():
            continue
        found = target.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"its {file.name} is no file")
        most = {CONFIG: MOST_CONFIG, ADAPTER: MOST_CONFIG, "generation_config.json": MOST_CONFIG}.get(
            file.name, MOST_READ
        )
        if any(file.match(pattern) for pattern in SMALL) and found.st_size > most:
            raise ConfigError(f"its {file.name} has {found.st_size:,} bytes; {most:,} at most are right")
        if _OF_RANKS.fullmatch(file.name):
            raise ConfigError(
                f"its {file.name} is a part that one of several ranks has saved; {WHOLE} is right"
            )


def _files(root: Path) -> Iterator[Path]:
    """Yields the files in the folder, and those in its folder of templates."""
    for file in sorted(root.iterdir()):
        yield file
        if file.name == TEMPLATES and file.is_dir() and not file.is_symlink():
            yield from sorted(file.iterdir())


# -- the config -----------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns the config as it stands in its file. Raises ConfigError for one that is nested deeply or names
    sizes that no model has."""
    file = folder / CONFIG
    if not file.is_file():
        raise ConfigError(f"{folder} has no {CONFIG}; a checkpoint's folder, or an id of the hub, is right")
    config = parsed(file.read_bytes(), f"its {CONFIG}")
    if not isinstance(config, dict):
        raise ConfigError(f"its {CONFIG} is no object")
    _check_numbers(config)
    return config


def _check_numbers(config: dict[str, Any]) -> None:
    layers = experts = 1
    todo: list[tuple[str, str, Any, int]] = [("", "", config, 0)]  # its way, its key, itself, how deep it is
    while todo:
        way, key, value, depth = todo.pop()
        if depth > MOST_DEPTH:
            raise ConfigError(f"its {CONFIG} is nested more than {MOST_DEPTH} deep")
        if isinstance(value, dict):
            todo += [(f"{way}.{name}" if way else name, name, one, depth + 1) for name, one in value.items()]
        elif isinstance(value, list):
            todo += [(way, key, one, depth + 1) for one in value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            counts = _COUNT.fullmatch(key)
            most = _MOST.get(key, _MOST_OF_A_COUNT if counts else MOST_NUMBER)
            least = -1 if counts or key in _MOST else -most  # -1 stands for none in some configs
            if not least <= value <= most and (isinstance(value, int) or key in _MOST):
                raise ConfigError(f"its {CONFIG}: {way[:100]}: {_shown(value)}; {most:,} at most is right")
            if isinstance(value, int) and _LAYERS.fullmatch(key):
                layers = max(layers, value)
            if isinstance(value, int) and _EXPERTS.fullmatch(key):
                experts = max(experts, value)
    if layers * experts > _MOST_EXPERTS:
        raise ConfigError(
            f"its {CONFIG} describes {layers:,} layers of {experts:,} experts; {_MOST_EXPERTS:,} experts "
            "at most are right"
        )


def _shown(value: float) -> str:
    text = str(value)
    return text if len(text) <= 30 else f"a number of {len(text)} digits"


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the part of the config that says how weights are quantised, as transformers finds it."""
    text = config.get("text_config")
    found = config.get("quantization_config")
    if found is None and isinstance(text, dict):
        found = text.get("quantization_config")
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"its {CONFIG}: quantization_config is no object")
    return found


# -- the weights ----------------------------------------------------------------------------------------


def _weight_names(folder: Path, config: Mapping[str, Any], *, there: bool = True) -> list[str]:
    """Returns the names of the weight files, sorted, as transformers chooses them. there: whether they have
    to be there already."""
    named = config.get("transformers_weights")
    if named is not None:
        file = _plain_name(named, CONFIG)
    elif (folder / WHOLE).is_file() or not (folder / INDEX).is_file():
        file = WHOLE
    else:
        file = INDEX
    names = _indexed(folder / file) if file.endswith(".json") else [file]
    for name in names if there else ():
        if not (folder / name).is_file():
            raise ConfigError(f"its files lack {name}; weights are read from safetensors only, in {folder}")
    return names


def _indexed(file: Path) -> list[str]:
    size = file.stat().st_size if file.is_file() else 0
    if size > MOST_INDEX:
        raise ConfigError(f"its {file.name} has {size:,} bytes; {MOST_INDEX:,} at most are right")
    index = parsed(file.read_bytes() if size else b"", f"its {file.name}")
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"its {file.name} has no weight_map")
    names = {_plain_name(place, file.name) for place in places.values()}
    if any(name.endswith(".json") for name in names):
        raise ConfigError(f"its {file.name} names another index; files of weights are right")
    return sorted(names)


def _plain_name(name: object, file: str) -> str:
    """Returns the name of a file in the folder that another file there gives. Raises ConfigError for one that
    leads elsewhere, and for one that is not of safetensors."""
    if not isinstance(name, str) or not _WEIGHTS.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 100 else repr(name)[:97] + "..."
        raise ConfigError(f"its {file} names {shown} for weights; a safetensors file in its folder is right")
    return name


def count_elements(files: Iterable[Path]) -> int:
    """Returns the number of elements that the files hold together, by their headers. Raises ConfigError if
    one contradicts its file, or if a tensor stands in two."""
    total, left, seen = 0, MOST_HEADERS, set[str]()
    for file in files:
        with file.open("rb") as weights:
            size, head = file.stat().st_size, weights.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > size - 8:
                raise ConfigError(
                    f"its {file.name} is cut short: {size:,} bytes, of which {length:,} are to be its header"
                )
            if length > left:
                raise ConfigError(
                    f"its {file.name} has a header of {length:,} bytes; {MOST_HEADERS:,} at most are right "
                    "for all files together"
                )
            left -= length
            header = parsed(weights.read(length), f"the header of its {file.name}", once=True)
        if not isinstance(header, dict):
            raise ConfigError(f"the header of its {file.name} is no object")
        header.pop("__metadata__", None)
        for name in header:
            if name in seen:
                raise ConfigError(f"its {file.name} has {name[:100]}, as another file has")
            seen.add(name)
        total += _checked(file.name, header, size - 8 - length)
    return total


def _checked(file: str, header: Mapping[str, Any], size: int) -> int:
    """Returns the number of elements of a file whose tensors have `size` bytes together. Raises ConfigError
    if its tensors overlap, leave room between them or have other sizes than their shapes say."""
    spans: list[tuple[int, int, str]] = []
    total = 0
    for name, told in header.items():
        where = f"its {file}: {name[:100]}"
        form = told.get("dtype") if isinstance(told, dict) else None
        bits = _BITS.get(form) if isinstance(form, str) else None
        if bits is None:
            raise ConfigError(f"{where} has no number format that is known")
        shape, span = told.get("shape"), told.get("data_offsets")
        if not _naturals(shape) or len(shape) > MOST_DIMENSIONS:
            raise ConfigError(f"{where} has the shape {str(shape)[:60]}, which cannot be")
        if not _naturals(span) or len(span) != 2 or not span[0] <= span[1] <= size:
            raise ConfigError(f"{where} is said to lie at {str(span)[:60]} of {size:,} bytes")
        elements = math.prod(shape)
        if elements * bits != (span[1] - span[0]) * 8:
            raise ConfigError(
                f"{where} has {span[1] - span[0]:,} bytes, and not those of {str(shape)[:60]} in "
                f"{told['dtype']}"
            )
        spans.append((span[0], span[1], name))
        total += elements
    end = 0
    for begin, after, name in sorted(spans):
        if begin != end:
            raise ConfigError(f"its {file}: {name[:100]} lies at {begin:,}, where {end:,} is right")
        end = after
    if end != size:
        raise ConfigError(f"its {file} has {size:,} bytes of weights, and its header tells of {end:,}")
    return total


def _naturals(value: object) -> bool:
    """Returns whether it is a list of whole numbers of which none is negative or beyond any memory."""
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 48 for one in value
    )


def parsed(text: bytes, what: str, *, once: bool = False) -> Any:
    """Returns the JSON text's value. once: refuses an object that has a key twice. Raises ConfigError."""
    try:
        return json.loads(text, object_pairs_hook=_each_once if once else None)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ConfigError(f"{what} cannot be read: {reason}") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands there twice")
    return made
