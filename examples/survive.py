"""A story goes on where its engine is killed: the other engine tells the rest, word for word.

Starts `kvloom serve examples/two_units.yaml` itself, and ends it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openai import OpenAI

BESIDE = Path(sys.executable).with_name("kvloom")  # this Python's own
KVLOOM = shlex.split(os.environ.get("KVLOOM", "")) or [str(BESIDE)]
CONFIG = Path(__file__).with_name("two_units.yaml")
TOKENS, TOLD = 400, 20


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """The server's URL and its process id."""
    command = [*KVLOOM, "serve", str(CONFIG), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            ready = next(line for line in server.stdout if line.startswith("Ready"))
            yield re.findall(r"http://\S+", ready)[0], server.pid
        finally:
            server.send_signal(signal.SIGINT)
            server.stdout.read()


def busy_engine(url: str, server: int) -> int:
    """Process id of the engine that tells a story."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        metrics = response.read().decode()
    [unit] = re.findall(r'kvloom_requests_running{.*unit="(.*)"} 1.0', metrics)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_text().replace("\0", " ").split()
            if unit in words and server in (parent(folder.name), parent(str(parent(folder.name)))):
                return int(folder.name)
    raise LookupError(f"no process of {unit}")


def parent(process: str) -> int:
    """An engine's is the server, or the fork server that this has started."""
    return int(Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1])


def tell(url: str, killing: Callable[[], None]) -> str:
    """A story; `killing` is called once it is under way."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="stories",
        prompt="Once",
        max_tokens=TOKENS,
        temperature=0.8,
        seed=5,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    story = ""
    for count, chunk in enumerate(stream):
        story += chunk.choices[0].text
        if count == TOLD:
            killing()
    return story


with served() as (url, server):
    whole = tell(url, killing=lambda: None)
    survived = tell(url, killing=lambda: os.kill(busy_engine(url, server), signal.SIGKILL))
print(f"Once {survived.split(chr(10))[0].strip()[:72]} …")
print("Its engine was killed on the way; the story is the same:", survived == whole)
