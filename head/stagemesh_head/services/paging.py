"""Pages of a list: sizes and opaque tokens."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from stagemesh.rpc.errors import invalid

DEFAULT_SIZE, MAX_SIZE, MAX_TOKEN_CHARS = 100, 1_000, 2_000
Item = TypeVar("Item")


def page_of(
    items: Iterable[Item], key: Callable[[Item], list[Any]], page_size: int, page_token: str
) -> tuple[list[Item], str]:
    """One page of `items` in order of `key`, and the token of the next one; empty at the end.

    A token holds the key of the last item, so that rows that come and go between pages make none repeat.

    Args:
        key: strings and numbers that make an item unique; they go into the token as JSON.

    Raises:
        MeshError: INVALID_REQUEST for a negative size or a token that is none.
    """
    if page_size < 0:
        raise invalid("page_size", page_size, "must not be negative; 0 is 100")
    size = min(page_size or DEFAULT_SIZE, MAX_SIZE)
    keyed = sorted(((key(item), item) for item in items), key=lambda pair: pair[0])
    if page_token:
        last = _decode(page_token)
        try:
            keyed = [pair for pair in keyed if pair[0] > last]
        except TypeError:
            raise invalid("page_token", page_token, "is not a token of this list") from None
    page = keyed[:size]
    return [item for _, item in page], _encode(page[-1][0]) if len(keyed) > size else ""


def _encode(key: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(key, separators=(",", ":")).encode()).decode()


def _decode(token: str) -> list[Any]:
    try:
        if len(token) > MAX_TOKEN_CHARS:
            raise ValueError
        key = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
        if not isinstance(key, list):
            raise ValueError
    except (ValueError, binascii.Error, RecursionError):
        raise invalid("page_token", token, "is not a token of this list") from None
    return key
