"""`kvloom run` and `kvloom models`: one answer on standard output, and whom one can ask for it."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import closing, suppress
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter

from kvloom.cli.app import CommandFailed, print_columns, printable
from kvloom.cli.gateway import AdminClient, GatewayError
from kvloom.cli.talk.chat import Conversation, show_answer
from kvloom.cli.talk.client import BY_DEFAULT, THIS_SERVER, AnswerOptions, ApiOptions, ModelLine
from kvloom.journal.samples import Sample

run = App(name="run")
models = App(name="models")
_HEAD: Final = ("name", "context", "parent", "weights", "task")
_SOON: Final = 3.0  # seconds; a sample is taken each second


@run.default
def run_once(
    model: Annotated[str, Parameter(help="a model that is served")],
    prompt: Annotated[str | None, Parameter(help="the question (standard input)")] = None,
    /,
    *,
    answer: AnswerOptions = BY_DEFAULT,
    server: ApiOptions = THIS_SERVER,
) -> None:
    """Ask a model once, and print its answer as it comes.

    Without PROMPT the question is read from standard input. With both, what a pipe or a file has on standard
    input follows PROMPT, as in `kvloom run chat "Sum it up:" < text.txt`."""
    client = server.client(model)
    try:
        conversation = Conversation(client, client.chosen(model), answer)
        question = _question(prompt)
        show_answer(conversation.ask(question), thoughts=answer.thoughts)
    except GatewayError as error:
        raise CommandFailed(str(error)) from error


def _question(prompt: str | None) -> str:
    """Returns the prompt, and what there is on standard input. Raises CommandFailed if both are empty."""
    given = prompt or ""
    if prompt is None or _is_fed():
        try:
            given = "\n\n".join(filter(None, (given, sys.stdin.read().strip())))
        except UnicodeDecodeError as error:
            raise CommandFailed(
                f"standard input: {error.reason} at byte {error.start}; text is right"
            ) from error
    if not given.strip():
        raise CommandFailed("the question is empty; PROMPT, or text on standard input, is right")
    return given


def _is_fed() -> bool:
    """Returns whether standard input is a pipe or a file, and neither a terminal nor nothing."""
    with suppress(OSError, ValueError, AttributeError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False


@models.default
def list_models(*, server: ApiOptions = THIS_SERVER) -> None:
    """List the models that a server serves.

    It tells the context length in tokens, the parent of an adapter, whether the weights are awake, if the
    server may be asked for that (it wants an admin key, which $KVLOOM_ADMIN_KEY may hold), and what the model
    is for: to generate, to embed or to score. A pipe gets a line for each model, whose parts are separated by
    tabs."""
    try:
        found = server.client().models()
    except GatewayError as error:
        raise CommandFailed(str(error)) from error
    awake = _awake(server)
    rows = [_row(one, awake.get(one.id)) for one in found]
    if sys.stdout.isatty():
        print_columns([_HEAD, *rows])
    else:
        for row in rows:
            print("\t".join(row))


def _row(one: ModelLine, awake: bool | None) -> tuple[str, ...]:
    return (
        printable(one.id),
        "-" if one.max_model_len is None else str(one.max_model_len),
        "-" if one.parent is None else printable(one.parent),
        "-" if awake is None else "awake" if awake else "asleep",
        printable(one.task),
    )


def _awake(server: ApiOptions) -> dict[str, bool]:
    """Returns whether each model's weights are awake at one unit or more, as the next sample has it; nothing
    if the server does not tell."""
    found: dict[str, bool] = {}
    with suppress(GatewayError, msgspec.MsgspecError):
        with closing(AdminClient(server.url, None, ca=server.ca).stream("live", silence=_SOON)) as events:
            taken = next((event for event in events if event.kind == "sample"), None)
        if taken is not None:
            for unit in msgspec.json.decode(taken.data, type=Sample).units:
                for one in unit.models:
                    found[one.model] = found.get(one.model, False) or one.awake
    return found
