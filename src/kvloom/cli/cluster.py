"""`kvloom cluster`: a Ray cluster of several hosts, for those who have none."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from kvloom.cli.app import CommandFailed, Whole
from kvloom.serve.nodes.reach import (
    host_and_port,
    require_head,
    require_no_ray,
    require_own,
    require_way_back,
)
from kvloom.serve.systemd import READY, ServiceManager
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
_LEAST_DISK: Final = 100_000_000  # bytes that Ray's folder of logs and sockets takes within hours
_BEGUN: Final = "Ray runtime started"  # is in a line that `ray start` prints
# Seconds for which Ray waits for a head that is away before it ends on the other hosts; a minute is its own.
_PATIENCE: Final = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
_RAY: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # Ray's actors start what serves, which would be nice to all else at 15
}
_OF_STORAGE: Final = {"RAY_gcs_storage": "rocksdb"}
_VERSIONS: Final = re.compile(r"started with:\s+Ray: (\S+)\s+Python: (\S+)")
_ENDED: Final = re.compile(r"(\w+) \[exit code=(-?\d+)\]")
_RAISED: Final = re.compile(r"^(?:[A-Za-z_.]*(?:Error|Exception)): ", re.MULTILINE)

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
Storage = Annotated[
    Path | None,
    Parameter(
        metavar="FOLDER",
        help="where the head keeps what it knows, so that it goes on with it when it is started again",
    ),
]
Block = Annotated[bool, Parameter(help="stay, and end Ray here at SIGTERM: for systemd and containers")]


@cluster.command
def start(
    *,
    head: Annotated[bool, Parameter(help="this is the cluster's first host")],
    address: Address = None,
    port: Annotated[Whole, Parameter(help="at which the other hosts find it")] = PORT,
    dashboard: Dashboard = False,
    storage: Storage = None,
    block: Block = False,
) -> None:
    """Start a cluster on this host."""
    if not head:
        raise ConfigError(
            "--head: a cluster starts with its head; `kvloom cluster join HOST:PORT` is for others"
        )
    require_ray()
    here = address or own_address()
    require_own(here)
    require_no_ray(here)
    token = _token(make=True)

    def begun() -> None:
        _keep(token)
        shown = f"<as in {KEPT}>" if block else token  # a service manager would keep it in its log
        print(f"The cluster has begun at {here}:{port}. On each further host:")
        print(f"  {TOKEN}={shown} kvloom cluster join {here}:{port}")
        print("Then, here:")
        print("  kvloom serve fleet.yaml --cluster auto", flush=True)

    _start(
        *("--head", f"--node-ip-address={here}", f"--port={port}"),
        f"--include-dashboard={'true' if dashboard else 'false'}",
        *(["--dashboard-host=127.0.0.1"] if dashboard else []),
        *(["--block"] if block else []),
        environment={TOKEN: token} | (_kept_in(storage) if storage else {}),
        begun=begun,
    )


@cluster.command
def join(
    head: Annotated[str, Parameter(metavar="HOST:PORT", help="the cluster's head")],
    /,
    *,
    address: Address = None,
    block: Block = False,
) -> None:
    """Let this host join a cluster."""
    require_ray()
    require_head(head, head)
    here = address or own_address(host_and_port(head, head)[0])
    require_own(here)
    require_no_ray(here)
    require_way_back(here, head)
    token = _token()

    def begun() -> None:
        _keep(token)
        print(f"This host, {here}, has joined the cluster of {head}.", flush=True)

    _start(
        *(f"--address={head}", f"--node-ip-address={here}", *(["--block"] if block else [])),
        environment={TOKEN: token} | _PATIENCE,
        begun=begun,
    )


@cluster.command
def stop() -> None:
    """Let this host leave its cluster. The fleets that are controlled from here end, and what others have
    running here."""
    require_ray()
    # They load much, of which the other commands need nothing.
    from kvloom.serve.nodes.agent import keeper_locks  # noqa: PLC0415
    from kvloom.serve.nodes.detached import end  # noqa: PLC0415
    from kvloom.serve.nodes.home import FleetHome  # noqa: PLC0415

    def stop_all(places: Sequence[Path]) -> None:
        for place in places:
            if not end(place, STOP_SECONDS):
                print(f"What has locked {place} has not ended in {STOP_SECONDS:g} s.", file=sys.stderr)

    stop_all([home.lock for home in FleetHome.all()])
    process = _ray("stop", environment={})  # before the keepers end, which Ray's actors would start again
    lines = _said(process)
    failed = process.wait()
    stop_all(keeper_locks())
    if failed:
        raise CommandFailed(f"Ray cannot stop here: {_problem(lines)}")
    print("This host is in no cluster any more.")


def require_ray() -> None:
    """Raises ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed; `pip install '.[cluster]'` in kvloom's checkout installs it")


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
    """Returns the cluster's token. If there is none, one is made if `make` is set."""
    kept = KEPT.expanduser()
    token = os.environ.get(TOKEN, "") or (kept.read_text().strip() if kept.exists() else "")
    if not token and not make:
        raise ConfigError(f"{TOKEN} is not set, and there is no {kept}; the token of the head is right")
    if token and len(token) < _LEAST_TOKEN:
        raise ConfigError(f"{TOKEN}: has {len(token)} characters; at least {_LEAST_TOKEN} are right")
    return token or secrets.token_hex(32)


def _keep(token: str) -> None:
    """Keeps the token where Ray looks for it, now that the host is in the cluster, or says that it cannot."""
    kept = KEPT.expanduser()
    try:
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        with replacing(kept) as file:
            file.write(token.encode())
    except OSError as error:
        print(
            f"kvloom: {kept}: cannot be written ({error.strerror}); Ray runs, and commands here need {TOKEN} "
            "in their environment",
            file=sys.stderr,
        )


def _kept_in(storage: Path) -> dict[str, str]:
    """Returns what tells Ray's head to keep its state in a folder. Raises ConfigError if that cannot be."""
    folder = storage.expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--storage {storage}: cannot be made ({error.strerror}); a folder that this user may write is "
            "right"
        ) from error
    return _OF_STORAGE | {"RAY_gcs_storage_path": str(folder)}


def _start(*arguments: str, environment: dict[str, str], begun: Callable[[], None]) -> None:
    """Starts Ray on this host, and stays as long as `ray start` does. `begun` is called once Ray runs. Raises
    CommandFailed with what Ray says if it fails, and ConfigError if it would."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # which Ray takes
    room = shutil.disk_usage(folder).free
    if room < _LEAST_DISK:
        raise ConfigError(
            f"{folder}: {room // 1_000_000} MB are free, and Ray keeps its logs there; at least "
            f"{_LEAST_DISK // 1_000_000} MB are right, or another folder in RAY_TMPDIR"
        )
    manager = ServiceManager.named_by(os.environ)  # before Ray could take it for its own
    extra = ("--disable-usage-stats", f"--object-store-memory={_STORE}")
    process = _ray("start", *arguments, *extra, environment=environment)
    asked: list[int] = []

    def end(number: int, _: object) -> None:
        asked.append(number)
        process.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    runs = False

    def heard(line: str) -> None:
        nonlocal runs
        if not runs and _BEGUN in line:
            runs = True
            begun()
            manager.tell(READY)

    lines = _said(process, heard)
    if process.wait() and not asked:
        raise CommandFailed(f"Ray {'has ended' if runs else 'cannot start'} here: {_problem(lines)}")


def _ray(*arguments: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Starts Ray's own command."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "ray.scripts.scripts", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | _RAY | environment,
    )


def _said(process: subprocess.Popen[str], heard: Callable[[str], None] = lambda line: None) -> list[str]:
    """Returns the last lines that a process prints. `heard` is called with each line at once."""
    lines: deque[str] = deque(maxlen=2000)  # Ray shows its logs after what has ended
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        heard(line)
    return list(lines)


def _problem(lines: Sequence[str]) -> str:
    """Returns what was wrong by what Ray has printed, in one line."""
    said = "".join(lines)
    if "Version mismatch" in said and len(found := _VERSIONS.findall(said)) == 2:
        (ray, python), (own_ray, own_python) = found
        return (
            f"the cluster has Ray {ray} on Python {python}, and this host Ray {own_ray} on Python "
            f"{own_python}; the same ones on all hosts are right"
        )
    if "InvalidAuthToken" in said:
        return f"the cluster has another token; {TOKEN} as on its head is right"
    if ended := _ENDED.findall(said):
        return " and ".join(f"its {name} has ended with exit code {code}" for name, code in ended)
    if len(raised := _RAISED.split(said)) > 1:
        return " ".join(raised[-1].split())[:400]
    plain = [line.strip() for line in lines if line.strip()]
    return plain[-1][:400] if plain else "it says nothing"
