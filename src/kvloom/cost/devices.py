"""Devices that are only known by their makers' sheets."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kvloom.core.errors import ConfigError

_PCIE4: Final = 32e9  # bytes a second, one way
_PCIE5: Final = 64e9


class Device(Struct, frozen=True, kw_only=True):
    """flops: dense products in 16 bit, operations a second. memory: bytes; bandwidth: bytes a second. sms:
    multiprocessors. link: bytes a second to the other devices of its node, both ways together; host: to its
    host, one way."""

    name: str
    flops: float
    memory: int
    bandwidth: float
    sms: int
    link: float
    host: float


def _a100(name: str, memory: int, bandwidth: float) -> Device:
    return Device(
        name=name, flops=312e12, memory=memory, bandwidth=bandwidth, sms=108, link=600e9, host=_PCIE4
    )


def _hopper(name: str, memory: int, bandwidth: float) -> Device:
    return Device(
        name=name, flops=989e12, memory=memory, bandwidth=bandwidth, sms=132, link=900e9, host=_PCIE5
    )


def _without_nvlink(name: str, flops: float, memory: int, bandwidth: float, sms: int) -> Device:
    return Device(
        name=name, flops=flops, memory=memory, bandwidth=bandwidth, sms=sms, link=2 * _PCIE4, host=_PCIE4
    )


DEVICES: Final[dict[str, Device]] = {
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


def find_device(name: str) -> Device:
    """The sheet of a device, by its name in any case. Raises ConfigError."""
    found = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"device {name[:40]!r} is not known; {', '.join(DEVICES)} are")
    return found
