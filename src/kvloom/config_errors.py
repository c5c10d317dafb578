"""What pydantic found wrong, as one line for a person."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_WANTED: Final = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "path_type": "a path",
    "dict_type": "a mapping of keys to values",
    "too_short": "at least one",
    "string_too_short": "a text",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "tuple_type": "a list",
}
_SECTIONS: Final = {
    "ModelConfig": "a path, a hub id or a mapping with `path`",
    "UnitConfig": "a mapping with `models`",
    "ReplicasConfig": "a number, or a mapping with `least` and `most`,",
    "ReschedulingConfig": "a mapping with `period`, `out` or `into`, or `none`,",
    "SharesConfig": "a mapping with `prefill`, `decode` or `quota`",
    "NodesConfig": "a mapping with `device` and `gpus`",
    "DemandConfig": "a mapping with `shape` or `path`",
}
_NEEDED: Final = {
    ("models", "models"): "; at least one `NAME: PATH_OR_HUB_ID` is needed",
    ("units", "models"): "; a list of models' names is needed",
}


def explain(error: ValidationError, root: type[BaseModel], origin: Mapping[str, str]) -> str:
    """The first error, and how many more there are. A key that nobody knows comes before all others, of which
    it may be the reason."""
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    where = [str(part) for part in found[0]["loc"]]
    if where and where[0] in origin:
        where[0] = origin[where[0]]
    key = ".".join(where)
    line = f"{key}: {_reason(found[0], root)}" if key else _reason(found[0], root)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return " ".join((line + more).split())


def nearest(key: str, known: Sequence[str]) -> str:
    """`; did you mean …?` or the whole list."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"known are {', '.join(known)}"


def _reason(error: ErrorDetails, root: type[BaseModel]) -> str:
    kind, where, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(str(where[-1]), _keys(root, where))}"
    if kind == "missing":
        return "is missing" + _NEEDED.get((str(where[0]), str(where[-1])), "")
    if kind == "model_type":
        return f"{_show(error.get('input'))}; {_SECTIONS.get(context['class_name'], 'a mapping')} is right"
    if kind == "value_error":
        return str(context["error"])
    wanted = _WANTED.get(kind)
    said = f"{wanted.format(**context)} is right" if wanted else error["msg"][0].lower() + error["msg"][1:]
    return f"{_show(error.get('input'))}; {said}"


def _keys(root: type[BaseModel], where: Sequence[int | str]) -> list[str]:
    """The keys that are known where an unknown one was found: of the innermost section on the way to it."""
    sections = [root]
    for part in where[:-1]:
        fields = [section.model_fields[str(part)] for section in sections if part in section.model_fields]
        sections = [inner for field in fields for inner in _sections(field.annotation)] or sections
    return [key for section in sections for key in section.model_fields]


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names, at whatever depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _show(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
