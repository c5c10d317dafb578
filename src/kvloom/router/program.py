"""A program: what the router does with a request, as an async generator over the verbs, with its options."""

from __future__ import annotations

import importlib
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

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

from kvloom.router.programs import PROGRAMS
from kvloom.router.replicas import Fleet
from kvloom.router.session import Session
from kvloom.types.client import Frames
from kvloom.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its options, as the router begins it for each request."""

    name: str
    function: Callable[..., Frames]
    options: Mapping[str, Any]

    def __call__(self, call: Session, fleet: Fleet) -> Frames:
        return self.function(call, fleet, **self.options)


def load_program(name: str, options: Mapping[str, Any] | None = None) -> Program:
    """Returns the shipped program of that name, or the one that `my_module:my_program` names. Raises
    ConfigError of one line.

    A user's module is read anew each time, so that an edited one counts; requests in flight keep what they
    began with.
    """
    function = PROGRAMS[name] if name in PROGRAMS else _imported(name)
    if not inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"program: {name} is no async generator function; `async def` with a `yield` is right"
        )
    return Program(name, function, _checked(name, function, options or {}))


def _imported(name: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        known = ", ".join(PROGRAMS)
        raise ConfigError(f"program: {name!r} is not known; {known}, or `my_module:my_program` is right")
    try:
        module = _read_anew(module_name)
    except (Exception, SystemExit) as error:  # somebody else's code, which may raise anything
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"program: {module_name} cannot be imported: {problem}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"program: {module_name} has no {attribute}")
    return getattr(module, attribute)


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
    more`; empty for a type that has no such words. None is what an option is that is left out, and so is no
    word of it."""
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
