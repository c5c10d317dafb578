"""Makes hosts on one machine, and removes them.

A host is a set of namespaces: it has a network with a loopback of its own and an address on a bridge that
joins them all, its own processes, and a name. Only root may make one; where it cannot be done, tests that
need hosts say why and are skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Final

SECONDS: Final = 120.0  # for a command, and for processes to end
_ROOT: Final = Path(__file__).parents[2]
_UNSHARE: Final = ("unshare", "--pid", "--fork", "--mount-proc", "--uts")
# Who ignores the ends of its children has none that wait to be asked how they have ended.
_INIT: Final = 'hostname "$0"; echo up; exec env --ignore-signal=CHLD sleep infinity'
_NETWORKS: Final = 1000


class NoHosts(RuntimeError):
    """Hosts cannot be made here; the text tells why."""


class HostProcess:
    """A process at a host, as it is seen from outside."""

    def __init__(self, entering: subprocess.Popen[bytes]) -> None:
        """entering: the process that has entered the host's namespaces for it, and waits for its end."""
        self._entering = entering

    @property
    def stdin(self) -> IO[bytes]:
        assert self._entering.stdin is not None
        return self._entering.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._entering.stdout is not None
        return self._entering.stdout

    @property
    def pid(self) -> int:
        [inner] = Path(f"/proc/{self._entering.pid}/task/{self._entering.pid}/children").read_text().split()
        return int(inner)

    def signal(self, number: signal.Signals) -> None:
        """Signals the process itself, unless it has ended."""
        if self._entering.poll() is None:
            with suppress(ValueError, ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """Waits for its end, and returns its exit code."""
        return self._entering.wait(seconds)

    def close(self) -> None:
        for stream in (self._entering.stdin, self._entering.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class Host:
    """A host, from when it is switched on to when its power is cut."""

    def __init__(
        self, name: str, address: str, cable: str, folder: Path, outer: str = "", bridge: str = ""
    ) -> None:
        """cable: its end of the link to the bridge; folder: its home, and for its temporary files; outer: the
        link's other end."""
        self.name = name
        self.address = address
        self._cable = cable
        self._outer = outer
        self._bridge = bridge
        self.folder = folder
        self._processes: list[HostProcess] = []
        self._switch_on()

    def _switch_on(self) -> None:
        self._init = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.name, *_UNSHARE),
                *("sh", "-c", _INIT, self.name),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # that its child was killed
        )
        assert self._init.stdout is not None
        self._init.stdout.readline()
        [self._first] = _children(self._init.pid)

    def command(self, *arguments: str) -> list[str]:
        """Returns the command by which something runs at this host."""
        return [
            *("nsenter", f"--target={self._first}", "--net", "--pid", "--mount", "--uts"),
            *("env", f"TMPDIR={self.folder}", f"HOME={self.folder}", *arguments),
        ]

    def start(self, *arguments: str) -> HostProcess:
        """Starts a process at this host, with pipes as its stdin and stdout."""
        process = HostProcess(
            subprocess.Popen(self.command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        self._processes.append(process)
        return process

    def run(self, *arguments: str, seconds: float = 60.0) -> str:
        """Runs a command at this host, and returns what it prints. Raises CalledProcessError."""
        done = subprocess.run(
            self.command(*arguments), check=True, capture_output=True, text=True, timeout=seconds
        )
        return done.stdout

    def cut_off(self) -> None:
        """Takes the host off the network. Connections stay, and nothing goes through them."""
        _ip("-n", self.name, "link", "set", self._cable, "down")

    def join_again(self) -> None:
        _ip("-n", self.name, "link", "set", self._cable, "up")

    @contextmanager
    def slow(self, delay: float, loss: float, seed: int = 0) -> Iterator[None]:
        """Lets what the host sends and gets come so many seconds late, and a share of it never."""
        near, far = f"{self._outer}n", f"{self._outer}f"
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        _ip("link", "set", near, "up")
        _ip("link", "set", self._outer, "nomaster")
        _ip("link", "set", far, "master", self._bridge, "up")
        carrier = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.hosts.slow_link"),
                *(self._outer, near, str(delay), str(loss), str(seed)),
            ],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
        )
        try:
            assert carrier.stdout is not None
            assert carrier.stdout.readline(), "nothing carries its frames"
            yield
        finally:
            carrier.kill()
            carrier.communicate()
            _ip("link", "del", near)
            _ip("link", "set", self._outer, "master", self._bridge)

    def processes(self) -> list[int]:
        """Returns the ids of what runs at this host, but for its first process, which does nothing."""
        return [
            pid for line in _ip("netns", "pids", self.name).split() if (pid := int(line)) not in self._own
        ]

    @property
    def _own(self) -> set[int]:
        return {self._init.pid, self._first}

    def cut_power(self) -> None:
        """Kills all that runs at this host at once. Nobody else is told: its connections are not closed."""
        self.cut_off()
        with suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        self._init.wait(SECONDS)
        assert self._init.stdout is not None
        self._init.stdout.close()
        for process in self._processes:
            process.wait()
            process.close()
        self._processes.clear()

    def boot(self) -> None:
        """Switches a host on again whose power was cut."""
        self._switch_on()
        self.join_again()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Makes so many hosts on one bridge. At the end all that runs there is killed, and nothing is left.
    Raises NoHosts."""
    if why := _unable():
        raise NoHosts(why)
    with ExitStack() as stack:
        # Sockets' paths are short, and pytest's folders are not.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvh", dir="/tmp")))
        tag, network = _bridged()
        stack.callback(_ip, "link", "del", f"{tag}b")
        _ip("link", "set", f"{tag}b", "up")
        _ip("addr", "add", f"{network}.254/24", "dev", f"{tag}b")
        made = []
        for i in range(count):
            name, outer, cable = f"{tag}h{i}", f"{tag}o{i}", f"{tag}i{i}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", cable, "netns", name)
            stack.callback(_ip, "link", "del", outer)  # A host's connections may keep it for a while.
            _ip("link", "set", outer, "master", f"{tag}b", "up")
            _ip("-n", name, "addr", "add", f"{network}.{i + 1}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            own = folder / f"h{i}"
            own.mkdir()
            host = Host(name, f"{network}.{i + 1}", cable, own, outer, f"{tag}b")
            stack.callback(host.cut_power)
            made.append(host)
        yield made


def _bridged() -> tuple[str, str]:
    """Makes a bridge, and returns how the names of what is beside it begin, and a network that is nobody
    else's: its number is in the bridge's name, of which there can be one."""
    for number in range(_NETWORKS):
        first, second = divmod(number, 250)
        tag = f"kv{200 + first}x{second}"
        with suppress(subprocess.CalledProcessError):
            _ip("link", "add", f"{tag}b", "type", "bridge")
            return tag, f"10.{200 + first}.{second}"
    raise NoHosts(f"hosts of {_NETWORKS} tests are there already, or a bridge cannot be made")


def eventually(holds: Callable[[], bool], seconds: float) -> None:
    """Waits until something holds. Raises AssertionError if it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@cache
def _unable() -> str:
    """Returns why no host can be made here; nothing if one can."""
    name = f"kvtry{os.getpid():x}"
    try:
        _ip("netns", "add", name)
        try:
            within = [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--pid",
                "--fork",
                "--mount-proc",
                "--uts",
                "true",
            ]
            subprocess.run(within, check=True, capture_output=True, text=True, timeout=SECONDS)
        finally:
            _ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or ""
        return " ".join(f"namespaces cannot be made here: {error} {output}".split())
    return ""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=SECONDS)
    return done.stdout
