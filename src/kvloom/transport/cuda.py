"""The CUDA driver, as transports want it."""

from __future__ import annotations

from kvloom.kernels.driver import Driver, DriverError
from kvloom.types.errors import ConfigError


def open_driver() -> Driver:
    """Raises ConfigError where there are no bindings or no driver."""
    try:
        return Driver()
    except DriverError as error:
        raise ConfigError(f"transport: {error}; pip install 'kvloom[gpu]'") from error
