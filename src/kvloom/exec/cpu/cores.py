"""The cores of a team's threads.

The threads of an OpenMP team wait for each other after each product, and sleep if that takes long. After a
pause Linux may wake a thread on the core of the one that wakes it, and then leave both there for tens of
milliseconds, though another core idles: a prefill of 64 tokens of a 100M model took 60 ms instead of 38 on
two cores. So the threads of a job that begins after a pause are bound to a core each. The threads of a job
that follows another are not bound, because they have their cores already, and a gateway that runs on one of
these would hold the job up.

Only a job on all the cores that this process may use is bound. A job on some of them cannot know which cores
other jobs use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import torch

from kvloom.kernels.cpu.affinity import bind_team

PAUSE: Final = 0.02  # seconds without a job after which threads may wake on one core


class ThreadTeam:
    """The OpenMP team of one thread that runs jobs. It is used on that thread alone."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Makes the team of a thread that may use all the cores that the calling one may."""
        self._allowed = sorted(os.sched_getaffinity(0))
        self._now = now
        self._bound = False
        """Whether each of its threads is bound to a core."""
        self._ended = float("-inf")
        """The time at which the last job ended."""

    def begin(self, threads: int) -> None:
        """Prepares a job of so many threads."""
        torch.set_num_threads(threads)
        if 1 < threads == len(self._allowed) and self._now() - self._ended > PAUSE:
            bind_team([(core,) for core in self._allowed])
            self._bound = True
        elif self._bound:
            bind_team([self._allowed] * len(self._allowed))
            self._bound = False

    def end(self) -> None:
        """Takes note that the job has ended."""
        self._ended = self._now()
