"""The table of commands, and what the commands share.

A command's file is imported when the command is called, so that no command waits for what others need.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Annotated, Final, Literal

from cyclopts import App, CycloptsError, Parameter, Token
from cyclopts.help import HelpPanel
from rich.console import Console, ConsoleOptions

from kvloom.types.errors import ConfigError, nearest

FAILED: Final = 1
INVALID: Final = 2
INTERRUPTED: Final = 130
_MARGIN: Final = 24  # the column at which the help's second column begins
DEFAULT_URL: Final = "http://127.0.0.1:8000"
API_KEY_VARIABLE: Final = "KVLOOM_API_KEY"
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,18}")


def _read_whole(_: type, tokens: Sequence[Token]) -> int:
    token = tokens[0]
    if _WHOLE.fullmatch(token.value):
        return int(token.value)
    raise ConfigError(f"{token.keyword or token.value[:40]}: {token.value[:40]!r}; a whole number is right")


Whole = Annotated[int, Parameter(converter=_read_whole)]
"""The type of each option that is a whole number: cyclopts by itself rounds `81.5`."""
Url = Annotated[
    str, Parameter(metavar="URL", env_var="KVLOOM_URL", help="the server's address ($KVLOOM_URL)")
]
ApiKey = Annotated[str | None, Parameter(help=f"API key of the server (${API_KEY_VARIABLE})")]
Models = Annotated[
    tuple[str, ...],
    Parameter(metavar="NAME=PATH_OR_HUB_ID", help="a model, and the name for it; may be given again"),
]
Output = Annotated[Path, Parameter(alias="-o", help="the file to write")]

COMMANDS: Final = (
    ("serve", "kvloom.cli.serve:app", "Serve models."),
    ("chat", "kvloom.cli.talk.chat:chat", "Talk to a model in a terminal."),
    ("run", "kvloom.cli.talk.run:run", "Ask a model once, and print its answer."),
    ("models", "kvloom.cli.talk.run:models", "List the models that a server serves."),
    ("top", "kvloom.cli.top.app:app", "Watch a fleet that serves, in a terminal."),
    ("program", "kvloom.cli.admin:program", "Show or change the router program."),
    ("unit", "kvloom.cli.admin:unit", "Show units, drain or restart one."),
    ("node", "kvloom.cli.admin:node", "Show the nodes of a fleet, or empty one."),
    ("model", "kvloom.cli.models:model", "Show models, add or remove one while a fleet serves."),
    ("quantize", "kvloom.cli.models:quantize", "Make a checkpoint of 8 or 4 bits from another."),
    ("config", "kvloom.cli.models:config", "Bring a fleet that serves to another config."),
    ("cluster", "kvloom.cli.cluster:cluster", "Let several hosts serve together, on Ray."),
    ("key", "kvloom.cli.key:key", "Make, show, rotate or revoke keys with names and limits."),
    ("restart", "kvloom.cli.admin:restart", "Restart a whole fleet while it serves."),
    ("workload", "kvloom.cli.bench:workload", "Make or show a workload."),
    ("bench", "kvloom.cli.bench:bench", "Measure a server under a workload."),
    ("simulate", "kvloom.cli.simulate:app", "Say what a fleet would do."),
    ("profile", "kvloom.cli.profile:app", "Measure how long this machine takes for the jobs of models."),
    ("plan", "kvloom.cli.plan.app:app", "Find out which models go together on which devices."),
    ("replan", "kvloom.cli.plan.replan:app", "Bring a fleet that serves to another plan."),
    ("traffic", "kvloom.cli.plan.traffic:app", "Show what a fleet was asked, by model and hour."),
    ("doctor", "kvloom.cli.doctor.app:app", "Say what this machine has for kvloom, and what it lacks."),
    ("completion", "kvloom.cli.app:completion", "Print what lets a shell complete commands and options."),
    ("reproduce", "kvloom.cli.reproduce:app", "Run the experiments of a paper."),
    ("chaos", "kvloom.cli.simulate:chaos", "Let things go wrong, and check the laws."),
)
"""Each command's name, its place, and what the list of commands says of it; its docstring says the rest."""


class HelpPage:
    """Writes the help of a command as plain text, wrapped to the width of the terminal."""

    def render_usage(self, console: Console, options: ConsoleOptions, usage: object) -> None:
        console.out(f"Usage: {usage}".strip(), highlight=False)

    def render_description(self, console: Console, options: ConsoleOptions, description: object) -> None:
        for paragraph in _plain(description).split("\n\n"):
            console.out("\n" + fill(" ".join(paragraph.split()), console.width), highlight=False)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if panel.entries:
            console.out(f"\n{panel.title}:", highlight=False)
        for entry in panel.entries:
            names = "  " + ", ".join(entry.display_labels_with_metavar)
            notes = [f"[{', '.join(entry.choices)}]"] if entry.choices else []
            notes += [f"({entry.default})"] if entry.default is not None else []
            notes += ["(required)"] if entry.required and entry.positional_label is None else []
            said = " ".join([_plain(entry.description), *notes])
            margin = " " * _MARGIN
            lines = fill(said, console.width, initial_indent=margin, subsequent_indent=margin)
            if len(names) + 2 > _MARGIN:
                console.out(f"{names}\n{lines}", highlight=False)
            else:
                console.out(names.ljust(_MARGIN) + lines[_MARGIN:], highlight=False)


class CommandFailed(Exception):
    """Ends a command with one line on standard error, which says what went wrong, and an exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def run(arguments: Sequence[str]) -> int:
    """Runs the command that the arguments name and returns its exit code. An error is told in one line."""
    try:
        return _call(list(arguments))
    except CycloptsError as error:
        return _refuse(str(error), error.command_chain or ())
    except ConfigError as error:
        return _tell(error.message, INVALID)
    except CommandFailed as error:
        return _tell(str(error), error.code)


def make_app(called: str = "") -> App:
    """Returns the application with all its commands, none of which is imported yet. All have their summaries,
    but the one that is called, whose own docstring says more."""
    app = App(
        name="kvloom",
        help="Many LLMs woven over one KV cache.",
        version=lambda: f"kvloom {metadata.version('kvloom')}",
        help_format="plaintext",
        help_formatter=HelpPage(),
        default_parameter=Parameter(negative=(), allow_repeating=True, show_default=_worth_telling),
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for place, (name, path, summary) in enumerate(COMMANDS):
        app.command(path, name=name, help=None if name == called else summary, sort_key=place)
    return app


completion = App(name="completion")


@completion.default
def print_completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script by which a shell completes commands, options and files.

    For bash, `source <(kvloom completion bash)` in ~/.bashrc is right; for zsh, `kvloom completion zsh >
    ~/.zfunc/_kvloom`, with ~/.zfunc in fpath before compinit is called; for fish, `kvloom completion fish >
    ~/.config/fish/completions/kvloom.fish`."""
    print(make_app().generate_completion(shell=shell))


@contextmanager
def interruptible(consequence: str) -> Iterator[None]:
    """Says what comes of Ctrl-C in the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise CommandFailed(f"interrupted; {consequence}", INTERRUPTED) from None


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Prints a line for each row, with its cells below one another."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for row in lines:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def printable(text: str, keep: str = "") -> str:
    """Returns text that cannot steer a terminal. `keep` are signs that stay, as line breaks."""
    return "".join(
        sign if sign.isprintable() or sign in keep else "\N{REPLACEMENT CHARACTER}" for sign in text
    )


def check_outputs(*paths: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Raises ConfigError if one of the files cannot be written, before there is anything to write, or is also
    another one of them, or an input."""
    taken = {path.resolve() for path in inputs if path is not None}
    for path in paths:
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: no such folder; a path that can be written is right")
        if path.resolve() in taken:
            raise ConfigError(
                f"{path}: this file is named twice; a path of its own for what is written is right"
            )
        taken.add(path.resolve())


def _call(arguments: list[str]) -> int:
    app = make_app(*arguments[:1])
    names = [name for name, *_ in COMMANDS]
    for word in arguments[:1]:
        if word not in (*names, *app.help_flags, *app.version_flags):  # cyclopts would import every command
            return _refuse(f"there is no command {word[:40]!r}; {nearest(word, names)}", ())
    chain, apps, rest = app.parse_commands(arguments)
    if not rest and apps[-1].default_command is None:
        known = ", ".join(name for name in apps[-1] if not name.startswith("-"))
        return _refuse(f"a command is missing; known are {known}", chain)
    code = app(arguments)
    return code if isinstance(code, int) else 0


def _plain(text: object) -> str:
    """Returns what rich would write of the text, on a line as long as it likes."""
    written = StringIO()
    Console(file=written, width=1 << 16).print(text or "", markup=False, highlight=False)
    return written.getvalue().strip()


def _worth_telling(default: object) -> object:
    return None if default is False or default == () else default


def _refuse(problem: str, chain: Sequence[str]) -> int:
    said = " ".join(problem.split()).removesuffix(".")
    return _tell(f"{said} (`{' '.join(['kvloom', *chain])} --help` shows what is right)", INVALID)


def _tell(line: str, code: int) -> int:
    print(f"kvloom: {line}", file=sys.stderr)
    return code
