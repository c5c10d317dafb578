"""A kernel with its grid and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid and its arguments. arguments: by parameter's name, in any order. warps: of a
    program; stages: tiles of a loop whose loads are under way at once."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 3

    def run(self) -> None:
        """Launches on the current stream of the current device; does nothing if the grid is empty."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)


# Of these a launch differs from the next: a kernel that looked at their alignment would be compiled again.
CHANGING = (
    *("layer", "window", "batch", "rows", "table_row", "out_split", "part_split", "lse_split"),
    *("tables", "lengths", "starts", "begins", "slot_page", "slot_offset", "keys", "indices"),
    *("own", "peer", "offsets", "counts", "sources", "targets"),
)


def power_of_two(n: int) -> int:
    """Returns the least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def check(name: str, tensor: Tensor, *shape: int, dtypes: tuple[Any, ...] = ()) -> None:
    """Raises ValueError if a tensor has another shape (-1: any size) or dtype, or gaps in its last
    dimension."""
    sizes = tensor.dim() == len(shape) and all(
        want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    dense = sizes and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
    if not dense or (dtypes and tensor.dtype not in dtypes):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "values"
        raise ValueError(
            f"{name}: want {kinds} {list(shape)}, the last dimension without gaps, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )
