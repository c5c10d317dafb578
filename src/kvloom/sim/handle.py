"""A callback to come in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any


class VirtualHandle(asyncio.TimerHandle):
    """Only a `VirtualLoop` makes one."""

    __slots__ = ("args", "callback", "gone", "virtual_context")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._when = when
        self._loop = loop
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.virtual_context = context or copy_context()
        self.gone = False

    def __repr__(self) -> str:
        return f"<{getattr(self.callback, '__qualname__', self.callback)} at {self._when:.6f}>"

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.gone, self.callback, self.args = True, None, ()

    def cancelled(self) -> bool:
        return self.gone
