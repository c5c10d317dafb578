"""What a program's option may be, in words."""

from __future__ import annotations

from typing import Any

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


def wanted(kind: Any) -> str:
    """`a number from 0 to 1`, `a whole number of 1 or more`; empty for a type that has no such words. None is
    what an option is that is left out, and so is no word of it."""
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
