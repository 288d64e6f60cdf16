"""The outermost middleware of the serving port: request ids, the count of what is in flight, the access log, the gate.

Pure ASGI: Starlette's BaseHTTPMiddleware would hide the client's disconnect from the routes. Knows nothing of OpenAI's
protocol but the shape of an error body.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab_engine.server.lifecycle import Phase
from trimtab_engine.server.state import AppState

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
PHASE_HEADER = b"x-trimtab-phase"
_QUIET = frozenset({"/health", "/ready", "/metrics", "/ping"})  # probes and scrapes would drown the rest


class AccessMiddleware:
    """Wraps the serving app. Sets `request.state.request_id`; answers /v1 itself until the model is loaded."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_start(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if self._state.lifecycle.going_away:
                    # The phase too: "close" alone also answers clients that asked for it.
                    phase = self._state.lifecycle.phase.value.encode()
                    headers += [(b"connection", b"close"), (PHASE_HEADER, phase)]
                message = {**message, "headers": headers}
            await send(message)

        self._state.num_http_requests += 1
        try:
            if scope["path"].startswith("/v1/") and (refusal := self._refusal()) is not None:
                await _refuse(send_start, *refusal)
            else:
                await self._app(scope, receive, send_start)
        finally:
            self._state.num_http_requests -= 1
            logger.log(
                logging.DEBUG if scope["path"] in _QUIET else logging.INFO,
                "request",
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "duration_s": round(time.monotonic() - started_s, 4),
                },
            )

    def _refusal(self) -> tuple[str, str] | None:
        """Why no route under /v1 can answer, as (code, message); draining is judged per request by the routes."""
        lifecycle = self._state.lifecycle
        if lifecycle.phase is Phase.DEAD:
            return "engine_dead", f"the engine is dead: {lifecycle.reason}"
        if not lifecycle.loaded:
            return "loading", f"the model is still loading ({lifecycle.stage}, {lifecycle.fraction:.0%})"
        return None


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return uuid.uuid4().hex


async def _refuse(send: Send, code: str, message: str) -> None:
    error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"2"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
