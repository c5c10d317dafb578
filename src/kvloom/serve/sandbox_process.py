"""The process of a sandbox: `python -m kvloom.serve.sandbox_process WORK CPU_SECONDS MEMORY`."""

from __future__ import annotations

import math
import resource
import sys
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import msgspec

from kvloom.serve.processes.sandbox import LENGTH_BYTES, PREPARING, Answer, Done, Failed, Prepare, Question
from kvloom.types.errors import KvloomError

_question: Final = msgspec.msgpack.Decoder(Question).decode
PAGE: Final = resource.getpagesize()
STACK: Final = 1 << 20  # bytes
PANICS: Final = "pyo3_runtime"  # of what libraries in Rust raise if they panic, which is no Exception
MOST_SAID: Final = 200  # characters of an error that nobody has foreseen


class Worker(Protocol):
    """Does one kind of work. Both methods raise KvloomError if what they were given makes no sense."""

    def prepare(self, key: str, data: bytes) -> None: ...

    def run(self, key: str, data: bytes) -> bytes: ...


def worker(work: str) -> Worker:
    """Imports what the work needs, and no more."""
    if work == "texts":
        from kvloom.api.texts.prompts import TextWorker  # noqa: PLC0415

        return TextWorker()
    assert work == "grammars"
    from kvloom.engine.guide import GrammarTrials  # noqa: PLC0415

    return GrammarTrials()


def main(work: str, seconds: float, memory: int) -> None:
    """Answers questions until stdin ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    doing = worker(work)
    while (question := read(questions)) is not None:
        times = PREPARING if isinstance(question, Prepare) else 1
        limit(times * seconds, times * memory)
        frame = msgspec.msgpack.encode(answered(doing, question))
        answers.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        answers.flush()


def read(stream: BinaryIO) -> Question | None:
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    question: Question = _question(stream.read(int.from_bytes(head, "big")))
    return question


def answered(doing: Worker, question: Question) -> Answer:
    """Returns the answer. Whatever the work raises is its own fault, and does not end the process."""
    try:
        if isinstance(question, Prepare):
            doing.prepare(question.key, question.data)
            return Done(b"")
        return Done(doing.run(question.key, question.data))
    except KvloomError as error:
        return Failed(error.message)
    except MemoryError:
        return Failed("it needs too much memory")
    except RecursionError:
        return Failed("it is nested too deeply")
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != PANICS:
            raise
        return Failed(f"it fails with {type(error).__name__}: {error}"[:MOST_SAID])


def limit(seconds: float, memory: int) -> None:
    """Bounds what is done from now on: the CPU's seconds, to the next whole one, the address space, and the
    stack, which is smaller here than that of any thread elsewhere: what fits here fits there."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    for which, most in (
        (resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds)),
        (resource.RLIMIT_STACK, STACK),
        (resource.RLIMIT_AS, held + memory),
    ):
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
