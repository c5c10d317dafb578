"""Arrays that cross borders, by their number format."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]
AnyArray = npt.NDArray[Any]
