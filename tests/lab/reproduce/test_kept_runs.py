"""The runs of a figure that are kept as they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvloom.lab.reproduce.kept_runs import KeptRuns
from kvloom.lab.reproduce.llumnix.scaling import section_65
from kvloom.lab.reproduce.llumnix.serving import figure_11
from kvloom.lab.reproduce.report import Options, Report, Scale, Tell
from kvloom.lab.reproduce.setup import TellPart, play_or_read


@dataclass(frozen=True, slots=True)
class Found:
    number: int


class Figure:
    """A figure of four runs, which counts those that it plays and may be interrupted at one."""

    def __init__(self, folder: Path, *, interrupted_at: int | None = None) -> None:
        self.kept = KeptRuns(folder)
        self.played: list[int] = []
        self._interrupted_at = interrupted_at

    def make(self) -> list[Found]:
        return play_or_read(self.kept, Found, range(4), self._play, "a/b, {} req/s".format, lambda *_: None)

    def _play(self, run: int, _: TellPart) -> Found:
        if run == self._interrupted_at:
            raise KeyboardInterrupt
        self.played.append(run)
        return Found(10 * run)


WHOLE = [Found(0), Found(10), Found(20), Found(30)]


def test_an_interrupted_figure_goes_on_where_it_ended(tmp_path: Path) -> None:
    first = Figure(tmp_path, interrupted_at=2)
    with pytest.raises(KeyboardInterrupt):
        first.make()
    second = Figure(tmp_path)
    assert second.make() == WHOLE
    assert (first.played, second.played) == ([0, 1], [2, 3])


def test_the_seconds_of_runs_that_were_kept_count_too(tmp_path: Path) -> None:
    first, second = Figure(tmp_path), Figure(tmp_path)
    first.make()
    second.make()
    assert second.kept.seconds == first.kept.seconds > 0


def test_a_run_whose_process_died_while_it_wrote_is_played_again(tmp_path: Path) -> None:
    Figure(tmp_path).make()
    file = sorted(tmp_path.iterdir())[1]
    file.write_bytes(file.read_bytes()[:-3])
    again = Figure(tmp_path)
    assert again.make() == WHOLE
    assert again.played == [1]


def test_a_run_that_another_process_plays_is_left_to_it(tmp_path: Path) -> None:
    playing, asked, other = threading.Event(), threading.Event(), Figure(tmp_path)
    found: list[Found | None] = []

    def slow() -> Found:
        playing.set()
        assert asked.wait(10)
        return Found(10)

    def play() -> None:
        found.append(KeptRuns(tmp_path).result("a/b, 1 req/s", Found, slow, wait=False))

    thread = threading.Thread(target=play)
    thread.start()
    assert playing.wait(10)
    assert other.kept.result("a/b, 1 req/s", Found, lambda: Found(0), wait=False) is None
    asked.set()
    assert other.make() == WHOLE
    thread.join()
    assert found == [Found(10)]
    assert 1 not in other.played


@pytest.mark.parametrize("figure", [figure_11, section_65])
def test_a_figure_out_of_kept_runs_is_the_same(
    figure: Callable[[Scale, Tell, Options], Report], tmp_path: Path
) -> None:
    """Once without the folder, once into it, and once out of it."""
    kept = [None, KeptRuns(tmp_path), KeptRuns(tmp_path)]
    reports = [figure("small", lambda *_: None, Options(requests=30, kept=one)) for one in kept]
    assert reports[0] == reports[1] == reports[2]
    assert list(tmp_path.iterdir())
