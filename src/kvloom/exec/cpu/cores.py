"""Cores for the threads of jobs.

The threads of an OpenMP team wait for each other after each product, and sleep if that takes long. Linux may
wake a thread on the core of the one that wakes it, and then leave both there for tens of milliseconds, though
another core idles: after a pause of 0.1 s, a prefill of 64 tokens of a 100M model took 60 ms instead of 38 on
two cores. So each thread of a team is bound to a core of its own, if the unit has all the cores that its
process may use. A unit that has some of them cannot know which ones others use, and a job of one thread needs
no such care: there the kernel chooses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from kvloom.kernels.cpu.parallel import on_each_thread


class Cores:
    """Those that jobs may be bound to."""

    def __init__(self, threads: int) -> None:
        """threads: that the unit has for its jobs."""
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.all = tuple(allowed)
        self._free = allowed if threads == len(allowed) else []

    def take(self, share: int) -> tuple[int, ...]:
        """Returns so many cores, which nobody else is given until they are given back; none for a job that is
        not to be bound."""
        if share == 1 or share > len(self._free):
            return ()
        self._free.sort()
        taken, self._free = self._free[:share], self._free[share:]
        return tuple(taken)

    def give_back(self, cores: Sequence[int]) -> None:
        self._free += cores


class Team:
    """The OpenMP team of one thread that runs jobs. It is used on that thread alone."""

    def __init__(self, cores: Cores) -> None:
        self._all = cores.all
        self._bound: tuple[int, ...] = ()
        """The cores of the team's threads; empty if they may use all."""
        self._own: int | None = None
        """The core of the thread that runs the jobs, if the team is bound."""
        self._left = False
        """The thread that runs the jobs may use all cores at present, although its team is bound."""

    def begin(self, threads: int, cores: tuple[int, ...]) -> None:
        """Prepares a job of so many threads, each on one of `cores`; on any core if they are empty."""
        torch.set_num_threads(threads)
        if threads == 1:
            if self._bound and not self._left:
                _bind(self._all)
                self._left = True
        elif cores != self._bound:
            self._bind_each(threads, cores)
        elif self._left and self._own is not None:
            _bind((self._own,))
            self._left = False

    def _bind_each(self, threads: int, cores: tuple[int, ...]) -> None:
        owner, left = threading.get_native_id(), list(cores)

        def bind() -> None:
            core = left.pop() if left else None
            _bind(self._all if core is None else (core,))
            if threading.get_native_id() == owner:
                self._own = core

        on_each_thread(bind, threads)
        self._bound, self._left = cores, False


def _bind(cores: tuple[int, ...]) -> None:
    """Lets the calling thread use these cores alone. If they are gone, it stays where it may be."""
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
