"""Errors as OpenAI bodies: `{"error": {"message", "type", "param", "code"}}`, with the HTTP status that clients map.

Used by every route here and, through `install_error_handlers`, for what no route answers (unknown paths, wrong methods,
our own bugs). Knows nothing of requests or the engine.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trimtab_engine.errors import EngineDead, RequestError, TrimtabError, Unavailable

# Of a list of millions it looks at the first items only.
_repr = reprlib.Repr()
_repr.maxlist = _repr.maxdict = _repr.maxtuple = _repr.maxstring = _repr.maxother = _repr.maxlong = 100

# HTTP status → `type`, by the names of the openai client's exceptions.
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class HttpError(TrimtabError):
    """An answer that is neither a wrong parameter nor the engine's trouble: unknown model, missing key, too big a body."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class GenerationFailed(TrimtabError):
    """The engine gave up on one request (not a number in its logits, out of memory alone); others go on."""


def short(value: object) -> str:
    """A value for an error message: who sent a megabyte need not get it back."""
    text = _repr.repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def status_of(error: TrimtabError) -> int:
    """HTTP status of an error that may reach a client."""
    match error:
        case HttpError(status=status):
            return status
        case Unavailable():
            return error.http_status
        case RequestError():
            return 400
        case _:
            return 500


def body_of(error: TrimtabError) -> dict[str, object]:
    """The OpenAI body of an error; also the payload of a mid-stream error frame."""
    code = getattr(error, "code", None)
    if code is None and isinstance(error, EngineDead):
        code = "engine_dead"
    return error_body(status_of(error), str(error), param=getattr(error, "param", None), code=code)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """The body for a status and a message."""
    return {
        "error": {"message": message, "type": _TYPES.get(status, "APIError"), "param": param, "code": code}
    }


def error_response(error: TrimtabError) -> Response:
    """The HTTP answer to an error; 503 says when to come back."""
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Unavailable) else {}
    if isinstance(error, HttpError) and error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(body_of(error), status=status_of(error), headers=headers)


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(
        msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json"
    )


def install_error_handlers(app: FastAPI) -> None:
    """OpenAI bodies for everything that no route of ours answers."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this class alone"
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase}"
        return json_response(
            error_body(error.status_code, message), status=error.status_code, headers=error.headers
        )

    async def on_bug(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, so the server's log has the traceback.
        return json_response(error_body(500, "internal error; the server's log has the details"), status=500)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)
