"""Routes for whoever runs the server: `/health`, `/ready`, `/ping`, `/version`, `/metrics`. No key needed, no text inside."""

from __future__ import annotations

import time
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trimtab_engine.server.lifecycle import Phase
from trimtab_engine.server.metrics.exporter import CONTENT_TYPE
from trimtab_engine.server.state import AppState


def ops_routes(state: AppState) -> list[Route]:
    """All of them, for the serving port."""

    async def health(request: Request) -> Response:
        if state.lifecycle.phase is Phase.DEAD:
            return _unhealthy(f"engine dead: {state.lifecycle.reason}")
        stall = state.client.progress.stall(time.monotonic())
        if stall is not None:
            return _unhealthy(stall)
        return Response(status_code=200)

    async def ready(request: Request) -> Response:
        body = state.lifecycle.to_json()
        if state.lifecycle.ready:
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})

    async def ping(request: Request) -> Response:
        return Response(status_code=200)

    async def show_version(request: Request) -> Response:
        return JSONResponse({"version": version("trimtab")})

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/version", show_version),
        metrics_route(state),
    ]


def metrics_route(state: AppState) -> Route:
    """Prometheus exposition; stands on both ports."""

    async def metrics(request: Request) -> Response:
        return Response(await state.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return Route("/metrics", metrics)


def _unhealthy(reason: str) -> Response:
    return JSONResponse({"healthy": False, "reason": reason}, status_code=503)
