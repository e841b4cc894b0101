"""Parses a request body into its type."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from mla_router.worker.server.errors import InvalidField, InvalidRequest, MissingField
from mla_router.worker.server.schema.choices import choices
from mla_router.worker.server.schema.unknown import unknown_fields

# The end of msgspec's message about a wrong type: "... - at `$.messages[0].role`".
_LOCATION = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)

MAX_SHOWN = 200  # characters of an unknown name

Request = TypeVar("Request", bound=msgspec.Struct)


def parse(body: bytes, decoder: msgspec.json.Decoder[Request]) -> tuple[Request, list[str]]:
    """Parses and type-checks a body. Returns it and its unknown fields, which are ignored. Raises InvalidRequest, which
    names the field."""
    if not body.strip():
        raise InvalidRequest("The body is empty; send a JSON object")
    try:
        ignored = unknown_fields(body, decoder.type)
        return decoder.decode(body), ignored
    except msgspec.ValidationError as error:
        location = _LOCATION.search(str(error))
        path = location["path"] if location else ""
        message = str(error)[: location.start()] if location else str(error)
        if missing := _MISSING.match(message):
            field = f"{path}.{missing['name']}" if path else missing["name"]
            raise MissingField(field) from None
        if unknown := _UNKNOWN.match(message):
            field = f"{path}.{unknown['name'][:MAX_SHOWN]}"
            raise InvalidField(field, "unknown field", code="unknown_parameter") from None
        if not path:
            raise InvalidRequest(f"The body has the wrong type: {message}") from None
        if known := choices(decoder.type, path):
            message += f"; one of {', '.join(known)}"
        raise InvalidField(path, message) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
