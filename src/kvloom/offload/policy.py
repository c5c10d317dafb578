"""Decides which sequences of a model are offloaded, which give way if there is too little room, and how the
share adapts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from kvloom.kv.cache import ModelCache
from kvloom.types.geometry import Geometry
from kvloom.types.load import STEP_WINDOW, UnitLoad

KEPT: Final = 16  # one page in so many of the loan is kept for what offloaded sequences append
COPIED: Final = 8  # a step copies at most one page in so many of those that it is over
STEP: Final = 0.1  # the share rises and falls by so much
CALM: Final = 2 / 3  # the share rises below this part of the bound; between this and the bound it stays
FIRST, LONGEST = 4, 128  # looks for which the share does not rise once it has had to fall
IDLE: Final = 8  # looks in a row at which home could do without the loan, until the share falls by a step
_GOLDEN = 0x9E3779B97F4A7C15  # of 2⁶⁴: multiples of it fill the word evenly, however many there are
_WORD = 1 << 64
_ORDER = attrgetter("order")


class TokenList(Protocol):
    """The tokens of a sequence."""

    def list(self) -> Sequences[int]:
        """Returns a copy."""


class SequenceState(Protocol):
    """The part of an engine's sequence that the policy reads."""

    id: int
    order: tuple[int, int, int]
    computed: int
    in_job: bool
    salt: str

    @property
    def decodes(self) -> bool: ...
    @property
    def transfer(self) -> object | None: ...
    @property
    def tokens(self) -> TokenList: ...


S = TypeVar("S", bound=SequenceState)


class CopyBudget:
    """Bounds what one step copies, so that the step takes little longer than others. The first sequence that
    moves is copied whole, however long it is."""

    def __init__(self, pages: int) -> None:
        """pages: the tables of the sequences that the step is over."""
        self._most = pages // COPIED
        self._copied = 0

    def takes(self, pages: int) -> bool:
        """Counts the pages if they may be copied too; returns whether they may."""
        if self._copied and self._copied + pages > self._most:
            return False
        self._copied += pages
        return True


class OffloadPolicy(Generic[S]):
    """Decides which sequences are offloaded. Nothing here changes a cache."""

    def __init__(self, cache: ModelCache, share: float, rows: int) -> None:
        """cache: the cache over the loan's blocks. share: the part of the sequences that is to be offloaded.
        rows: the most sequences that may be."""
        self.offloaded: dict[int, S] = {}
        """The sequences that have pages in the loan, by id."""
        self.share = share
        self.rows = rows
        self._cache = cache
        self._urged: set[int] = set()

    @property
    def _kept(self) -> int:
        """Pages that are kept for the tokens that offloaded sequences append: a part of the pages not handed
        back."""
        pages, size = self._cache.pages, self._cache.geometry.blocks_per_page
        return -(-(pages.available + pages.used_blocks // size) // KEPT)

    @property
    def roomy(self) -> bool:
        """True if there is room for more than what offloaded sequences may append."""
        return self._cache.pages.available > self._kept and len(self.offloaded) < self.rows

    def has(self, sequence: S) -> bool:
        """Returns whether the sequence is offloaded, or on its way."""
        return sequence.id in self.offloaded

    def wants(self, sequence: S) -> bool:
        """Returns whether the sequence is to be offloaded: its number says so, or it had to make room."""
        chosen = (sequence.id * _GOLDEN) % _WORD < self.share * _WORD or sequence.id in self._urged
        return chosen and self.share > 0 and sequence.transfer is None

    def set_share(self, share: float) -> None:
        """Sets the share. If it falls, sequences that had to make room at home are treated as any others
        again."""
        if share < self.share:
            self._urged.clear()
        self.share = share

    # -- who gives way --------------------------------------------------------------------------------

    def displaced(self, sequence: S) -> list[S] | None:
        """Returns the offloaded sequences of a lower priority that are to be computed again to make room in
        the loan for a sequence that has to leave home; none if the loan has more room than what is kept.
        Returns None if they are not enough, or the sequence cannot go."""
        if not self.share or not sequence.decodes or sequence.transfer or sequence.id in self._urged:
            return None
        need, found = self._room_for(sequence), list[S]()
        there = self.free(other for other in self.offloaded.values() if not other.in_job)
        if need <= there - self._kept and len(self.offloaded) < self.rows:
            return found
        for other in self.least_urgent():
            if found and need <= there:
                break
            if other.order[0] > sequence.order[0] and not other.in_job:
                there += len(self._cache.page_list(other.id)) + self._appends(other)
                found.append(other)
        return found if found and need <= there else None

    def urge(self, sequence: S) -> None:
        """Lets the sequence go with the next step, into all the room that there is by then."""
        self._urged.add(sequence.id)

    def forget(self, sequence: S) -> None:
        """Undoes `urge`."""
        self._urged.discard(sequence.id)

    def urged(self, ready: Sequences[S]) -> list[S]:
        """Returns the urged sequences at home that find room in the loan in a step of `ready`."""
        found: list[S] = []
        if not self._urged or not self.share:
            return found
        there = self.free(filter(self.has, ready))
        for sequence in ready:
            if sequence.id in self._urged and not self.has(sequence):
                need = self._room_for(sequence)
                if need <= there and len(self.offloaded) + len(found) < self.rows:
                    there -= need
                    found.append(sequence)
        return found

    # -- who is where in the next step ----------------------------------------------------------------

    def divide(self, sequences: Iterable[S], room: int, home: Geometry) -> tuple[list[S], list[S], list[S]]:
        """Divides the offloaded sequences, the most urgent first, into those that find room for their next
        token in the loan, those that find it only in `room` blocks at home, and those that find none."""
        stay, back, crowded = list[S](), list[S](), list[S]()
        there = self._cache.pages.available
        for sequence in sorted(filter(self.has, sequences), key=_ORDER):
            need, blocks = self._appends(sequence), home.blocks(sequence.computed + 1)
            if need <= there:
                there -= need
                stay.append(sequence)
            elif blocks <= room:
                room -= blocks
                back.append(sequence)
            else:
                crowded.append(sequence)
        return stay, back, crowded

    def called_back(self, stay: Iterable[S], room: int, home: Geometry, budget: CopyBudget) -> list[S]:
        """Returns the sequences that are not to be offloaded any more, and find room in `room` blocks at
        home."""
        found: list[S] = []
        for sequence in stay:
            blocks = home.blocks(sequence.computed + 1)
            if not self.wants(sequence) and blocks <= room and budget.takes(self.length(sequence)):
                room -= blocks
                found.append(sequence)
        return found

    def going(self, here: Iterable[S], first: Sequences[S], stay: Iterable[S], budget: CopyBudget) -> list[S]:
        """Returns the sequences at home that are offloaded with this step: `first` in any case, and others as
        long as offloaded ones keep some room for the tokens that they append. A sequence that took the last
        of it would have to come back a few steps later."""
        found = list(first)
        there = self.free(stay) - self._kept - sum(map(self._room_for, first))
        for sequence in here if self.share else ():
            need = self._room_for(sequence)
            if not self.wants(sequence) or need > there or sequence in first:
                continue
            if len(self.offloaded) + len(found) < self.rows and budget.takes(self.length(sequence)):
                there -= need
                found.append(sequence)
        return found

    def least_urgent(self) -> list[S]:
        """Returns the offloaded sequences, the least urgent first."""
        return sorted(self.offloaded.values(), key=_ORDER, reverse=True)

    # -- in pages -------------------------------------------------------------------------------------

    def length(self, sequence: S) -> int:
        """Returns the pages that the sequence holds."""
        return self._cache.geometry.pages(sequence.computed)

    def free(self, offloaded: Iterable[S]) -> int:
        """Returns the pages left in the loan once these have room for their next token; below 0 if there is
        too little room."""
        return self._cache.pages.available - sum(map(self._appends, offloaded))

    def _appends(self, sequence: S) -> int:
        """Returns the pages of the loan that the sequence's next token takes."""
        return self._cache.blocks_for(sequence.id, 1) // self._cache.geometry.blocks_per_page

    def _room_for(self, sequence: S) -> int:
        """Returns the pages that the sequence needs if it is offloaded, its next token included."""
        return self._cache.geometry.pages(sequence.computed + 1)


# -- the share that adapts --------------------------------------------------------------------------------
# The paper leaves it to future work, so the rule is ours: up by steps while blocks are short and the lender's
# steps stay well within their bound, down by steps beyond it, to zero if the lender needs its memory back,
# and slowly down while home has room for all, so that nobody attends for others without need.


@dataclass(frozen=True, slots=True)
class Observation:
    """The observation of one period."""

    short: bool
    """Whether requests of the borrower have waited for blocks, or were preempted, while the loan has room."""
    slowdown: float | None
    """How much longer the lender's decode steps take than without a loan, 0.15 for 15 %; None if unknown."""
    pressed: bool = False
    """Whether the lender needs its memory."""
    needless: bool = False
    """Whether the borrower has room for all that is offloaded."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share, and the memory of its falls: what was too much is tried less and less often."""

    value: float = 0.0
    """From 0 to 1."""
    rest: int = 0
    """Observations until the share may rise again."""
    patience: int = FIRST
    """The length of the next such rest: it doubles with each fall, and shrinks again while all is well."""
    idle: int = 0
    """Observations in a row by which the loan was needless."""


def adapted(share: Share, seen: Observation, bound: float) -> Share:
    """Returns the share after one more observation. bound: the most slowdown that is wanted."""
    share = replace(share, idle=share.idle + 1 if seen.needless and share.value > 0 else 0)
    if seen.pressed or seen.slowdown is None:  # the slowdown can be measured while nothing is offloaded
        return replace(share, value=0.0, rest=share.patience if seen.pressed else share.rest)
    if seen.slowdown > bound and share.value > 0:
        return Share(_moved(share, -STEP), share.patience, min(2 * share.patience, LONGEST))
    if share.idle >= IDLE:
        return replace(share, value=_moved(share, -STEP), idle=0)
    if share.rest:
        return replace(share, rest=share.rest - 1)
    if seen.short and seen.slowdown <= CALM * bound and share.value < 1:
        return replace(share, value=_moved(share, STEP))
    return replace(share, patience=max(FIRST, share.patience - 1))


def _moved(share: Share, by: float) -> float:
    return min(1.0, max(0.0, round(share.value + by, 6)))


class Slowdown:
    """Measures one lender's decode steps, from its reports. What steps take without a loan is measured while
    nothing is offloaded, and then anew each time."""

    def __init__(self) -> None:
        self._alone: dict[str, float] = {}  # seconds of a step, by model
        self._since: dict[str, int] = {}  # the steps there were when nothing was offloaded any more
        self._before: dict[str, int] = {}  # at the last report

    def seen(self, load: UnitLoad, *, offloaded: bool) -> float | None:
        """Returns the slowdown of the model that suffers most, of those that have stepped since the last
        report; 0 if none has, None if it is not known what its steps take alone. offloaded: whether any
        sequence is offloaded."""
        worst: float | None = 0.0
        for name, model in load.models.items():
            steps = model.decode_jobs_total
            before = self._before.get(name, steps - model.running)
            self._before[name] = steps
            if steps < before:  # it is another process
                self._alone.pop(name, None)
            if offloaded or steps < before:
                self._since.pop(name, None)
            elif steps - self._since.setdefault(name, steps) >= STEP_WINDOW:
                self._alone[name] = model.step_seconds
            if steps == before:
                continue
            alone = self._alone.get(name)
            worst = max(worst, model.step_seconds / alone - 1) if alone and worst is not None else None
        return worst
