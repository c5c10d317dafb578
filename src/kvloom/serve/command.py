"""`kvloom serve`, once it is clear what to serve."""

from __future__ import annotations

import asyncio
import sys

from rich.console import Console

from kvloom.config import Config
from kvloom.serve.ground import listen, private_folder, raise_open_files
from kvloom.serve.screen import Screen
from kvloom.serve.supervisor import Supervisor
from kvloom.types.clock import WallClock
from kvloom.types.errors import ConfigError


def serve_fleet(config: Config) -> int:
    """Until the fleet ends: what the command exits with. Raises ConfigError where a process refused what it
    was to serve."""
    clock = WallClock()
    screen = Screen(Console(highlight=False), clock)
    raise_open_files()
    with listen(config.host, config.port) as listener, private_folder() as folder:
        try:
            outcome = asyncio.run(Supervisor(config, screen, clock, listener, folder).run())
        finally:
            screen.close()
    if outcome.code == 2:
        raise ConfigError(outcome.why)
    if outcome.code:
        print(f"kvloom: {outcome.why}", file=sys.stderr)
    return outcome.code
