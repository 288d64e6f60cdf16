"""The runtime contract as a client: what the operator says to one engine's admin port.

Used by `reconcile` (push, read back) and `control` (leases, workload). A bare engine, a replica of ours and a pod answer
alike. Knows nothing of what the values mean.
"""

from __future__ import annotations

from typing import Any

import httpx

Json = dict[str, Any]
_TIMEOUT_S = 5.0


class EngineUnreachable(Exception):
    """No answer from the admin port, or none that can be understood."""


class EngineRefused(Exception):
    """The engine said no; `status` and `body` are its answer, and nothing was changed."""

    def __init__(self, status: int, body: Json) -> None:
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        super().__init__(str(message or f"HTTP {status}"))
        self.status = status
        self.body = body


class Engines:
    """All calls, over one connection pool."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def read_back(self, admin_url: str) -> Json:
        """Incumbent, candidate and config in force, as the engine has them."""
        return await self._call("GET", f"{admin_url}/admin/live-config")

    async def push(self, admin_url: str, document: Json) -> Json:
        """Offer a whole live document, with `lease_s` as a candidate → the engine's answer."""
        return await self._call("PUT", f"{admin_url}/admin/live-config", document)

    async def end_candidate(self, admin_url: str) -> Json:
        """Send the engine back to its incumbent."""
        return await self._call("DELETE", f"{admin_url}/admin/live-config/candidate")

    async def workload(self, admin_url: str, since: str | None, limit: int) -> Json:
        """Records of recent requests from a cursor on → {"records", "next", "dropped"}."""
        parameters: dict[str, str | int] = {"limit": limit}
        if since is not None:
            parameters["since"] = since
        return await self._call("GET", f"{admin_url}/admin/workload", parameters=parameters)

    async def _call(
        self, method: str, url: str, body: Json | None = None, parameters: dict[str, str | int] | None = None
    ) -> Json:
        try:
            answer = await self._client.request(method, url, json=body, params=parameters, timeout=_TIMEOUT_S)
            content = answer.json() if answer.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise EngineUnreachable(f"{url}: {error or type(error).__name__}") from error
        if not isinstance(content, dict):
            raise EngineUnreachable(f"{url}: the answer is not a JSON object")
        if answer.status_code >= 400:
            raise EngineRefused(answer.status_code, content)
        return content
