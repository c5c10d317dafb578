"""What the paper tells of its figures in numbers (section 5)."""

from __future__ import annotations

from typing import Final

# figure 4, Azure-Conv on A100
DEDICATED_MOST: Final = 15.0  # requests a second
WEAVER_MOST: Final = 22.0
DEDICATED_BATCH: Final = 118  # at DEDICATED_MOST
WEAVER_BATCH: Final = 231  # at WEAVER_MOST
FILLED: Final = {"dedicated": 88.9, "hot": 46.9, "lent": 36.7}  # % of a pool, all at DEDICATED_MOST

# figure 4, the best of its traces
OVER_DEDICATED: Final = 1.60
OVER_MUXSERVE: Final = {"A100-40": 1.22, "L40S": 1.77}
LOW_COLD: Final = 1.04  # times the cold model's time a token, at low rates
QUICKER: Final = 39.0  # % of the hot model's time a token, at the most, against dedicated at high rates
HIGH_COLD: Final = 5.0  # ms by which it is longer at high ones, at the most

# figure 5, read off: milliseconds a token, over the ratios, from and to
RATIOS: Final = {
    "Weaver": ((27.0, 28.0), (20.0, 25.0)),
    "MuxServe": ((31.0, 31.0), (16.0, 20.5)),
    "Mux-Temporal": ((35.0, 44.0), (33.0, 44.0)),
}
HALF_QUICKER: Final = 13.0  # % at a share of 50 %
HALF_LONGER: Final = 3.7  # ms of the cold model then
BEST_SHARE: Final = 0.45

LONG_OVER_MUXSERVE: Final = 1.42  # figure 6
LONG_COLD: Final = 8.0  # ms of the cold model, at the most

# figure 7a
CPU_CONTROL: Final = 175.0  # ms
GPU_CONTROL: Final = 4.83  # times as quick
SPLITTING: Final = 9.5  # % quicker again
SPLITTING_COLD: Final = 0.7  # ms of the cold model
