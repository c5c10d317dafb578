"""`kvloom cluster`: a Ray cluster of several hosts, for those who have none."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from kvloom.cli.app import CommandFailed, Whole
from kvloom.types.errors import ConfigError
from kvloom.types.files import replacing

PORT: Final = 6379
TOKEN: Final = "RAY_AUTH_TOKEN"
KEPT: Final = Path("~/.ray/auth_token")
STOP_SECONDS: Final = 15.0  # for a keeper, or a controller with its fleet, to end
_LEAST_TOKEN: Final = 16  # characters
_STORE: Final = (
    80_000_000  # bytes of Ray's object store, which kvloom does not use, and of which this is the least
)

EPILOGUE: Final = """\
on the first host:       kvloom cluster start --head --address 10.0.0.1
on each further host:    RAY_AUTH_TOKEN=... kvloom cluster join 10.0.0.1:6379
then, on the first one:  kvloom serve fleet.yaml --cluster auto

All hosts of a cluster have one token. `start --head` makes one, if RAY_AUTH_TOKEN
names none, and keeps it in ~/.ray/auth_token, where Ray looks for it."""

cluster = App(name="cluster", help_epilogue=EPILOGUE)

Address = Annotated[
    str | None,
    Parameter(metavar="ADDRESS", help="of this host, at which the others reach it (that of its way out)"),
]
Dashboard = Annotated[bool, Parameter(help="serve Ray's dashboard, on this host alone")]


@cluster.command
def start(
    *,
    head: Annotated[bool, Parameter(help="this is the cluster's first host")],
    address: Address = None,
    port: Annotated[Whole, Parameter(help="at which the other hosts find it")] = PORT,
    dashboard: Dashboard = False,
) -> None:
    """Start a cluster on this host."""
    if not head:
        raise ConfigError(
            "--head: a cluster starts with its head; `kvloom cluster join HOST:PORT` is for others"
        )
    here = address or own_address()
    token = _token(make=True)
    _ray(
        *("start", "--head", f"--node-ip-address={here}", f"--port={port}"),
        f"--include-dashboard={'true' if dashboard else 'false'}",
        *(["--dashboard-host=127.0.0.1"] if dashboard else []),
        token=token,
    )
    _keep(token)
    print(f"The cluster has begun at {here}:{port}. On each further host:")
    print(f"  {TOKEN}={token} kvloom cluster join {here}:{port}")
    print("Then, here:")
    print("  kvloom serve fleet.yaml --cluster auto")


@cluster.command
def join(
    head: Annotated[str, Parameter(metavar="HOST:PORT", help="the cluster's head")],
    /,
    *,
    address: Address = None,
) -> None:
    """Let this host join a cluster."""
    host, _, port = head.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{head}: no address of a head; HOST:PORT, as 10.0.0.1:{PORT}, is right")
    here = address or own_address(host)
    token = _token()
    _ray("start", f"--address={head}", f"--node-ip-address={here}", token=token)
    _keep(token)
    print(f"This host, {here}, has joined the cluster of {head}.")


@cluster.command
def stop() -> None:
    """Let this host leave its cluster. The fleets that are controlled from here end, and what others have
    running here."""
    # They load much, of which the other commands need nothing.
    from kvloom.serve.nodes.agent import keeper_places  # noqa: PLC0415
    from kvloom.serve.nodes.home import FleetHome  # noqa: PLC0415
    from kvloom.serve.nodes.lasting import end  # noqa: PLC0415

    def stop_all(places: Sequence[Path]) -> None:
        for place in places:
            if not end(place, STOP_SECONDS):
                print(f"What has locked {place} has not ended in {STOP_SECONDS:g} s.", file=sys.stderr)

    stop_all([home.place for home in FleetHome.all()])
    _ray("stop")  # before the keepers end, which Ray's actors would start again
    stop_all(keeper_places())
    print("This host is in no cluster any more.")


def require_ray() -> None:
    """Raises ConfigError if Ray, which --cluster needs, is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("--cluster: Ray is not installed; `pip install 'kvloom[cluster]'` installs it")


def own_address(toward: str = "192.0.2.1") -> str:
    """Returns the address of this host on its way to another one; nothing is sent there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((toward, PORT))
        except OSError as error:
            raise ConfigError(
                f"--address: this host has no way to {toward} ({error.strerror}); name its address"
            ) from error
        found: str = probe.getsockname()[0]
        return found


def _token(*, make: bool = False) -> str:
    """Returns the cluster's token. make: whether one is made if there is none."""
    kept = KEPT.expanduser()
    token = os.environ.get(TOKEN, "") or (kept.read_text().strip() if kept.exists() else "")
    if not token and not make:
        raise ConfigError(f"{TOKEN} is not set, and there is no {kept}; the token of the head is right")
    if token and len(token) < _LEAST_TOKEN:
        raise ConfigError(f"{TOKEN}: has {len(token)} characters; at least {_LEAST_TOKEN} are right")
    return token or secrets.token_hex(32)


def _keep(token: str) -> None:
    """Keeps the token where Ray looks for it, now that the host is in the cluster."""
    kept = KEPT.expanduser()
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    with replacing(kept) as file:
        file.write(token.encode())


def _ray(*arguments: str, token: str = "") -> None:
    """Runs Ray's own command. Raises CommandFailed with the last thing that it says if it fails."""
    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed; `pip install 'kvloom[cluster]'` installs it")
    extra = ["--disable-usage-stats", f"--object-store-memory={_STORE}"] if arguments[0] == "start" else []
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *arguments, *extra],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "token"} | ({TOKEN: token} if token else {}),
    )
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise CommandFailed(f"Ray cannot {arguments[0]} here: {said[-1] if said else 'it says nothing'}")
