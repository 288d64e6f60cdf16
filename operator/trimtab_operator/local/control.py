"""The control port of a local service: the engine's runtime contract, spoken for the whole service.

Served by `main` on the loopback. Same routes, bodies and status codes as an engine's admin port, so that the tuner works
against either; on top of them `/status`, `/metrics/targets`, `/metrics/http-sd` and the recommendation. What is decided is decided in
`service`; here is only HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Json = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
MAX_BODY_BYTES = 1 << 20
MAX_WORKLOAD_RECORDS = 5_000


class ControlError(Exception):
    """An answer other than success. Nothing was changed. `path` is dotted, `allowed` says what would be right."""

    def __init__(
        self,
        status: int,
        message: str,
        path: str | None = None,
        value: object = None,
        allowed: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: Json = {"error": {"path": path, "value": value, "allowed": allowed, "message": message}}


class Controlled(Protocol):
    """What the port needs of a service. Methods with a body return (HTTP status, body) and raise ControlError."""

    def status(self) -> Json:
        """Body of `/status`."""

    def metrics_targets(self) -> list[str]:
        """URLs of the replicas' `/metrics`."""

    async def read_back(self) -> Json:
        """Body of `GET /admin/live-config`."""

    async def put_live(self, document: Json) -> tuple[int, Json]:
        """A candidate (with `lease_s`) or a recommendation."""

    async def end_candidate(self) -> tuple[int, Json]:
        """Back to the incumbent."""

    async def recommend(self, document: Json) -> tuple[int, Json]:
        """Promote values over the spec's."""

    async def withdraw_recommendation(self) -> tuple[int, Json]:
        """Back to the spec's values."""

    async def workload(self, since: str | None, limit: int) -> Json:
        """Merged records of recent requests."""


def create_control_app(service: Controlled) -> Starlette:
    """The app, open: it belongs on the loopback."""

    def guarded(handler: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            if "origin" in request.headers:
                # An open port on the loopback must not be a door for web pages in the same person's browser.
                return JSONResponse(
                    ControlError(403, "requests from web pages are not allowed").body, status_code=403
                )
            try:
                return await handler(request)
            except ControlError as error:
                return JSONResponse(error.body, status_code=error.status)

        return endpoint

    async def status(request: Request) -> Response:
        return JSONResponse(service.status())

    async def targets(request: Request) -> Response:
        return JSONResponse(service.metrics_targets())

    async def discovery(request: Request) -> Response:
        # Prometheus' http_sd_configs: replicas take free ports, and others when they are replaced.
        hosts = [
            target.removeprefix("http://").removesuffix("/metrics") for target in service.metrics_targets()
        ]
        labels = {"service": str(service.status()["name"])}
        return JSONResponse([{"targets": hosts, "labels": labels}] if hosts else [])

    async def index(request: Request) -> Response:
        return JSONResponse({"routes": [f"{method} {path}" for path, _, method in table]})

    async def get_live(request: Request) -> Response:
        return JSONResponse(await service.read_back())

    async def put_live(request: Request) -> Response:
        code, body = await service.put_live(await _json_body(request))
        return JSONResponse(body, status_code=code)

    async def delete_candidate(request: Request) -> Response:
        code, body = await service.end_candidate()
        return JSONResponse(body, status_code=code)

    async def put_recommendation(request: Request) -> Response:
        code, body = await service.recommend(await _json_body(request))
        return JSONResponse(body, status_code=code)

    async def delete_recommendation(request: Request) -> Response:
        code, body = await service.withdraw_recommendation()
        return JSONResponse(body, status_code=code)

    async def workload(request: Request) -> Response:
        raw = request.query_params.get("limit", str(MAX_WORKLOAD_RECORDS))
        if not raw.isascii() or not raw.isdigit() or not 1 <= int(raw) <= MAX_WORKLOAD_RECORDS:
            allowed = f"an integer from 1 to {MAX_WORKLOAD_RECORDS}"
            raise ControlError(
                400, f"query.limit: {raw!r} is not allowed; {allowed}", "query.limit", raw, allowed
            )
        return JSONResponse(await service.workload(request.query_params.get("since"), int(raw)))

    table: list[tuple[str, Handler, str]] = [
        ("/", index, "GET"),
        ("/status", status, "GET"),
        ("/metrics/targets", targets, "GET"),
        ("/metrics/http-sd", discovery, "GET"),
        ("/admin/live-config", get_live, "GET"),
        ("/admin/live-config", put_live, "PUT"),
        ("/admin/live-config/candidate", delete_candidate, "DELETE"),
        ("/admin/recommendation", put_recommendation, "PUT"),
        ("/admin/recommendation", delete_recommendation, "DELETE"),
        ("/admin/workload", workload, "GET"),
    ]
    return Starlette(
        routes=[Route(path, guarded(handler), methods=[method]) for path, handler, method in table]
    )


async def _json_body(request: Request) -> Json:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise ControlError(
                400, f"the body is longer than {MAX_BODY_BYTES} bytes", "body", None, "a shorter body"
            )
    try:
        # Python's own reader takes NaN, Infinity and half surrogate pairs, which cannot be answered or compared.
        content = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(
            400, f"body: not JSON ({error})", "body", data[:80].decode(errors="replace"), "JSON"
        ) from error
    if not isinstance(content, dict):
        raise ControlError(400, "body: not a JSON object", "body", content, "a JSON object")
    return content
