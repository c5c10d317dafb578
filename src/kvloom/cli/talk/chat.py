"""`kvloom chat`: a conversation with a model, typed in a terminal or read from a pipe."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

from cyclopts import App, Parameter

from kvloom.cli.app import CommandFailed, printable
from kvloom.cli.gateway import GatewayError
from kvloom.cli.talk.client import (
    BY_DEFAULT,
    CUT_OFF,
    THIS_SERVER,
    AnswerOptions,
    ApiClient,
    ApiOptions,
    Message,
    Piece,
)

chat = App(name="chat")
PROMPT: Final = "> "
MOST_LINES: Final = 1000  # in the file of lines that were typed
KEPT: Final = "\n\t"
HELP: Final = """\
/clear        forget the conversation
/system TEXT  set the system message, or take it away without TEXT
/exit         end, as Ctrl-D does
/help         show this
Ctrl-C ends an answer. A line that begins with a space is sent as it is."""

Model = Annotated[str | None, Parameter(help="a model that is served (the only one)")]


class Conversation:
    """A conversation with a model: what was said, and how it goes on."""

    def __init__(self, client: ApiClient, model: str, options: AnswerOptions) -> None:
        self._client = client
        self.model = model
        self.options = options
        self._said: list[Message] = []

    def clear(self) -> None:
        """Forgets what was said."""
        self._said.clear()

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Yields the answer as it comes. As much of it as came belongs to the conversation, without the
        thoughts, also if the iterator is closed before its end; if nothing came, the question does not,
        either. Raises GatewayError."""
        asked = Message("user", question)
        system = [Message("system", self.options.system)] if self.options.system else []
        came, finish = list[str](), None
        pieces = self._client.answer(self.model, [*system, *self._said, asked], self.options.parameters())
        try:
            with closing(pieces):
                for piece in pieces:
                    finish = piece.finish or finish
                    if piece.text:
                        came.append(piece.text)
                    yield piece
        finally:
            if came or finish:
                self._said += [asked, Message("assistant", "".join(came))]
        if finish == CUT_OFF:
            print("kvloom: the answer was cut off at its most tokens", file=sys.stderr)


def show_answer(answer: Iterable[Piece], *, thoughts: bool | None) -> None:
    """Prints an answer as it comes, and ends its last line if it comes to its end. In a terminal its thoughts
    stand before it, dimmed. If standard output is no terminal, it gets the answer alone, and thoughts go to
    standard error. `thoughts` tells whether they are shown; None shows them in a terminal alone. Raises
    GatewayError."""
    terminal = sys.stdout.isatty()
    shown = terminal if thoughts is None else thoughts
    aside = sys.stdout if terminal else sys.stderr
    dim, plain = ("\x1b[2m", "\x1b[22m") if aside.isatty() else ("", "")
    thinks = False
    try:
        for piece in answer:
            if shown and piece.thought:
                said = printable(piece.thought, KEPT) if aside.isatty() else piece.thought
                print("" if thinks else dim, said, sep="", end="", file=aside, flush=True)
                thinks = True
            if piece.text:
                if thinks:
                    print(plain, "\n\n", sep="", end="", file=aside, flush=True)
                    thinks = False
                said = printable(piece.text, KEPT) if terminal else piece.text
                print(said, end="", flush=True)
    finally:
        if thinks:
            print(plain, "" if terminal else "\n", sep="", end="", file=aside, flush=True)
    print(flush=True)


@chat.default
def talk(
    model: Model = None,
    /,
    *,
    answer: AnswerOptions = BY_DEFAULT,
    server: ApiOptions = THIS_SERVER,
) -> None:
    """Talk to a model in a terminal.

    Answers are shown as they come; Ctrl-C ends one, and Ctrl-D the conversation. Arrows bring back the lines
    of this conversation and of those before; /help tells what else can be typed. If input or output is no
    terminal, each line of input is asked in its turn, and only the answers are printed."""
    client = server.client(model)
    try:
        conversation = Conversation(client, client.chosen(model), answer)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _converse(conversation, client.url)
        else:
            _filter(conversation)
    except GatewayError as error:
        raise CommandFailed(str(error)) from error


def _filter(conversation: Conversation) -> None:
    """Asks each line of input that is not empty. Raises GatewayError."""
    for line in sys.stdin:
        if line.strip():
            show_answer(conversation.ask(line.rstrip("\n")), thoughts=conversation.options.thoughts)


def _converse(conversation: Conversation, url: str) -> None:
    """Asks what is typed until it is over."""
    print(f"{printable(conversation.model)} at {printable(url)}; /help shows what can be typed, Ctrl-D ends")
    with closing(_typed()) as lines:
        for line in lines:
            if line.startswith("/"):
                if line.split()[0] == "/exit":
                    return
                _obey(conversation, line)
            elif line.strip():
                _show(conversation, line.strip())


def _obey(conversation: Conversation, line: str) -> None:
    word, _, rest = line.partition(" ")
    if word == "/help":
        print(HELP)
    elif word == "/clear":
        conversation.clear()
        print("the conversation is forgotten")
    elif word == "/system":
        conversation.options = replace(conversation.options, system=rest.strip() or None)
        print("the system message is set" if rest.strip() else "there is no system message")
    else:
        print(f"there is no {printable(word)}; /help shows what there is")


def _show(conversation: Conversation, question: str) -> None:
    """Shows the answer to its end, or until Ctrl-C. An error is told, and the conversation goes on."""
    try:
        with closing(conversation.ask(question)) as answer:
            show_answer(answer, thoughts=conversation.options.thoughts)
    except KeyboardInterrupt:
        print()
    except GatewayError as error:
        print(f"\nkvloom: {printable(str(error))}", file=sys.stderr)


def _typed() -> Generator[str, None, None]:
    """Yields the lines that are typed until Ctrl-D, and keeps them for the next conversation. Ctrl-C begins a
    line anew."""
    file = _history_file()
    editor = _line_editor()
    if editor is not None:
        _recall(editor, file)
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if editor is not None and line.strip():
            _keep(editor, file)
        yield line


def _line_editor() -> ModuleType | None:
    """Returns what `input` edits lines with, once it is imported. Not every Python has it."""
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvloom" / "chat_history"


def _recall(editor: ModuleType, file: Path) -> None:
    """Reads the lines of before. A file that cannot be read or made is done without."""
    editor.set_history_length(MOST_LINES)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDONLY, 0o600))
        editor.read_history_file(file)


def _keep(editor: ModuleType, file: Path) -> None:
    with suppress(OSError, AttributeError):  # libedit, in readline's place, cannot append
        editor.append_history_file(1, file)
