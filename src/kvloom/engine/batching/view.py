"""What a batching policy sees, and what it may answer."""

from __future__ import annotations

from dataclasses import dataclass

GROWING = 8  # sequences that run for each page that stays free for them when a prompt is let in
STARVING = 64  # jobs that may start elsewhere before a waiting model may take blocks beyond its quota
LASTING = 256  # jobs for which quotas leave a model its only sequence, so that it is not computed in vain

Order = tuple[int, int, int]  # priority, arrival over all models, choice: the smaller goes first


def kept_to_grow(running: int, page_blocks: int) -> int:
    """Blocks that stay free when a prompt is let in, for what runs."""
    return page_blocks * -(-running // GROWING)


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model of the unit.

    waiting: requests without KV; partial: those with a part of their prompt computed and no job running.
    head_blocks: what the next prefill's first sequence takes until its prompt is whole.
    head: that sequence's order; its `waited`: jobs that have started since it came, or was last preempted.
    decodable: sequences ready for their next token; decode_blocks: what a step of all of them takes.
    held: sequences with blocks and in no running job, so that they could be preempted; victim: the order of
    the first of them to be.
    running: sequences with blocks.
    prefilling, decoding: whether such a job of this model runs now.
    prefill_share, decode_share: units of compute that such a job takes beside others; 0 where the policy is
    to say.
    last_prefill, last_decode: when such a job last began or ended, counted in jobs of the unit.
    """

    name: str
    waiting: int
    partial: int
    head_blocks: int
    head: Order
    decodable: int
    decode_blocks: int
    held: int
    victim: Order
    running: int
    prefilling: bool
    decoding: bool
    used: int
    quota: int
    page_blocks: int
    last_prefill: int
    last_decode: int
    waited: int
    prefill_share: int = 0
    decode_share: int = 0

    @property
    def wants_prefill(self) -> bool:
        return bool(self.waiting or self.partial) and not self.prefilling

    @property
    def growth(self) -> int:
        """Blocks that stay free for what runs to grow when a prompt is let in, or the next steps would take
        them from somebody, again and again. None for the rest of a prompt that has begun, nor for those that
        go along with it."""
        return 0 if self.partial else kept_to_grow(self.running, self.page_blocks)

    @property
    def wants_decode(self) -> bool:
        return self.decodable > 0 and not self.decoding

    @property
    def excess(self) -> int:
        """Blocks held beyond the quota."""
        return self.used - self.quota

    @property
    def starving(self) -> bool:
        """A prompt of it waits for blocks, or for the rest of them, for too long, and nothing else runs."""
        return self.wants_prefill and self.waited > STARVING and self.running == self.partial


@dataclass(frozen=True, slots=True)
class UnitView:
    """The unit at one moment. compute: units of the device, of which `idle` are in no job; less than 0 where
    shares overlap, which they may do by `overload`. jobs: started so far. walls: quotas do not bend."""

    models: tuple[ModelView, ...]
    compute: int
    idle: int
    free_blocks: int
    last_was_prefill: bool
    jobs: int
    overload: int = 0
    walls: bool = False

    def free(self, model: ModelView) -> int:
        """Blocks that `model` may take without anybody giving way."""
        return min(self.free_blocks, max(0, -model.excess)) if self.walls else self.free_blocks

    def givers(self, model: ModelView) -> list[ModelView]:
        """Who could give way to `model`."""
        return [m for m in self.models if m.held and (m is model or not self.walls)]

    @property
    def prefill_runs(self) -> bool:
        return any(model.prefilling for model in self.models)

    @property
    def urgent(self) -> ModelView | None:
        """The starving model whose prompt goes first: its blocks are kept for it, whatever quotas say."""
        return min((model for model in self.models if model.starving), key=lambda m: m.head, default=None)

    @property
    def filling(self) -> bool:
        """True while fewer sequences run than wait."""
        return sum(model.running for model in self.models) < sum(model.waiting for model in self.models)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Start a prefill job of `model` on `share` units of compute, taking at most `blocks` new blocks."""

    model: str
    share: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Start a decode step of all that is ready of `model`."""

    model: str
    share: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take the blocks of one sequence of `model`: lowest priority first, then the latest."""

    model: str


Action = Prefill | Decode | Preempt


def same_turn(one: Action | None, other: Action | None) -> bool:
    """Whether they are for the same thing, whatever it takes of compute and of blocks."""
    if one is None or other is None:
        return one is other
    return type(one) is type(other) and one.model == other.model


def last_resort(view: UnitView) -> Action | None:
    if view.idle < view.compute:
        return None
    first = min((m for m in view.models if m.wants_prefill), key=lambda m: m.head, default=None)
    if first is None:
        return None
    if first.head_blocks <= view.free_blocks:
        return Prefill(first.name, view.compute, view.free_blocks)
    later = [m for m in view.models if m.held and m.victim > first.head]
    return Preempt(max(later, key=lambda m: m.victim).name) if later else None


def turn(view: UnitView, model: ModelView, prefill_share: int, decode_share: int) -> Action | None:
    """What a model that is in no job would do next, whatever compute there is."""
    rested = model.last_prefill <= model.last_decode or not model.wants_decode
    kept = view.urgent.head_blocks if view.urgent and view.urgent is not model else 0
    room = view.free(model) - kept - model.growth
    if model.wants_prefill and rested and model.head_blocks <= room:
        return Prefill(model.name, prefill_share, room)
    if not model.wants_decode:
        return None
    if model.decode_blocks > view.free(model):
        return Preempt(max(view.givers(model), key=lambda m: m.victim).name)
    return Decode(model.name, decode_share)


def waiting_turns(view: UnitView) -> list[ModelView]:
    """Models that are in no job and want one; who has rested longest is first."""
    wanting = (m for m in view.models if m.wants_prefill or m.wants_decode)
    return sorted(
        (m for m in wanting if not (m.prefilling or m.decoding)),
        key=lambda m: max(m.last_prefill, m.last_decode),
    )
