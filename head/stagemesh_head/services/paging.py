"""Pages of a sorted list (AIP-158): an opaque token says after which name the next page starts."""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Sequence

from stagemesh.rpc.errors import invalid

DEFAULT_PAGE, LARGEST_PAGE = 100, 1_000


def page_of(names: Sequence[str], page_size: int, page_token: str) -> tuple[Sequence[str], str]:
    """The page of sorted, unique `names` that a request asks for, and the token of the next one ("" at the end).

    Because the token holds a name, rows that come and go between two pages make none appear twice.

    Raises:
        MeshError: INVALID_REQUEST, a negative size or a token that is not ours.
    """
    if page_size < 0:
        raise invalid("page_size", page_size, f"must be >= 0; 0 is {DEFAULT_PAGE}")
    size = min(page_size or DEFAULT_PAGE, LARGEST_PAGE)
    start = 0
    if page_token:
        try:
            after = base64.urlsafe_b64decode(page_token.encode()).decode()
        except (binascii.Error, ValueError):
            raise invalid("page_token", page_token, "is not a token of an earlier answer") from None
        start = bisect_right(names, after)
    page = names[start : start + size]
    has_more = start + size < len(names)
    return page, base64.urlsafe_b64encode(page[-1].encode()).decode() if has_more else ""
