"""The adapters of a unit's models: each is a model of its own name for callers, and runs in its base's queue,
in batches with the base and with its other adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol, TypeVar

from msgspec import structs

from kvloom.engine.model_queue import ModelQueue
from kvloom.kv.prefix_feed import adapter_salt
from kvloom.types.request import ModelCard
from kvloom.types.spec import AdapterSpec, ModelSpec


class Salted(Protocol):
    """A body of a verb that names a model and a salt."""

    @property
    def model(self) -> str: ...

    @property
    def salt(self) -> str: ...


Body = TypeVar("Body", bound=Salted)


class ModelQueues(dict[str, ModelQueue]):
    """The queues by their models' names. It is asked for an adapter's, too, and has that of its base; it
    counts and lists each queue once."""

    def __init__(self, queues: Mapping[str, ModelQueue], models: Iterable[ModelSpec] = ()) -> None:
        super().__init__(queues)
        self.adapters: Final[dict[str, tuple[str, AdapterSpec]]] = {}
        """By name, each with its base."""
        for model in models:
            for adapter in model.adapters:
                self.adapters[adapter.name] = model.name, adapter

    def __missing__(self, name: str) -> ModelQueue:
        base, _ = self.adapters[name]
        return self[base]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.adapters

    @property
    def cards(self) -> dict[str, ModelCard]:
        """The cards of all models, adapters included."""
        cards = {name: queue.card for name, queue in self.items()}
        for name, (base, adapter) in self.adapters.items():
            cards[name] = structs.replace(cards[base], name=name, path=adapter.path, parent=base)
        return cards

    def of_base(self, body: Body) -> Body:
        """Returns the body with the base for its model, for what an adapter shares with it: the tokenizer."""
        if body.model not in self.adapters:
            return body
        return structs.replace(body, model=self.adapters[body.model][0])  # type: ignore[type-var]

    def salted(self, body: Body) -> Body:
        """Returns the body with the salt by which its prefixes are cached: an adapter has its own, because it
        has K and V of its own."""
        if body.model not in self.adapters:
            return body
        return structs.replace(body, salt=adapter_salt(body.model, body.salt))  # type: ignore[type-var]
