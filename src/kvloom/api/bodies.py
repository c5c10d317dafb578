"""Request bodies: bytes to what the schema says, or the error that names what is wrong."""

from __future__ import annotations

import logging
from typing import TypeVar

from pydantic import ValidationError

from kvloom.api.errors import bad_parameter
from kvloom.api.schemas import GenerationBody

log = logging.getLogger(__name__)

B = TypeVar("B", bound=GenerationBody)


def parse(schema: type[B], raw: bytes) -> B:
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise bad_parameter(error) from None
    if body.model_extra and log.isEnabledFor(logging.DEBUG):
        log.debug("ignored unknown fields: %s", ", ".join(sorted(body.model_extra)))
    return body
