"""`make gpu-check` where there is no GPU, and as much of it as runs without one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from tools.gpu_check import main
from tools.gpu_checks import parts, steps, weaving
from tools.gpu_checks.flash import Sizes, against_triton
from tools.gpu_checks.models import executor_of, make_models
from tools.gpu_checks.peers import OURS, THEIRS, Burst, Theirs, against_transformers, ours
from tools.gpu_checks.processes import Sessions, apart, counted, run_tests
from tools.gpu_checks.report import Checks, Figure, Findings, Report
from tools.gpu_checks.run import BOUNDS, LAST, PARTS, SECONDS, TESTS, Run, bound, check
from tools.gpu_checks.steps import Jobs

from kvloom.exec.cuda.device import host_device
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import plain_operations
from kvloom.kernels import mailbox_reference
from kvloom.kernels.cuda.flash import FlashAttention
from kvloom.offload.memory.mailbox import MailboxForm
from kvloom.types.job import Phase
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of
from tests.exec.cuda.flash import flash, flash_attn_with_kvcache
from tests.processes import DEADLINE, is_readable
from tests.tools.gpu_host import TINY, ground


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(tmp_path / "figures.json")]) == 2
    told = capsys.readouterr().out
    assert told.startswith("no CUDA device: ")
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_its_jobs_run_again_and_again(tmp_path: Path) -> None:
    spec = spec_of({"m": make_checkpoint(tmp_path, "qwen3")}, max_running=4)
    jobs = Jobs(load_executor(spec, host_device(4), plain_operations()), 16)
    with jobs.sequences(3, 20) as ids:
        assert len(jobs.seconds(Phase.DECODE, ids, 1, 2)) == 2
        assert len(jobs.seconds(Phase.DECODE, ids, 1, 1, steps=4)) == 1
        with jobs.sequences(1, 0) as prompt:
            found, prefills, _ = asyncio.run(steps.play(jobs, ids, prompt, 2, 2, chunk=8, steps=4))
    assert len(found) == 2
    assert prefills > 0
    jobs.executor.close()


def test_tasks_through_a_mailbox_are_looked_at() -> None:
    form = MailboxForm(2, 3, 2, 6, 1, 4, 2, 16)
    loan = weaving.Loan(form, "float32", torch.device("cpu"), 9)
    twins = weaving.Kernels(mailbox_reference.serve, mailbox_reference.post, mailbox_reference.collect)
    lane = host_device(4).partitions.whole
    weaving.right(loan, twins, lane, lane, close=1e-6)
    assert weaving.idle(loan, twins, lane).unit == "µs"
    never = weaving.Kernels(
        lambda *_: None, mailbox_reference.post, lambda mailbox, borrower_state, out, looks: None
    )
    with pytest.raises(AssertionError):
        weaving.right(loan, never, lane, lane, close=1e-6)


def test_flash_attention_is_compared() -> None:
    """And is told to be missing, or wrong."""
    sizes = Sizes(layers=2, kv_heads=2, group=2, head_dim=16, block_bytes=2048)

    def found(flash: FlashAttention | None) -> list[Figure]:
        made, cases = replace(plain_operations(), flash=flash), ((3, 1, 40), (2, 9, 20))
        return list(against_triton(ground(made), cases, sizes, lambda work: work() is None))

    assert [one.name for one in found(flash())] == [
        "FlashAttention 3, a layer: 3 sequences, 1 new tokens after 40",
        "FlashAttention 3, a layer: 2 sequences, 9 new tokens after 20",
    ]
    with pytest.raises(LookupError, match="not installed, or not for this device: flash_attn_3 or sglang"):
        found(None)
    wrong = flash(lambda *given, **named: 1.1 * flash_attn_with_kvcache(*given, **named))
    with pytest.raises(AssertionError, match="after 40: outputs differ by"):
        found(wrong)


def test_what_fails_is_told_and_the_rest_runs(tmp_path: Path) -> None:
    def wrong() -> list[Figure]:
        raise AssertionError("both sides run on [3]")

    checks, late = Checks(60, tmp_path / "found.json"), Checks(-1, tmp_path / "late.json")
    checks.check("partitions", wrong)
    checks.check("ceilings", lambda: [Figure(name="copy", value=3000.0, unit="GB/s")])
    late.check("ceilings", wrong)
    read = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Findings)
    assert read.failures == {"partitions": "AssertionError: both sides run on [3]"}
    assert [figure.value for figure in read.figures] == [3000.0]
    report = Report(environment={}, parts={"executor": read})
    assert "NOT RUN, OR WRONG: executor: partitions: AssertionError" in report.table()
    assert late.findings.failures == {"ceilings": "not run: no time was left"}


def test_why_a_task_of_a_group_failed_is_told(tmp_path: Path) -> None:
    def wrong() -> list[Figure]:
        raise ExceptionGroup("many", [ValueError("a"), ExceptionGroup("more", [KeyError("b"), OSError("c")])])

    checks = Checks(60, tmp_path / "found.json")
    checks.check("several", wrong)
    assert checks.findings.failures["several"] == "ValueError: a; KeyError: 'b'; OSError: c"


def test_what_has_too_little_time_left_is_not_begun(tmp_path: Path) -> None:
    """And what was known of it before stays."""
    before = Findings(figures=[Figure(name="in time", value=2.0, unit="×")], failures={"one": "wrong"})
    run = Run(60, tmp_path / "figures.json", Report(environment={}, parts={"several": before}))
    run.part("several", Findings, needs=70)
    run.part("moving", Findings, needs=70)
    assert [figure.value for figure in run.report.figures] == [2.0]
    assert run.report.failures["several: one"] == "wrong"
    for part in ("several", "moving"):
        assert run.report.failures[part].endswith("s were left, and it needs 70")


def test_figures_say_what_was_wanted_and_whether_it_was_reached() -> None:
    found = Figure(name="in time", value=1.7, unit="×", least=1.5)
    missed = Figure(name="downtime", value=9.0, unit="ms", most=8.0)
    plain = Figure(name="copy", value=3000.0, unit="GB/s", bound=3350.0)
    assert [one.reached for one in (found, missed, plain)] == [True, False, None]
    parts = {"several": Findings(figures=[found, missed, plain])}
    table = Report(environment={}, parts=parts).table().splitlines()
    assert table[2].split() == ["in", "time", "1.7", "×", "≥", "1.5", "reached"]
    assert table[3].split() == ["downtime", "9", "ms", "≤", "8", "MISSED"]
    assert "of 2 figures that were measured and of which something is wanted, 1 reach it, 1 do not" in table


def test_figures_count_as_they_come(tmp_path: Path) -> None:
    def half() -> Iterator[Figure]:
        yield Figure(name="first", value=1.0, unit="s")
        raise AssertionError("no second")

    checks = Checks(60, tmp_path / "found.json")
    checks.check("two", half)
    assert [figure.name for figure in checks.findings.figures] == ["first"]
    assert checks.findings.failures == {"two": "AssertionError: no second"}


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("ends", {}),
        ("fails", {"fails: second": "AssertionError: wrong"}),
        ("dies", {"dies: second": "ended by SIGABRT: a word before"}),
        ("hangs", {"hangs: second": "did not end within 4 s: a word before"}),
        ("exits", {"exits": "ended with 3: a word before"}),
        ("nothing", {"nothing": "ended with 4"}),
    ],
)
def test_a_part_in_a_process_of_its_own(part: str, told: dict[str, str]) -> None:
    """What it has found counts, however it ends."""
    found = apart(Sessions(), part, 4, "tests.tools.gpu_part")
    report = Report(environment={}, parts={part: found})
    assert report.failures == told
    if part == "hangs":
        assert gone(found.figures[0].note)  # what it had started
    assert [figure.name for figure in report.figures] == ([] if part == "nothing" else ["first"])


def gone(process: str) -> bool:
    try:
        end = os.pidfd_open(int(process))
    except ProcessLookupError:
        return True
    try:
        return is_readable(end, 10.0)
    finally:
        os.close(end)


def test_each_part_is_known_to_its_process() -> None:
    assert set(PARTS) == set(parts.PARTS)


def test_there_is_time_for_each_part() -> None:
    """Though all before it take what they may; and if those that come late find less, it is not none."""
    most, least = ({part: bounds[i] for part, bounds in BOUNDS.items()} for i in range(2))
    assert sum(most.values()) - most[LAST] + least[LAST] <= SECONDS
    names = list(BOUNDS)
    left = SECONDS - 60  # as if something had taken longer than it may
    for i, part in enumerate(names):
        given = bound(left, part, names[i + 1 :])
        assert least[part] <= given <= most[part]
        left -= given
    assert left == 0


def test_all_tests_on_the_device_are_run() -> None:
    files = {path.as_posix() for path in Path("tests/gpu").glob("test_*.py")}
    assert files == {path for path in TESTS["exactness"] if path.startswith("tests/gpu")}
    assert TESTS["exactness"][0] == "tests/gpu/test_long_contexts.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_part_without_a_device_says_so(tmp_path: Path) -> None:
    run = Run(60, tmp_path / "figures.json", Report(environment={}))
    assert check(run, ["memory"]) == 1
    assert "CUDA" in run.report.failures["memory"]


def test_against_transformers_needs_both() -> None:
    """And is against the faster of its ways."""
    mine = Figure(name=OURS, value=900.0, unit="tokens/s")
    report = Report(environment={}, parts={"executor": Findings(figures=[mine])})
    with pytest.raises(LookupError):
        list(against_transformers(report))
    theirs = report.parts["transformers"] = Findings()
    theirs.figures.append(Figure(name=THEIRS[None], value=200.0, unit="tokens/s"))
    [ratio] = against_transformers(report)
    assert (ratio.value, ratio.reached) == (4.5, True)
    theirs.figures.append(Figure(name=THEIRS[True], value=450.0, unit="tokens/s"))
    [ratio] = against_transformers(report)
    assert (ratio.value, ratio.reached) == (2.0, False)


def test_both_answer_bursts_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers with a manager that stays, which is gone afterwards."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    burst, here = Burst(requests=3, prompt=5, output=4), ground()
    theirs = Theirs(TINY, "cpu", burst, num_blocks=64, max_batch_tokens=64)
    [figure] = theirs.measure(None)
    assert figure.value > 0
    assert "warm; graphs of mixed and of decode steps: (False, False)" in figure.note
    assert not hasattr(theirs._module, "_cached_continuous_batching_manager")
    loaded, arena = make_models({"m": TINY}, here), here.arena(1 << 20)
    executor = executor_of(loaded, arena, here, most_running=4, chunk=16)
    [mine] = ours(executor, burst)
    executor.close()
    assert mine.value > 0


def test_what_hangs_is_told_and_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, codes = tmp_path / "figures.json", list[int]()
    run = Run(60, file, Report(environment={}))

    def hangs() -> Findings:
        run.give_up(codes.append)
        found.append(msgspec.json.decode(file.read_bytes(), type=Report))
        return Findings()

    found = list[Report]()
    run.part("memory", lambda: Findings(figures=[Figure(name="copy", value=1.0, unit="GB/s")]))
    run.part("weaving", hangs)
    assert codes == [1]
    assert found[0].failures == {"weaving": "did not end"}
    assert [figure.name for figure in found[0].figures] == ["copy"]
    assert "weaving: did not end" in capsys.readouterr().out


def test_it_ends_in_time_though_it_waits(tmp_path: Path) -> None:
    """And what it has begun, with it."""
    run, ended = Run(60, tmp_path / "figures.json", Report(environment={})), threading.Event()
    with run.sessions.started(["sleep", "300"]) as begun, run.bounded(0.0, lambda _: ended.set()):
        assert ended.wait(DEADLINE)
        assert begun.wait(DEADLINE) == -signal.SIGKILL


TWO = """
import pytest
def test_one(): assert 0
@pytest.mark.parametrize("form", ["qwen3, heads of 128"])
def test_third(form): pass
@pytest.mark.skip(reason="why")
def test_fourth(): pass
def test_other(): assert 0
def test_late(): pass
"""


def test_each_test_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(TWO)
    told = r"2 passed, 2 failed, 1 left out, 0 not ended; .*::test_one; .*::test_other"
    with pytest.raises(AssertionError, match=told):
        run_tests(Sessions(), (str(file), "-p", "no:cacheprovider"), 60)


def test_tests_that_are_late_are_ended() -> None:
    with pytest.raises(TimeoutError, match="not over after 0 s: 0 passed, 0 failed"):
        run_tests(Sessions(), ("tests/kernels/cuda",), 0.0)


def test_what_tests_have_come_to_by_then_is_counted() -> None:
    said = """
collecting ... collected 63 items / 20 deselected / 43 selected
tests/gpu/test_a.py::test_p[qwen3, heads of 128] PASSED                      [  2%]
tests/gpu/test_a.py::test_skip SKIPPED (no [ 3%] thing)                      [  4%]
tests/gpu/test_a.py::test_late"""
    assert counted(said.splitlines()) == "1 passed, 0 failed, 1 left out, 41 not ended"
    said = """
2 workers [4 items]
tests/gpu/test_a.py::test_p[qwen3, heads of 128]
[gw1] [ 25%] PASSED tests/gpu/test_a.py::test_p[qwen3, heads of 128]
[gw0] [ 50%] FAILED tests/gpu/test_a.py::test_one
FAILED tests/gpu/test_a.py::test_one - assert 0"""
    assert counted(said.splitlines()) == (
        "1 passed, 1 failed, 0 left out, 2 not ended; tests/gpu/test_a.py::test_one"
    )
