"""The admin app, on its own port: live config, workload records, step-time model, facts, drain. The operator and the tuner talk to it.

Every route but `/metrics` needs a token when the server has a key file (`auth`). Errors carry path, value and allowed
range; nothing is changed then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trimtab_engine.errors import ConfigError, EngineDead, GenerationConflict, NotReady
from trimtab_engine.server import strict_json
from trimtab_engine.server.auth import AdminAuth, Forbidden, Scope, Unauthenticated
from trimtab_engine.server.ops import metrics_route
from trimtab_engine.server.state import AppState

Handler = Callable[[Request], Awaitable[Response]]
MAX_BODY_BYTES = 1 << 20
MAX_WORKLOAD_RECORDS = 5_000
MAX_HOLD_S = 60.0  # a lease: whoever wants more renews it


def create_admin_app(state: AppState, auth: AdminAuth | None) -> Starlette:
    """The app; `auth` None: open, for loopback."""

    def guarded(handler: Handler, scope: Scope) -> Handler:
        async def endpoint(request: Request) -> Response:
            try:
                if auth is not None:
                    auth.check(request.headers.get("authorization"), scope)
                elif "origin" in request.headers:
                    # An open port on loopback must not be a door for web pages in the same person's browser.
                    raise Forbidden("requests from web pages are not allowed without --admin-public-key")
                return await handler(request)
            except Unauthenticated as error:
                return _error(401, str(error), headers={"WWW-Authenticate": "Bearer"})
            except Forbidden as error:
                return _error(403, str(error))
            except ConfigError as error:
                return _error(400, str(error), path=error.path, value=error.value, allowed=error.allowed)
            except GenerationConflict as error:
                return _error(409, str(error), path="generation", readback=state.live.readback())
            except (EngineDead, NotReady) as error:
                return _error(503, str(error))

        return endpoint

    async def get_live_config(request: Request) -> Response:
        return JSONResponse(state.live.readback())

    async def put_live_config(request: Request) -> Response:
        status, body = await state.live.put(await _json_body(request))
        return JSONResponse(body, status_code=status)

    async def delete_candidate(request: Request) -> Response:
        status, body = await state.live.end_candidate()
        return JSONResponse(body, status_code=status)

    async def get_workload(request: Request) -> Response:
        since = _query_int(request, "since", 0, 0, 2**53)
        limit = _query_int(request, "limit", MAX_WORKLOAD_RECORDS, 1, MAX_WORKLOAD_RECORDS)
        return JSONResponse(state.workload.read(since, limit))

    async def get_step_model(request: Request) -> Response:
        news = state.client.step_model
        return JSONResponse({"model": news.model, "score": news.score})

    async def get_info(request: Request) -> Response:
        return JSONResponse(
            {**asdict(state.client.info), "engine_pid": state.client.pid, "version": version("trimtab")}
        )

    async def drain(request: Request) -> Response:
        state.lifecycle.leave()
        return JSONResponse(state.lifecycle.to_json(), status_code=202)

    async def hold(request: Request) -> Response:
        done = state.lifecycle.hold(_hold_s(await _json_body(request)))
        return JSONResponse(state.lifecycle.to_json(), status_code=200 if done else 409)

    async def lifecycle(request: Request) -> Response:
        return JSONResponse(state.lifecycle.to_json())

    return Starlette(
        routes=[
            Route("/admin/live-config", guarded(get_live_config, "read"), methods=["GET"]),
            Route("/admin/live-config", guarded(put_live_config, "write"), methods=["PUT"]),
            Route("/admin/live-config/candidate", guarded(delete_candidate, "write"), methods=["DELETE"]),
            Route("/admin/workload", guarded(get_workload, "read"), methods=["GET"]),
            Route("/admin/step-model", guarded(get_step_model, "read"), methods=["GET"]),
            Route("/admin/info", guarded(get_info, "read"), methods=["GET"]),
            Route("/admin/drain", guarded(drain, "write"), methods=["POST"]),
            Route("/admin/drain", guarded(hold, "write"), methods=["PUT"]),
            Route("/admin/drain", guarded(lifecycle, "read"), methods=["GET"]),
            metrics_route(state),
        ]
    )


def _error(
    status: int,
    message: str,
    *,
    headers: dict[str, str] | None = None,
    readback: object = None,
    **where: object,
) -> JSONResponse:
    error = {"path": None, "value": None, "allowed": None, **where, "message": message}
    body = {"error": error} if readback is None else {"error": error, "readback": readback}
    return JSONResponse(body, status_code=status, headers=headers)


async def _json_body(request: Request) -> object:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise ConfigError("body", f"more than {MAX_BODY_BYTES} bytes", f"at most {MAX_BODY_BYTES} bytes")
    try:
        return strict_json.decode(data)
    except ValueError as error:
        raise ConfigError("body", data[:80].decode(errors="replace"), f"JSON ({error})") from error


def _hold_s(body: object) -> float:
    value = body.get("hold_s") if isinstance(body, dict) and len(body) == 1 else body
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_HOLD_S:
        raise ConfigError("hold_s", value, f"seconds from 0 to {MAX_HOLD_S:g}, and nothing beside it")
    return float(value)


def _query_int(request: Request, name: str, default: int, low: int, high: int) -> int:
    raw = request.query_params.get(name)
    if raw is None:
        return default
    if not raw.isascii() or not raw.isdigit() or not low <= int(raw) <= high:
        raise ConfigError(f"query.{name}", raw, f"an integer from {low} to {high}")
    return int(raw)
