"""What the roofline cannot know from sheets and shapes: a few numbers, fitted once for all models."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class Constants(Struct, frozen=True, kw_only=True):
    """Fitted:

    compute: part of the sheet's FLOP/s that matrix products reach.
    full: share of the multiprocessors that reaches it; more of them gain nothing.
    ease: the bandwidth that a share s reaches is s(1 + ease)/(s + ease) of what all reach.
    link: part of the sheet's link that an all-reduce reaches.
    hop: seconds that an all-reduce takes however little it carries.
    kernels: seconds a layer in which the device neither computes nor reads: starts and ends of kernels.
    host: seconds in which the host issues a layer's decode step; the device waits where it has done before.
    host_parallel, host_prefill: times as long for tensor parallelism, and for a prefill.
    sequence: each decoded sequence takes attention as long as so many cached tokens more.

    Set, because the data cannot tell them from the others:

    bandwidth: part of the sheet's bandwidth that is reached; long reads reach 80 to 90 % on such devices.
    attention: operations of a prefill's attention take as long as so many of a product.
    poll: seconds of an operator that looks for another unit's task: 1.8 ms over the 387 operators of a step
    (Weaver, sections 3.1 and 5.3).
    """

    compute: float
    full: float
    ease: float
    link: float
    hop: float
    kernels: float
    host: float
    host_parallel: float
    host_prefill: float
    sequence: float
    bandwidth: float = 0.85
    attention: float = 2.0
    poll: float = 1.8e-3 / 387


SET: Final = ("bandwidth", "attention", "poll")

# Fitted by tools.fit_cost_model to all rows of the A100 profile that was published with MuxServe.
FITTED: Final = Constants(
    compute=0.64,
    full=0.881,
    ease=0.271,
    link=0.204,
    hop=35.1e-6,
    kernels=0.109e-3,
    host=0.256e-3,
    host_parallel=1.57,
    host_prefill=1.56,
    sequence=158.0,
)
