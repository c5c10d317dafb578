"""What a sequence owes a peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloom.kv.cache import ModelCache
from kvloom.types.transfer import KVAddress, Shipment


@dataclass(slots=True, eq=False)
class Outbound:
    """Tokens [sent, end) of a sequence go to `address`. held: pages that copies may still read after the
    sequence has let go of them. over: no copy will begin any more."""

    shipment: Shipment
    address: KVAddress
    sent: int
    end: int
    held: list[int] = field(default_factory=list)
    over: bool = False

    def begin(self, cache: ModelCache, sequence: int, computed: int) -> None:
        """The sequence has blocks and `computed` tokens: those go at once, later ones with their forwards."""
        ready = min(computed, self.end)
        if ready > self.sent:
            owed = cache.sends.planned(sequence, self.address, self.shipment, self.sent, ready)
            self.shipment.put(owed.whole(cache.pages.map))
            self.sent = ready
        if self.sent < self.end:
            cache.sends.mark(sequence, self.address, self.shipment, self.sent, self.end)

    def computed(self, tokens: int) -> None:
        """A forward has computed the sequence up to `tokens`, and put what it marked."""
        self.sent = max(self.sent, min(tokens, self.end))

    def hold(self, cache: ModelCache, sequence: int) -> None:
        """The sequence is about to lose its pages."""
        if not self.over:
            self.held += cache.sends.hold(sequence, self.address.begin, self.sent)

    def settle(self, cache: ModelCache) -> None:
        """Nothing is copied any more."""
        self.over = True
        cache.sends.let_go(self.held)
