"""A program: what the router does with a request, as an async generator over the verbs, with its options."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    NoneType,
    StrType,
    Type,
    UnionType,
    VarTupleType,
)

from kvloom.router.programs import PROGRAMS, name_problem
from kvloom.router.replicas import Fleet
from kvloom.router.session import Session
from kvloom.types.client import Frames
from kvloom.types.errors import ConfigError, KvloomError
from kvloom.types.request import Event

_EVENTS: Final = get_args(Event)
_log = logging.getLogger(__name__)


class ProgramFailed(KvloomError):
    """A program has raised what no program should raise, or yielded what is no frame."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its options, as the router begins it for each request."""

    name: str
    function: Callable[..., Frames]
    options: Mapping[str, Any]

    def __call__(self, call: Session, fleet: Fleet) -> Frames:
        """Begins the program for a request. Raises ProgramFailed."""
        return ProgramStream(self, call, fleet)


class ProgramStream:
    """Yields what a program makes of one request. The program is somebody's code, and may raise whatever it
    likes: SystemExit, or a CancelledError of its own making. That must end neither the gateway nor the
    streams of others, so all that is no KvloomError becomes ProgramFailed, unless the request itself was
    cancelled."""

    __slots__ = ("_frames", "_program", "_request")

    def __init__(self, program: Program, call: Session, fleet: Fleet) -> None:
        """Raises ProgramFailed."""
        self._program = program.name
        self._request = call.name
        try:
            self._frames = program.function(call, fleet, **program.options)
        except BaseException as error:
            if (failed := self._failed(error)) is None:
                raise
            raise failed from error

    def __aiter__(self) -> ProgramStream:
        return self

    async def __anext__(self) -> list[Event]:
        try:
            frame = await anext(self._frames)
        except StopAsyncIteration:
            raise
        except BaseException as error:
            if (failed := self._failed(error)) is None:
                raise
            raise failed from error
        if isinstance(frame, list):
            for event in frame:  # A loop, because this runs for each token.
                if not isinstance(event, _EVENTS):
                    break
            else:
                return frame
        raise ProgramFailed(
            f"the program {self._program} yielded what is no list of events; "
            "the frames of `start_generate` are right"
        )

    async def aclose(self) -> None:
        """Closes the program. If it fails over that, nobody is left to be told but the log."""
        try:
            await self._frames.aclose()
        except BaseException as error:
            if self._failed(error) is None:
                raise

    def _failed(self, error: BaseException) -> ProgramFailed | None:
        """Returns the error with which the request fails; None if the given one may go on as it is."""
        task = asyncio.current_task()
        cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
        if cancelled or isinstance(error, KvloomError):
            return None
        name = self._program
        _log.error("request %s: the program %s failed", self._request, name, exc_info=error)
        return ProgramFailed(f"the program {name} failed with {type(error).__name__}; the log says why")


def load_program(name: str, options: Mapping[str, Any] | None = None) -> Program:
    """Returns the shipped program of that name, or the one that `my_module:my_program` names. Raises
    ConfigError of one line.

    A user's module is read anew each time, so that an edited one counts; requests in flight keep what they
    began with.
    """
    try:
        return _loaded(name, options or {})
    except ConfigError:
        raise
    except BaseException as error:  # somebody else's code, which may raise anything
        raise ConfigError(f"program: {name} cannot be loaded: {_told(error)}") from error


def _loaded(name: str, options: Mapping[str, Any]) -> Program:
    function = PROGRAMS[name] if name in PROGRAMS else _imported(name)
    if not inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"program: {name} is no async generator function; `async def` with a `yield` is right"
        )
    return Program(name, function, _checked(name, function, options))


def _imported(name: str) -> Any:
    if problem := name_problem(name):
        raise ConfigError(f"program: {problem}")
    module_name, _, attribute = name.partition(":")
    try:
        module = _read_anew(module_name)
    except BaseException as error:
        raise ConfigError(f"program: {module_name} cannot be imported: {_told(error)}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"program: {module_name} has no {attribute}")
    return getattr(module, attribute)


def _told(error: BaseException) -> str:
    """Returns an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _read_anew(name: str) -> ModuleType:
    """Returns the module, read anew unless it is installed or our own: these do not change while serving."""
    own = __name__.partition(".")[0]
    importlib.invalidate_caches()
    known = sys.modules.get(name)
    file = getattr(known, "__file__", None)
    installed = file and any(Path(file).is_relative_to(home) for home in (sys.prefix, sys.base_prefix))
    if file and not installed and name.partition(".")[0] != own:
        del sys.modules[name]
    return importlib.import_module(name)


def _checked(name: str, function: Callable[..., Frames], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options, converted as their types say; those left out keep the program's defaults."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())
    if [parameter.kind in kinds for parameter in parameters[:2]] != [True, True]:
        raise ConfigError(
            f"program: {name} takes other arguments; `program(call, fleet, *, option=1)` is right"
        )
    known = {parameter.name: parameter for parameter in parameters[2:]}
    unknown = [option for option in given if option not in known]
    if unknown:
        raise ConfigError(f"program: {name} has no option {unknown[0]}; it has {', '.join(known) or 'none'}")
    missing = [one.name for one in known.values() if one.default is one.empty and one.name not in given]
    if missing:
        raise ConfigError(f"program: {name} needs the option {missing[0]}")
    types = _types(name, function, known)
    return {option: _convert(name, option, value, types.get(option, Any)) for option, value in given.items()}


def _types(name: str, function: Callable[..., Frames], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the types of the options alone: those of `call` and `fleet` may exist for checkers only."""
    told = {key: value for key, value in function.__annotations__.items() if key in options}
    try:
        return get_type_hints(
            SimpleNamespace(__annotations__=told), globalns=function.__globals__, include_extras=True
        )
    except NameError as error:
        raise ConfigError(f"program: {name}: the type of an option is unknown: {error}") from error


def _convert(name: str, option: str, value: Any, kind: Any) -> Any:
    """Returns the value as its type wants it. Text becomes a number, as the command line has nothing else."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        right = _wanted(kind)
        said = f"{reprlib.repr(value)}; {right} is right" if right else str(error)
        raise ConfigError(f"program: {name}: option {option}: {said}") from error


def _wanted(kind: Any) -> str:
    """Returns what an option of that type may be, in words: `a number from 0 to 1`, `a whole number of 1 or
    more`; empty for a type that has no such words. None means that an option is left out, and no word is said
    of it."""
    try:
        return " or ".join(_words(msgspec.inspect.type_info(kind)))
    except (TypeError, LookupError):  # a type that is not msgspec's, or one without words
        return ""


def _words(kind: Type) -> list[str]:
    if isinstance(kind, UnionType):
        return [word for one in kind.types if not isinstance(one, NoneType) for word in _words(one)]
    if isinstance(kind, LiteralType):
        return [f"{value!r}" for value in kind.values]
    if isinstance(kind, IntType | FloatType):
        bounds = _bounds(kind)
        return [
            ("a whole number" if isinstance(kind, IntType) else "a number") + (f" {bounds}" if bounds else "")
        ]
    if isinstance(kind, ListType | VarTupleType) and isinstance(kind.item_type, StrType):
        return ["a list of texts"]
    return [{StrType: "a text", BoolType: "true or false"}[type(kind)]]


def _bounds(kind: IntType | FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f"from {kind.ge:g} to {kind.le:g}"
    ends = [
        ("of {:g} or more", kind.ge),
        ("above {:g}", kind.gt),
        ("of {:g} or less", kind.le),
        ("below {:g}", kind.lt),
    ]
    return " and ".join(words.format(end) for words, end in ends if end is not None)
