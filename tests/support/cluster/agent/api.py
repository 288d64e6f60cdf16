"""A small asynchronous client of the API server: raw JSON in and out, and watches.

Used by every other module of the agent. One connection pool per agent, authenticated by the admin's certificate.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

Json = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

_log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer other than 2xx; `status` is 0 when there was none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """`path` arguments are absolute (`/api/v1/pods`). Errors are ApiError; nothing is retried here."""

    def __init__(self, server: str, pki: Path) -> None:
        """server: https URL; pki: folder with ca.crt, admin.crt and admin.key."""
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        self._client = httpx.AsyncClient(
            base_url=server, verify=context, limits=limits, timeout=10.0, trust_env=False
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def get(self, path: str, **params: str) -> Json:
        """GET → the object."""
        return await self._call("GET", path, params=params)

    async def post(self, path: str, body: Json) -> Json:
        """POST → the created object."""
        return await self._call("POST", path, body)

    async def patch(self, path: str, body: Json, content_type: str = MERGE_PATCH) -> Json:
        """PATCH → the patched object."""
        return await self._call("PATCH", path, body, content_type)

    async def delete(self, path: str, body: Json) -> None:
        """DELETE with options."""
        await self._call("DELETE", path, body)

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Json:
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": content_type}
        try:
            answer = await self._client.request(method, path, content=content, headers=headers, params=params)
        except httpx.TransportError as error:
            raise ApiError(0, f"{method} {path}: {error!r}") from error
        if not answer.is_success:
            raise ApiError(answer.status_code, f"{method} {path}: {answer.status_code} {_message(answer)}")
        parsed: Json = answer.json()
        return parsed

    async def list_and_watch(self, path: str, **params: str) -> AsyncIterator[tuple[str, Json]]:
        """Endless events (ADDED, MODIFIED, DELETED, object), with SYNCED and the whole list before them and after every gap.

        `("SYNCED", {"items": […]})` is the complete truth of that moment; whatever is not in it is gone.
        """
        while True:
            try:
                listed = await self.get(path, **params)
                yield "SYNCED", listed
                version = listed["metadata"]["resourceVersion"]
                async for kind, item in self._watch(path, version, params):
                    yield kind, item
            except ApiError as error:
                _log.warning("watch of %s: %s; listing again", path, error)
                await asyncio.sleep(0.5)

    async def _watch(
        self, path: str, version: str, params: Mapping[str, str]
    ) -> AsyncIterator[tuple[str, Json]]:
        query = {**params, "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        timeout = httpx.Timeout(10.0, read=None)
        try:
            async with self._client.stream("GET", path, params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise ApiError(answer.status_code, _message(answer))
                async for line in answer.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":  # 410: the version is too old
                        raise ApiError(
                            int(event["object"].get("code", 0)), str(event["object"].get("message"))
                        )
                    if event["type"] != "BOOKMARK":
                        yield event["type"], event["object"]
        except httpx.TransportError as error:
            raise ApiError(0, repr(error)) from error


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("message"))
    except ValueError:
        return answer.text[:200]
