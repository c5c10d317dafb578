"""Weights in mapped files: pages that have been copied are given back to the kernel at once, so that a load
takes little more memory than what stays."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from kvloom.kv.memory import advise, whole_pages

_MAPS: Final = Path("/proc/self/maps")


class MappedFiles:
    """Checkpoint files of safetensors, which are mapped from the first look at their tensors as long as this
    object lives."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._opened: dict[Path, Any] = {}
        self._spans: list[tuple[int, int]] = []

    def tensors(self) -> Iterator[MappedTensor]:
        """Yields every tensor. Nothing of it is read yet."""
        if not self._opened:
            self._opened = {file: safe_open(file, "pt") for file in self._files}
            self._spans = _spans_of({_begin(one) for one in self._opened.values()})
        for file, opened in self._opened.items():
            for name in opened.keys():  # noqa: SIM118 -- it is no mapping
                yield MappedTensor(self, name, file, opened.get_slice(name))

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether the tensor lies in one of the files."""
        if tensor.device.type != "cpu" or tensor.is_mkldnn:
            return False
        begin = tensor.data_ptr()
        return any(low <= begin and begin + tensor.nbytes <= high for low, high in self._spans)

    def release(self) -> None:
        """Gives all pages of the files back. If one is read after all, it comes from its file again."""
        for low, high in self._spans:
            _give_back(low, high)

    def release_after(self, tensor: Tensor) -> None:
        """Gives the pages of a tensor in one of the files back once this tensor object is gone. If one is
        read after all, it comes from the file again."""
        if self.holds(tensor):
            begin = tensor.data_ptr()
            last = weakref.finalize(tensor, _release, weakref.ref(self), begin, begin + tensor.nbytes)
            last.atexit = False


def _begin(opened: Any) -> int:
    """Returns the address of one of a file's tensors; 0 if it has none."""
    name = next(iter(opened.keys()), None)
    address: int = 0 if name is None else opened.get_slice(name)[...].data_ptr()
    return address


def _spans_of(addresses: set[int]) -> list[tuple[int, int]]:
    """Returns the mappings in which the addresses lie, as the kernel says, if they are of files."""
    spans = []
    with suppress(OSError):  # another system, on which nothing is given back
        for line in _MAPS.read_text().splitlines():
            words = line.split(maxsplit=5)
            low, high = (int(one, 16) for one in words[0].split("-"))
            if len(words) == 6 and words[5].startswith("/") and any(low <= one < high for one in addresses):
                spans.append((low, high))
    return spans


def own_pages(size: int) -> Tensor:
    """Returns bytes, uint8 [size], that the kernel has back once the tensor is gone. The C library would keep
    them for later, between other memory that stays."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _release(files: weakref.ref[MappedFiles], begin: int, end: int) -> None:
    """Gives the pages between two addresses back, if the files are mapped still."""
    if files() is not None:
        _give_back(begin, end)


def _give_back(begin: int, end: int) -> None:
    """Gives the whole pages between two addresses in a mapped file back, if the system takes them."""
    begin, end = whole_pages(begin, end)
    if begin < end:
        with suppress(OSError):
            advise(begin, end - begin, mmap.MADV_DONTNEED)


class MappedTensor:
    """A tensor in a mapped file. It is read as a slice of safetensors is, in whose place transformers takes
    it; what is read is given back once it has been converted or copied."""

    def __init__(self, files: MappedFiles, name: str, file: Path, stored: Any) -> None:
        self.name = name
        self.file = file
        self._files = files
        self._stored = stored

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self._stored[index]
        self._files.release_after(tensor)
        return tensor

    def get_shape(self) -> list[int]:
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        """Returns safetensors' name of its number format."""
        return str(self._stored.get_dtype())
