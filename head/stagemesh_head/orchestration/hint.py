"""What a routing policy is told of a request."""

from __future__ import annotations

from stagemesh_head.orchestration.plan import Plan
from stagemesh_head.routing.policies import RouteHint

PREFIX_CHARS = 256
PREFIX_TOKENS = 64


def hint_of(plan: Plan) -> RouteHint:
    """Session and prompt beginning; tenants with different cache salts share no prefix."""
    prompt = plan.request.prompt
    kind = prompt.WhichOneof("content")
    beginning = b""
    if kind == "text":
        beginning = prompt.text[:PREFIX_CHARS].encode()
    elif kind == "chat" and prompt.chat.messages:
        # The first message is the system prompt where there is one: what many requests share.
        beginning = prompt.chat.messages[0].content[:PREFIX_CHARS].encode()
    elif kind == "tokens":
        beginning = b" ".join(b"%d" % token for token in prompt.tokens.ids[:PREFIX_TOKENS])
    prefix = plan.request.cache_salt.encode() + b"\0" + beginning if beginning else b""
    return RouteHint(plan.request_id, plan.request.session_id, prefix)
