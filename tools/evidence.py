"""Makes the papers' figures anew: each in a data file of docs/reproduction/, from which pages are written.

python -m tools.evidence                         makes all that the present code has not made yet
python -m tools.evidence llumnix --figure 3      makes this one alone, if the present code has not made it yet
python -m tools.evidence llumnix --figure 11 --draws 1   makes less than the whole of it, as its page tells
python -m tools.evidence --changed               makes those whose small run differs from what it was
python -m tools.evidence --page                  runs nothing: it writes the pages from the data files

Each figure is written as soon as it is made, and runs of Llumnix's figure 11 and section 6.5 are kept as they
end, so that an interrupted command goes on where it ended if the code is the same. The same command in a
second terminal takes a part of those runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Console

from kvloom.cli.reproduce import quiet, run_with_progress
from kvloom.lab.reproduce.kept_runs import KeptRuns
from kvloom.lab.reproduce.published import FOLDER
from kvloom.lab.reproduce.report import Experiment, Options, Report, Scale, markdown, verdicts
from kvloom.types.files import replacing

ROOT: Final = Path(__file__).resolve().parents[1]
DATA: Final = ROOT / "docs" / "reproduction"
OVERVIEW: Final = ROOT / "docs" / "reproduction.md"
KEPT: Final = ROOT / "build" / "evidence"  # runs that are over, by the tree of `CODE`
CODE: Final = "src/kvloom"  # what a figure is made by
PAPERS: Final = ("microserving", "muxserve", "llumnix", "weaver", "aegaeon")  # as the page has them
TOLERANCE: Final = 0.01
"""The part by which numbers of two small runs may differ: processors round logarithms differently."""

_FIGURE: Final = re.compile(r"<!-- (\w+) ([\w.-]+) -->\n.*?<!-- end -->\n", re.S)
_OVERVIEW: Final = re.compile(r"<!-- overview -->\n.*?<!-- end -->\n", re.S)
_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?")


class Evidence(Struct, frozen=True, kw_only=True):
    """A figure as one commit made it. seconds: of one core, at full scale. small: the same figure with few
    requests, which is cheap enough to be played again with every change."""

    command: str
    commit: str
    date: str
    seconds: float
    report: Report
    small: Report


def experiments() -> Iterator[tuple[str, Experiment]]:
    """Yields every figure that can be made, with its paper."""
    for paper in PAPERS:
        for experiment in import_module(f"kvloom.lab.reproduce.{paper}").EXPERIMENTS:
            yield paper, experiment


def data_file(paper: str, name: str) -> Path:
    """Returns where the figure's evidence lies. name: as `--figure` takes it."""
    return DATA / paper / f"{f'figure-{name}' if name.isdigit() else name}.json"


def read_evidence(path: Path) -> Evidence | None:
    """Returns None if the figure was never made. Raises msgspec.MsgspecError if the file is not evidence."""
    return msgspec.json.decode(path.read_bytes(), type=Evidence) if path.exists() else None


def changed(before: Report, now: Report) -> list[str]:
    """Returns what a report says otherwise than it did, a line each: words, or numbers that differ by more
    than `TOLERANCE`."""
    lines = zip_longest(markdown(before).splitlines(), markdown(now).splitlines(), fillvalue="")
    return [f"{old}  →  {new}" for old, new in lines if not _alike(old, new)]


def differences(experiment: Experiment, then: Report, now: Report) -> list[str]:
    """Returns how two small runs of an experiment differ, a line each. Of an experiment that shows times of
    the machine that plays it, only titles and heads of grids are compared."""
    if experiment.timed:
        old, new = _headings(then), _headings(now)
        return [] if old == new else [f"{old}  →  {new}"]
    return changed(then, now)


def _headings(report: Report) -> str:
    """Returns the titles and heads of a report's grids, with # for each number."""
    return _NUMBER.sub("#", " ".join(head for grid in report.grids for head in (grid.title, *grid.heads)))


def _alike(old: str, new: str) -> bool:
    if _NUMBER.sub("#", old) != _NUMBER.sub("#", new):
        return False
    pairs = zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True)
    return all(abs(_value(a) - _value(b)) <= TOLERANCE * max(_value(a), _value(b)) for a, b in pairs)


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def page_text(text: str) -> str:
    """Returns the page with every table as the data files have it. Raises ValueError if the page names a
    figure that has no data file."""
    text = _FIGURE.sub(lambda found: _block(*found.groups()), text)
    return _OVERVIEW.sub(lambda _: f"<!-- overview -->\n{_overview()}<!-- end -->\n", text)


def _block(paper: str, name: str) -> str:
    evidence = read_evidence(DATA / paper / f"{name}.json")
    if evidence is None:
        raise ValueError(f"a page names {paper} {name}, which has no data file in {DATA.name}/{paper}")
    made = f"*`{evidence.command}`: {_made(evidence)}*"
    return f"<!-- {paper} {name} -->\n{markdown(evidence.report)}\n{made}\n<!-- end -->\n"


def _made(evidence: Evidence) -> str:
    return f"commit {evidence.commit}, {evidence.date}, {_spent(evidence.seconds)} of one core"


def _spent(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _overview() -> str:
    """Counts of the verdicts of every figure, and when it was made."""
    kinds = list(verdicts([]))
    heads = ("PAPER", "`--figure`", *kinds, "made by", "on", "in")
    rows = [heads, ("---", "---", *["---:"] * len(kinds), "---", "---", "---:")]
    for paper, experiment in experiments():
        evidence = read_evidence(data_file(paper, experiment.name))
        if evidence is not None:
            counts = [str(count or "") for count in verdicts([evidence.report]).values()]
            made = evidence.commit, evidence.date, _spent(evidence.seconds)
            name = evidence.command.split(" --figure ")[1]  # with the options that it was made with
            rows.append((paper, name, *counts, *made))
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def pages() -> list[Path]:
    """Returns the pages that have tables of figures."""
    return [OVERVIEW, *(DATA / f"{paper}.md" for paper in PAPERS)]


def write_pages() -> None:
    """Writes each page whole, or not at all. Raises ValueError if a page names a figure that was never
    made."""
    for page in pages():
        text = page_text(page.read_text("utf-8"))
        with replacing(page, 0o666) as made:
            made.write(text.encode())


def make(
    paper: str, experiment: Experiment, scale: Scale, options: Options, commit: str, console: Console
) -> Evidence:
    """Runs a figure at both scales, or at the small one alone, and writes its data file. commit: of the code
    that runs."""
    with _without_published():
        small, seconds = _timed(paper, experiment, "small", Options(), console)
    report = small
    if scale == "full":
        tree = _git("rev-parse", "--short=12", f"{commit}:{CODE}")
        kept = KeptRuns(KEPT / tree / paper / experiment.name)
        report, seconds = _timed(paper, experiment, "full", replace(options, kept=kept), console)
        seconds = max(seconds, kept.seconds)
    evidence = Evidence(
        command=_command(paper, experiment, scale, options),
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        seconds=round(seconds, 1),
        report=report,
        small=small,
    )
    path = data_file(paper, experiment.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, 0o666) as made:
        made.write(msgspec.json.format(msgspec.json.encode(evidence)) + b"\n")
    return evidence


def _command(paper: str, experiment: Experiment, scale: Scale, options: Options) -> str:
    """Returns the command that makes the tables. DATA is a folder with what was published."""
    folder = [f"{FOLDER}=DATA"] if experiment.published else []
    asked = [f"--{name} {getattr(options, name)}" for name in options.given]
    small = ["--scale small"] if scale == "small" else []
    words = ("kvloom reproduce", paper, "--figure", experiment.name)
    return " ".join((*folder, *words, *asked, *small))


@contextmanager
def _without_published() -> Iterator[None]:
    """Hides the folder of published data, so that small runs are the same wherever they are made."""
    folder = os.environ.pop(FOLDER, None)
    try:
        yield
    finally:
        if folder is not None:
            os.environ[FOLDER] = folder


def _timed(
    paper: str, experiment: Experiment, scale: Scale, options: Options, console: Console
) -> tuple[Report, float]:
    """Returns the report, and the seconds of one core that it took."""
    before = time.process_time()
    report = run_with_progress(f"{paper} {experiment.name}", experiment, scale, options, console)
    return report, time.process_time() - before


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _made_by_present_code(evidence: Evidence) -> bool:
    """Returns whether nothing in `CODE` has changed since the figure was made. Ends the command if
    the clone does not have the commit that made it."""
    words = ["git", "diff", "--quiet", evidence.commit, "HEAD", "--", CODE]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode > 1:  # it is 1 if something has changed
        raise SystemExit(f"commit {evidence.commit}, which made a figure, is not in this clone: fetch all")
    return done.returncode == 0


def _is_wanted(paper: str, experiment: Experiment, command: str, only_changed: bool) -> bool:
    """Returns whether a figure is to be made: it was not by this command and the present code, or if
    `only_changed`, its small run differs from what it was."""
    evidence = read_evidence(data_file(paper, experiment.name))
    if evidence is None:
        return True
    if only_changed:
        with _without_published():
            return bool(differences(experiment, evidence.small, experiment.run("small", lambda *_: None)))
    return evidence.command != command or not _made_by_present_code(evidence)


def main(words: Sequence[str] | None = None) -> str | None:
    """Returns what is wrong, in a line, or None."""
    parser = argparse.ArgumentParser(prog="make evidence", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"only of these: {', '.join(PAPERS)}")
    parser.add_argument("--figure", action="append", default=[], help="only these; may be given again")
    parser.add_argument("--traffic", help="of figures that have several: this one alone")
    parser.add_argument("--draws", type=int, help="of each point")
    parser.add_argument("--scale", choices=("small", "full"), default="full", help="of the tables")
    parser.add_argument(
        "--changed", action="store_true", help="only those whose small run differs from what it was"
    )
    parser.add_argument("--page", action="store_true", help="only write the pages, from the data files")
    options = parser.parse_args(words)
    if not options.page:
        papers, figures = options.papers or PAPERS, [one.removeprefix("figure-") for one in options.figure]
        chosen = [
            one for one in experiments() if one[0] in papers and one[1].name in (figures or [one[1].name])
        ]
        if not chosen:
            asked = f"{' '.join(figures)} of {' '.join(papers)}"
            return f"no figure {asked}: `kvloom reproduce PAPER --figure ?` tells which there are"
        if _git("status", "--porcelain", "--", CODE):
            return f"{CODE} has changes that are not committed: figures name the commit that made them"
        given = Options(traffic=options.traffic, draws=options.draws)
        lacking = [one.name for _, one in chosen if not set(given.given) <= set(one.options)]
        if lacking:
            return f"figure {lacking[0]} has no option {', '.join(given.given)}"
        _make_all(chosen, options.scale, given, options.changed)
    write_pages()
    return None


def _make_all(
    chosen: Sequence[tuple[str, Experiment]], scale: Scale, options: Options, only_changed: bool
) -> None:
    console = Console()
    commit = _git("rev-parse", "--short=8", "HEAD")  # others may be made while this runs
    before = [read_evidence(data_file(paper, experiment.name)) for paper, experiment in chosen]
    left = sum(evidence.seconds for evidence in before if evidence)
    console.print(f"{len(chosen)} figures, of which those made before took {_spent(left)} of one core")
    for at, (paper, experiment) in enumerate(chosen, 1):
        name = f"{at} of {len(chosen)}: {paper} {experiment.name}"
        if not _is_wanted(paper, experiment, _command(paper, experiment, scale, options), only_changed):
            console.print(f"{name} stands")
        elif experiment.published and not os.environ.get(FOLDER):
            told = f"{FOLDER} names no folder with {experiment.published}"
            console.print(f"{name} is to be made anew, and is left as it is: {told}")
        else:
            evidence = make(paper, experiment, scale, options, commit, console)
            console.print(f"{name}, {_spent(evidence.seconds)}")


if __name__ == "__main__":
    try:
        with quiet(logging.getLogger("kvloom")):
            sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: what was made is written, and the same command goes on from there")
