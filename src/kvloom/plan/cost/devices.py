"""Devices that are only known by their makers' sheets."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kvloom.types.errors import ConfigError

PCIE4: Final = 32e9  # bytes a second, one way
PCIE5: Final = 64e9


class DeviceSpec(Struct, frozen=True, kw_only=True):
    """The sheet of a device."""

    name: str
    flops: float
    """Operations a second of dense products in 16 bit."""
    memory: int
    """The bytes of its memory."""
    bandwidth: float
    """The bytes a second that it reads from its memory."""
    sms: int
    """The number of multiprocessors."""
    link: float
    """The bytes a second to the other devices of its node, both ways together."""
    host: float
    """The bytes a second to its host, one way."""


def _a100(name: str, memory: int, bandwidth: float) -> DeviceSpec:
    return DeviceSpec(
        name=name, flops=312e12, memory=memory, bandwidth=bandwidth, sms=108, link=600e9, host=PCIE4
    )


def _hopper(name: str, memory: int, bandwidth: float) -> DeviceSpec:
    return DeviceSpec(
        name=name, flops=989e12, memory=memory, bandwidth=bandwidth, sms=132, link=900e9, host=PCIE5
    )


def _without_nvlink(name: str, flops: float, memory: int, bandwidth: float, sms: int) -> DeviceSpec:
    return DeviceSpec(
        name=name, flops=flops, memory=memory, bandwidth=bandwidth, sms=sms, link=2 * PCIE4, host=PCIE4
    )


DEVICES: Final[dict[str, DeviceSpec]] = {
    device.name: device
    for device in (
        _a100("A100-40", 40 * 10**9, 1.555e12),
        _a100("A100-80", 80 * 10**9, 2.039e12),
        _without_nvlink("A10", 125e12, 24 * 10**9, 0.6e12, 72),
        _without_nvlink("L40S", 362e12, 48 * 10**9, 0.864e12, 142),
        _hopper("H100", 80 * 10**9, 3.35e12),
        _hopper("H200", 141 * 10**9, 4.8e12),
    )
}


def find_device(name: str) -> DeviceSpec:
    """Returns the sheet of a device, by its name in any case. Raises ConfigError."""
    found = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"device {name[:40]!r} is not known; {', '.join(DEVICES)} are")
    return found


class Constants(Struct, frozen=True, kw_only=True):
    """The constants of the roofline. Those with a value here are set, because the data cannot tell them from
    the others, which are fitted."""

    compute: float
    """The part of the sheet's FLOP/s that matrix products reach."""
    full: float
    """The share of the multiprocessors that reaches it; more of them gain nothing."""
    ease: float
    """The bandwidth that a share s reaches is s(1 + ease)/(s + ease) of what all reach."""
    link: float
    """The part of the sheet's link that an all-reduce reaches."""
    hop: float
    """Seconds that an all-reduce takes however little it carries."""
    kernels: float
    """Seconds a layer in which the device neither computes nor reads: starts and ends of kernels."""
    host: float
    """Seconds in which the host issues a layer's decode step; the device waits if it is done before."""
    host_parallel: float
    """The factor by which that is longer under tensor parallelism."""
    host_prefill: float
    """The factor by which that is longer for a prefill."""
    sequence: float
    """Each decoded sequence takes attention as long as so many cached tokens more."""
    bandwidth: float = 0.85
    """The part of the sheet's bandwidth that is reached; long reads reach 80 to 90 % on such devices."""
    attention: float = 2.0
    """Operations of a prefill's attention take as long as so many of a product."""
    poll: float = 1.8e-3 / 387
    """Seconds of an operator that looks for another unit's task: 1.8 ms over the 387 operators of a step
    (Weaver, sections 3.1 and 5.3)."""


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
FITTED_TO: Final = "A100-80"
UNSEEN_ERROR: Final = (0.047, 0.135)
"""The error of a fit to a random half of that profile, against the times of the other half: the median, and
the 90th percentile."""
