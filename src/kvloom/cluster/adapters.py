"""Adapters that come and go while their base serves: each unit loads and checks an adapter before the fleet's
specification has it. No unit starts anew for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from kvloom.cluster.edits import AdapterEdit, UnitEdit
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.state import FleetSpec
from kvloom.types.errors import BadRequest, Conflict, KvloomError, Unavailable, UnknownModel
from kvloom.types.spec import AdapterSpec, EngineSpec
from kvloom.types.verbs import CheckModel, LoadAdapter, UnloadAdapter

_log = logging.getLogger(__name__)

Changes = dict[str, tuple[AdapterEdit, ...]]
"""The adapters that come and go, by unit."""


class FilesServer(Protocol):
    """The verbs of a unit that orders call."""

    async def load_adapter(self, body: LoadAdapter) -> None: ...

    async def unload_adapter(self, body: UnloadAdapter) -> None: ...

    async def check_model(self, body: CheckModel) -> None: ...


class Reaching(Protocol):
    """Gives access to units; the `Units` of the gateway's router do."""

    def client(self, unit: str) -> FilesServer:
        """Returns the client of a unit that is here."""

    async def ask_again(self, unit: str) -> None:
        """Asks a unit what it serves, and waits for its answer."""


class AdapterOrders:
    """Carries out orders about adapters at one gateway."""

    def __init__(self, mirror: Mirror, units: Reaching) -> None:
        self._mirror = mirror
        self._units = units

    async def load(self, name: str, path: str, base: str = "") -> None:
        """Serves another adapter at all units that serve its base; base: if empty, the fleet's only model. If
        one of them refuses it, none has it. Raises BadRequest, Conflict, and Unavailable if no unit is
        there."""
        spec = self._mirror.spec
        bases = sorted({model.name for engine in _engines(spec).values() for model in engine.models})
        if name in bases:
            raise BadRequest(f"{name} is the name of a model; another one is right", param="lora_name")
        if name in _served(spec):
            raise BadRequest(
                f"The lora adapter '{name}' has already been loaded; unload it first, or choose another name",
                param="lora_name",
            )
        if base and base not in bases:
            raise BadRequest(
                f"base_model_name: no model {base!r}; served: {', '.join(bases) or 'none'}",
                param="base_model_name",
            )
        if not base and len(bases) != 1:
            raise BadRequest(
                f"base_model_name: one of {', '.join(bases) or 'no models'} is right", param="base_model_name"
            )
        base = base or bases[0]
        edit = AdapterEdit(base=base, adapter=AdapterSpec(name, path))
        units = [
            unit for unit, engine in _engines(spec).items() if base in [one.name for one in engine.models]
        ]
        await self.change(dict.fromkeys(units, (edit,)))

    async def unload(self, name: str) -> None:
        """Serves no new request of an adapter anywhere; those that run go on to their end. Raises
        UnknownModel."""
        found: Changes = {}
        for unit, engine in _engines(self._mirror.spec).items():
            for model in engine.models:
                if adapter := next((one for one in model.adapters if one.name == name), None):
                    found[unit] = (AdapterEdit(base=model.name, adapter=adapter, remove=True),)
        if not found:
            raise UnknownModel(f"The lora adapter '{name[:200]}' cannot be found.", param="lora_name")
        await self.change(found)

    async def change(self, changes: Changes) -> tuple[str, ...]:
        """Lets adapters come and go at units, at all of them or, if one refuses, at none. Returns the fields
        of the specification that somebody else has changed at the same time."""
        if not changes:
            return ()
        here = {unit: edits for unit, edits in changes.items() if self._mirror.outlook(unit) == "here"}
        coming = {unit: [one for one in edits if not one.remove] for unit, edits in here.items()}
        if not any(coming.values()) and any(not one.remove for edits in changes.values() for one in edits):
            raise Unavailable(f"no unit of {', '.join(changes)} is there to prove an adapter", retry_after=1)
        for unit, engine in _engines(self._mirror.spec).items():
            if coming.get(unit) and (problem := _problem(unit, engine, self._mirror.spec)):
                raise BadRequest(problem, param="base_model_name")
        loaded: list[tuple[str, AdapterEdit]] = []
        try:
            await _together(self._load(unit, edits, loaded) for unit, edits in coming.items())
            edits = {unit: UnitEdit(adapters=some) for unit, some in changes.items()}
            overrode = await self._mirror.edit(edits)
        except BaseException:
            for unit, one in loaded:
                if not self._is_specified(unit, one):
                    await self._unload(unit, [one])
            raise
        gone = {unit: [one for one in edits if one.remove] for unit, edits in here.items()}
        await _together(self._unload(unit, edits) for unit, edits in gone.items())
        await _together(self._units.ask_again(unit) for unit in here)
        return overrode

    def _is_specified(self, unit: str, edit: AdapterEdit) -> bool:
        engine = _engines(self._mirror.spec).get(unit)
        return engine is not None and edit.adapter.name in engine.served

    async def _load(
        self, unit: str, edits: Iterable[AdapterEdit], loaded: list[tuple[str, AdapterEdit]]
    ) -> None:
        """Adds the adapters that the unit serves then to `loaded`."""
        for edit in edits:
            await load_at(unit, self._units.client(unit), edit.base, edit.adapter)
            loaded.append((unit, edit))

    async def _unload(self, unit: str, edits: Iterable[AdapterEdit]) -> None:
        """Unloads adapters. A unit that does not answer keeps them until its process ends, and nobody asks it
        for them."""
        for edit in edits:
            try:
                await self._units.client(unit).unload_adapter(UnloadAdapter(name=edit.adapter.name))
            except UnknownModel:
                continue
            except KvloomError as error:
                _log.warning("%s still has the adapter %s: %s", unit, edit.adapter.name, error.message)


async def load_at(unit: str, client: FilesServer, base: str, adapter: AdapterSpec) -> None:
    """Has a unit serve an adapter. Raises the unit's error, with its name."""
    with told_of(unit):
        await client.load_adapter(LoadAdapter(base=base, name=adapter.name, path=adapter.path))


@contextmanager
def told_of(unit: str) -> Iterator[None]:
    """Raises what a unit does meanwhile, with its name."""
    try:
        yield
    except KvloomError as error:
        kind = type(error) if isinstance(error, (BadRequest, Conflict, Unavailable)) else Unavailable
        raise kind(f"{unit}: {error.message}", param=error.param) from error


async def _together(asked: Iterable[Awaitable[None]]) -> None:
    """Waits for all, and raises the first error then."""
    for error in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(error, BaseException):
            raise error


def _engines(spec: FleetSpec) -> Mapping[str, EngineSpec]:
    return {name: unit.engine for name, unit in spec.units.items() if not unit.removed}


def _served(spec: FleetSpec) -> set[str]:
    return {name for engine in _engines(spec).values() for name in engine.served}


def _problem(unit: str, engine: EngineSpec, spec: FleetSpec) -> str:
    """Returns why a unit serves no adapters; empty if it does."""
    lends = any(one.weave is not None and unit in one.weave.colds for one in _engines(spec).values())
    if engine.abilities.adapts and engine.weave is None and not lends:
        return ""
    return f"{unit} serves no adapters; units of one rank on `cpu` that neither lend nor borrow do"
