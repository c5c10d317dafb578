"""The view that a batching policy gets, and the actions that it may return."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

GROWING = 8  # sequences that run for each page that stays free for them when a prompt is let in
STARVING = 64  # jobs that may start elsewhere before a waiting model may take blocks beyond its quota
LASTING = 256  # jobs for which quotas leave a model its only sequence, so that it is not computed in vain

Order = tuple[int, int, int]  # priority, arrival over all models, choice: the smaller goes first


def kept_to_grow(running: int, page_blocks: int) -> int:
    """Returns the blocks that stay free for what runs when a prompt is let in."""
    return page_blocks * -(-running // GROWING)


class ModelView(Struct, frozen=True):
    """One model of the unit."""

    name: str
    waiting: int  # requests without K and V; 0 if no more may run
    partial: int  # requests with a part of their prompt computed and no job running
    head_blocks: int  # what the next prefill's first sequence takes until its prompt is whole
    head: Order  # the order of the first sequence of the next prefill
    head_since: int  # jobs that had started when that one came, or was last preempted
    decodable: int  # sequences ready for their next token
    decode_blocks: int  # what a step of all of them takes
    held: int  # sequences with blocks and in no running job, so that they could be preempted
    victim: Order  # the order of the last of them
    running: int  # sequences with blocks
    prefilling: bool  # whether a prefill job of this model runs now
    decoding: bool  # whether a decode job does
    used: int  # blocks
    quota: int  # blocks
    page_blocks: int
    last_prefill: int  # when a prefill last began or ended, counted in jobs of the unit
    last_decode: int
    prefill_share: int = 0  # parts of the device that a prefill takes beside others; 0: the policy is to say
    decode_share: int = 0
    outnumbered: bool = False  # whether a sequence of a tenant of whom more run is to give way to the head
    running_full: bool = False  # whether no more may run
    mixes: bool = True  # whether its decodes may go with a prompt's chunk: none is offloaded
    awake: bool = True  # whether its weights are in memory
    head_latest: float = inf  # when the head's next token has to come; -inf if that is too late already
    head_tokens: int = 0  # what the head still has to compute
    step_due: float = inf  # when the next token of `decodable` is due, of those that can still be in time
    step_order: Order = (0, 0, 0)  # the order of the first of `decodable`
    step_seconds: float = 0.0  # that a step of `decodable` is expected to take
    token_seconds: float = 0.0  # that a token of a prompt does, and one more sequence in a step
    tpot: float = inf  # seconds from one token of a stream to the next, by the model's objective

    @property
    def wants_prefill(self) -> bool:
        return self.awake and bool(self.waiting or self.partial) and not self.prefilling

    @property
    def step_priority(self) -> int:
        """The priority of the most urgent sequence that is ready for its next token."""
        return self.step_order[0]

    @property
    def growth(self) -> int:
        """Blocks that stay free for what runs to grow when a prompt is let in, or the next steps would take
        them from somebody, again and again. The rest of a prompt that has begun, and prompts that go along
        with it, may take these blocks as well."""
        return 0 if self.partial else kept_to_grow(self.running, self.page_blocks)

    def fits(self, room: int) -> bool:
        """Returns whether the next prompt fits into so many blocks. A prompt of a model without K and V
        always does."""
        return self.head_blocks <= room or not self.page_blocks

    @property
    def wants_decode(self) -> bool:
        return self.awake and self.decodable > 0 and not self.decoding

    @property
    def excess(self) -> int:
        """Blocks held beyond the quota."""
        return self.used - self.quota


class UnitView(Struct, frozen=True):
    """The unit at one moment."""

    models: tuple[ModelView, ...]  # those with requests that wait or run, in the order of the configuration
    served: int  # models, with and without requests
    compute: int  # parts of the device, in which shares are counted
    idle: int  # parts that no job has; less than 0 if shares overlap, which they may do by `overload`
    free_blocks: int
    total_blocks: int  # of the pool
    last_was_prefill: bool  # whether a prompt was in the last job
    jobs: int  # started so far
    overload: int = 0
    walls: bool = False  # quotas do not bend
    mixes: bool = False  # jobs may have a prompt's chunk and decodes
    now: float = 0.0  # seconds, by the unit's clock

    def free(self, model: ModelView) -> int:
        """Returns the blocks that `model` may take without anybody giving way."""
        return min(self.free_blocks, max(0, -model.excess)) if self.walls else self.free_blocks

    def room_to_step(self, model: ModelView) -> int:
        """Returns the blocks that the next step of `model` may take without anybody giving way. A sequence
        that runs alone is not bound by the model's quota: it would give way to itself, again and again."""
        return self.free_blocks if model.running == 1 else self.free(model)

    @property
    def next_blocks(self) -> int:
        """Returns the blocks that the next jobs of all models that are awake take."""
        return sum(m.head_blocks * m.wants_prefill + m.decode_blocks * m.wants_decode for m in self.models)

    @property
    def unclaimed(self) -> int:
        """Returns the free blocks that neither the next jobs take nor what runs is to grow into."""
        return self.free_blocks - self.next_blocks - sum(model.growth for model in self.models)

    @property
    def crowded(self) -> ModelView | None:
        """Returns a model of which no more may run, while a sequence of another tenant waits to which one of
        them is to give way; None if there is none."""
        return next(
            (m for m in self.models if m.awake and m.running_full and m.outnumbered and not m.partial), None
        )

    def givers(self, model: ModelView) -> list[ModelView]:
        """Returns the models that could give way to `model`."""
        return [m for m in self.models if m.held and (m is model or not self.walls)]

    def starving(self, model: ModelView) -> bool:
        """Returns whether a prompt of the model waits for blocks, or for the rest of them, for too long, and
        nothing else of it runs."""
        waited = self.jobs - model.head_since
        return model.wants_prefill and waited > STARVING and model.running == model.partial

    @property
    def prefill_runs(self) -> bool:
        return any(model.prefilling for model in self.models)

    @property
    def urgent(self) -> ModelView | None:
        """The starving model whose prompt goes first: its blocks are kept for it, whatever quotas say."""
        return min(filter(self.starving, self.models), key=lambda m: m.head, default=None)

    @property
    def filling(self) -> bool:
        """True while fewer sequences run than wait."""
        return sum(model.running for model in self.models) < sum(model.waiting for model in self.models)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Start a prefill job of `model` on `share` units of compute, taking at most `blocks` new blocks, and at
    most `tokens` tokens, if so many are said."""

    model: str
    share: int
    blocks: int
    tokens: int | None = None
    whole: bool = False
    """No prompt is cut into chunks: the first one goes as it is, and others with it if all of them fit."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Start a decode step of all that is ready of `model`."""

    model: str
    share: int


@dataclass(frozen=True, slots=True)
class Mixed:
    """Start a mixed batch of `model` on `share` units of compute: a decode step of all that is ready, and
    beside it at most `tokens` tokens of prompts, which take at most `blocks` new blocks."""

    model: str
    share: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take the blocks of one sequence of `model`: lowest priority first, then the tenant of whom most run,
    then the latest."""

    model: str
    reason: str = field(default="", compare=False)
    """In words, for the journal."""
    kept: bool = True
    """Whether the sequence's K and V stay cached while nobody needs the blocks."""


Action = Prefill | Decode | Mixed | Preempt


def same_turn(one: Action | None, other: Action | None) -> bool:
    """Returns whether both actions are of the same kind and the same model, whatever compute and blocks they
    take. A mixed batch counts as a prefill."""
    if one is None or other is None:
        return one is other
    prompts = isinstance(one, Prefill | Mixed) and isinstance(other, Prefill | Mixed)
    return (prompts or type(one) is type(other)) and one.model == other.model


def outnumbered(model: ModelView) -> Preempt:
    """Returns the preemption of a sequence in favour of a tenant of whom fewer sequences run."""
    why = f"gave way to a request of another tenant; {model.running} sequences of {model.name} run"
    return Preempt(model.name, why)


def gives_way(view: UnitView, giver: ModelView, taker: ModelView, need: int) -> Preempt:
    """Returns the preemption of a sequence of `giver` in favour of one of `taker`, which needs so many
    blocks."""
    whom = "an earlier sequence of it" if giver is taker else taker.name
    return Preempt(
        giver.name,
        f"gave way to {whom}, which needs {need} blocks of {view.free_blocks} free and has "
        f"{taker.used} of a quota of {taker.quota}; {giver.name} had {giver.used} of {giver.quota}",
    )


def last_resort(view: UnitView) -> Action | None:
    """Returns the action that is taken if a policy says nothing and nothing runs, so that no request waits
    for ever."""
    if view.idle < view.compute:
        return None
    first = min((m for m in view.models if m.wants_prefill), key=lambda m: m.head, default=None)
    if first is None:
        return None
    if first.head_blocks <= view.free_blocks:
        return Prefill(first.name, view.compute, view.free_blocks)
    later = [m for m in view.models if m.held and m.victim > first.head]
    if not later:
        return None
    return gives_way(view, max(later, key=lambda m: m.victim), first, first.head_blocks)


def turn(view: UnitView, model: ModelView, prefill_share: int, decode_share: int) -> Action | None:
    """Returns what a model that is in no job would do next, whatever compute there is."""
    rested = model.last_prefill <= model.last_decode or not model.wants_decode
    kept = view.urgent.head_blocks if view.urgent and view.urgent is not model else 0
    room = view.free(model) - kept - model.growth
    if model.wants_prefill and rested and model.fits(room):
        return Prefill(model.name, prefill_share, room)
    if not model.wants_decode:
        return None
    if model.decode_blocks > view.room_to_step(model):
        giver = max(view.givers(model), key=lambda m: m.victim)
        return gives_way(view, giver, model, model.decode_blocks)
    return Decode(model.name, decode_share)


def waiting_turns(view: UnitView) -> list[ModelView]:
    """Returns the models that are in no job and want one; the one that has rested longest is first."""
    wanting = (m for m in view.models if m.wants_prefill or m.wants_decode)
    return sorted(
        (m for m in wanting if not (m.prefilling or m.decoding)),
        key=lambda m: max(m.last_prefill, m.last_decode),
    )
