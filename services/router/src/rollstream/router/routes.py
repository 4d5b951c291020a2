"""What the router answers: an allow-list. Everything else of the engine, its admin routes above all, is unreachable."""

from __future__ import annotations

import re

from rollstream.router.errors import HTTPError

# Stateless OpenAI-style routes and the token route. Left out on purpose: /v1/load_lora_adapter and its opposite change
# the engine, /v1/responses/{id} lives on one replica only, /v1/realtime is a websocket.
FORWARDED: dict[bytes, tuple[bytes, ...]] = {
    b"/v1/models": (b"GET", b"HEAD"),
    b"/v1/chat/completions": (b"POST",),
    b"/v1/completions": (b"POST",),
    b"/v1/responses": (b"POST",),
    b"/v1/messages": (b"POST",),
    b"/v1/messages/count_tokens": (b"POST",),
    b"/v1/embeddings": (b"POST",),
    b"/v1/rerank": (b"POST",),
    b"/v1/score": (b"POST",),
    b"/v1/audio/transcriptions": (b"POST",),
    b"/v1/audio/translations": (b"POST",),
    b"/inference/v1/generate": (b"POST",),
}
# /v1/models/<id>: nothing in it that a server behind could read as another path.
_ONE_MODEL = re.compile(rb"/v1/models(/[A-Za-z0-9_@:-][A-Za-z0-9_@:.-]*)+")

OWN: dict[bytes, tuple[bytes, ...]] = {
    b"/health": (b"GET", b"HEAD"),
    b"/ready": (b"GET", b"HEAD"),
    b"/metrics": (b"GET", b"HEAD"),
    b"/replicas": (b"GET", b"HEAD"),
    b"/finish_session": (b"POST",),
}


def check(method: bytes, path: bytes) -> bool:
    """True when the request goes to a replica, False when the router answers itself.

    Raises:
        HTTPError: 404 for a path that is not in the list, 405 for another method.
    """
    methods = FORWARDED.get(path)
    if methods is not None:
        if method in methods:
            return True
    else:
        methods = OWN.get(path)
        if methods is not None:
            if method in methods:
                return False
        elif _ONE_MODEL.fullmatch(path):
            methods = (b"GET", b"HEAD")
            if method in methods:
                return True
    shown = path[:200].decode("ascii", "replace")
    if methods is None:
        raise HTTPError(404, "unknown_route", f"The router does not serve {shown}.")
    allowed = b", ".join(methods)
    message = f"{shown} takes {allowed.decode()}, not {method.decode('ascii', 'replace')}."
    raise HTTPError(405, "method_not_allowed", message, headers=((b"allow", allowed),))
