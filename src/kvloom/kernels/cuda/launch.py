"""A kernel with its grid and its arguments, and the functions that say so for given tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Generic, ParamSpec


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid and its arguments. arguments: by parameter's name, in any order. warps: of a
    program; stages: tiles of a loop whose loads are under way at once."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 3
    then: Launch | None = None  # the launch that follows, if the operation takes two

    def run(self) -> None:
        """Launches on the current stream of the current device; does nothing if the grid is empty."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)
        if self.then is not None:
            self.then.run()


Given = ParamSpec("Given")


class Launcher(Generic[Given]):
    """Decorates a function that says how a kernel is launched for given tensors. A call launches it; `launch`
    is the function itself, for whoever compiles without a GPU."""

    def __init__(self, launch: Callable[Given, Launch]) -> None:
        self.launch = launch
        update_wrapper(self, launch)

    def __call__(self, *given: Given.args, **named: Given.kwargs) -> None:
        self.launch(*given, **named).run()


# Of these a launch differs from the next: a kernel that looked at their alignment would be compiled again.
CHANGING = (
    *("layer", "window", "batch", "rows", "table_row", "most"),
    *("tables", "lengths", "starts", "begins", "slot_page", "slot_offset", "keys", "indices"),
    *("own", "peer", "offsets", "counts", "sources", "targets"),
)


def power_of_two(n: int) -> int:
    """Returns the least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
