"""Threads for jobs on a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvloom.model.gpu.device import Device
from kvloom.model.gpu.staging import Staging


class Slot:
    """A thread for one job at a time, with memory of its own to send from and fetch to."""

    def __init__(self, number: int, device: Device) -> None:
        self.thread = ThreadPoolExecutor(1, f"gpu-job-{number}")
        self.staging = Staging(device)


class Slots:
    """As many as there have been jobs at the same time. On one thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._every: list[Slot] = []
        self._idle: list[Slot] = []

    def take(self) -> Slot:
        if not self._idle:
            self._every.append(Slot(len(self._every), self._device))
            self._idle.append(self._every[-1])
        return self._idle.pop()

    def give_back(self, slot: Slot) -> None:
        self._idle.append(slot)

    def close(self) -> None:
        """Wait for running jobs and end the threads."""
        for slot in self._every:
            slot.thread.shutdown()
