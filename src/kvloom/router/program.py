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

from kvloom.router.call import Call, Frames
from kvloom.router.fleet import Fleet
from kvloom.router.programs import PROGRAMS
from kvloom.router.wanted import wanted
from kvloom.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    function: Callable[..., Frames]
    options: Mapping[str, Any]

    def __call__(self, call: Call, fleet: Fleet) -> Frames:
        return self.function(call, fleet, **self.options)


def load_program(name: str, options: Mapping[str, Any] | None = None) -> Program:
    """`name` is a shipped program's, or `my_module:my_program`. Raises ConfigError of one line.

    A module of one's own is read anew each time, so that an edited one counts; requests in flight keep
    what they began with.
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
    """The module; what is installed does not change while serving, nor does what runs here."""
    own = __name__.partition(".")[0]
    importlib.invalidate_caches()
    known = sys.modules.get(name)
    file = getattr(known, "__file__", None)
    installed = file and any(Path(file).is_relative_to(home) for home in (sys.prefix, sys.base_prefix))
    if file and not installed and name.partition(".")[0] != own:
        del sys.modules[name]
    return importlib.import_module(name)


def _checked(name: str, function: Callable[..., Frames], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as their types say; those left out keep the program's defaults."""
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
    """Of the options alone: those of `call` and `fleet` may exist for type checkers only."""
    told = {key: value for key, value in function.__annotations__.items() if key in options}
    try:
        return get_type_hints(
            SimpleNamespace(__annotations__=told), globalns=function.__globals__, include_extras=True
        )
    except NameError as error:
        raise ConfigError(f"program: {name}: the type of an option is unknown: {error}") from error


def _convert(name: str, option: str, value: Any, kind: Any) -> Any:
    """Text becomes a number where one is wanted, as the command line has nothing else."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        right = wanted(kind)
        said = f"{reprlib.repr(value)}; {right} is right" if right else str(error)
        raise ConfigError(f"program: {name}: option {option}: {said}") from error
