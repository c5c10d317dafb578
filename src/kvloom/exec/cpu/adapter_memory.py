"""The adapters of a unit on cores: read and proven beside running jobs, and dropped when their memory is
wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvloom.exec.cpu.adapted import PackedAdapter, ServedAdapters, Shapes
from kvloom.kv.arena import Arena
from kvloom.kv.memory import return_free_memory
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import I32
from kvloom.types.job import ProvenAdapter
from kvloom.types.spec import AdapterSpec, ModelSpec

ALL_AT_START = 4
"""At the start adapters stay in memory as long as they take no more than one part in so many of the pool."""


class CpuAdapters:
    """Satisfies `AdapterMemory` on a CPU."""

    def __init__(self, shapes: Mapping[str, Shapes | None], arena: Arena) -> None:
        """shapes: those of each model's linear layers; None for a model without any that adapters may
        change."""
        self._served = {name: ServedAdapters(own) for name, own in shapes.items() if own is not None}
        self._arena = arena
        self._reader = ThreadPoolExecutor(1, "adapters")
        self.proven: dict[str, ProvenAdapter] = {}

    @property
    def here(self) -> frozenset[str]:
        return frozenset(name for served in self._served.values() for name in served.names)

    def having(self, base: str, names: Sequence[str]) -> Mapping[str, PackedAdapter]:
        """Returns the adapters of a base that are in memory."""
        return self._served[base].having(names)

    def prove(self, models: Sequence[ModelSpec], progress: Callable[[str], None]) -> None:
        """Reads all adapters of the models, one after the other. Those that come first stay in memory. Raises
        ConfigError."""
        left = self._arena.blocks // ALL_AT_START
        for model in models:
            for adapter in model.adapters:
                progress(f"loading adapter {adapter.name}")
                proven = self.proven[adapter.name] = self._read(model.name, adapter)
                left -= proven.blocks
                if left < 0:
                    self.drop(adapter.name)

    def read(self, base: str, adapter: AdapterSpec) -> asyncio.Future[ProvenAdapter]:
        return asyncio.get_running_loop().run_in_executor(self._reader, self._read, base, adapter)

    def check(self, base: str, adapter: AdapterSpec) -> asyncio.Future[ProvenAdapter]:
        def check() -> ProvenAdapter:
            return self._proven(self._served[base].pack(self._served[base].read(adapter.name, adapter.path)))

        return asyncio.get_running_loop().run_in_executor(self._reader, check)

    def drop(self, adapter: str) -> None:
        for served in self._served.values():
            served.drop(adapter)
        return_free_memory()  # its blocks of the pool hold something else from now on

    def make_room(self, blocks: I32) -> None:
        self._arena.discard(blocks)

    def close(self) -> None:
        """Waits for an adapter that is being read, and ends the thread."""
        self._reader.shutdown()

    def _read(self, base: str, adapter: AdapterSpec) -> ProvenAdapter:
        if base not in self._served:
            raise ConfigError(
                f"models.{adapter.name}: its base {base} is no decoder whose layers kvloom fuses; one of "
                "Llama, Mistral, Qwen2 or Qwen3 is right"
            )
        return self._proven(self._served[base].load(adapter.name, adapter.path))

    def _proven(self, packed: PackedAdapter) -> ProvenAdapter:
        return ProvenAdapter(packed.digest, -(-packed.bytes // self._arena.block_bytes))
