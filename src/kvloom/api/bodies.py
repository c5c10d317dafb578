"""Request bodies: bytes to what the schema says, or the error that names what is wrong."""

from __future__ import annotations

import logging
from typing import Final, TypeVar

import msgspec
from pydantic import ValidationError

from kvloom.api.errors import bad_parameter
from kvloom.api.schemas import GenerationBody
from kvloom.types.errors import BadRequest

log = logging.getLogger(__name__)

# A body of nothing but brackets takes forty times its size in memory once it is read.
MAX_CONTAINERS: Final = 200_000
MAX_QUOTES: Final = 1_000_000

B = TypeVar("B", bound=GenerationBody)


def parse(schema: type[B], raw: bytes) -> B:
    containers = raw.count(b"[") + raw.count(b"{") + raw.count(b'":')
    if containers > MAX_CONTAINERS or raw.count(b'"') > MAX_QUOTES:
        raise BadRequest(f"the request body has more than {MAX_CONTAINERS} lists, objects and fields")
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise bad_parameter(error) from None
    if log.isEnabledFor(logging.DEBUG):
        _log_unknown(schema, raw)
    return body


def _log_unknown(schema: type[B], raw: bytes) -> None:
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    unknown = sorted(fields.keys() - schema.model_fields.keys())
    if unknown:
        log.debug("ignored unknown fields: %s", ", ".join(unknown))
