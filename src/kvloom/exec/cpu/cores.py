"""Cores for the threads of jobs.

The threads of an OpenMP team wait for each other after each product, and sleep if that takes long. After a
pause Linux may wake a thread on the core of the one that wakes it, and then leave both there for tens of
milliseconds, though another core idles: a prefill of 64 tokens of a 100M model took 60 ms instead of 38 on
two cores. So the threads of a job that begins after a pause are bound to a core each. Those of one that
follows another are not, because they have their cores already, and a gateway that runs on one of these would
hold the job up.

This is for a unit that has all the cores that its process may use. One that has some of them cannot know
which ones others use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvloom.kernels.cpu.affinity import bind_team

PAUSE: Final = 0.02  # seconds without a job after which threads may wake on one core


class Cores:
    """Those that jobs may be bound to."""

    def __init__(self, threads: int) -> None:
        """threads: that the unit has for its jobs."""
        allowed = sorted(os.sched_getaffinity(0))
        self.all = tuple(allowed)
        self._free = allowed if threads == len(allowed) else []

    def take(self, share: int) -> tuple[int, ...]:
        """Returns so many cores, which no other job is given until they are given back; none for a job that
        is not to be bound."""
        if share == 1 or share > len(self._free):
            return ()
        self._free.sort()
        taken, self._free = self._free[:share], self._free[share:]
        return tuple(taken)

    def give_back(self, cores: Sequence[int]) -> None:
        self._free += cores


class Team:
    """The OpenMP team of one thread that runs jobs. It is used on that thread alone."""

    def __init__(self, cores: Cores, now: Callable[[], float] = time.perf_counter) -> None:
        self._all = cores.all
        self._now = now
        self._bound = 0
        """The number of its threads that are bound to a core."""
        self._ended = 0.0
        """The time at which the last job ended."""

    def begin(self, threads: int, cores: Sequence[int]) -> None:
        """Prepares a job of so many threads. cores: those that it was given, if any."""
        torch.set_num_threads(threads)
        if cores and self._now() - self._ended > PAUSE:
            bind_team([(core,) for core in cores])
            self._bound = threads
        elif self._bound:
            bind_team([self._all] * self._bound)
            self._bound = 0

    def end(self) -> None:
        """Takes note that the job has ended."""
        self._ended = self._now()
