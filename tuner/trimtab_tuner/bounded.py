"""Reads HTTP answers of processes that nobody vouches for: none is longer, or takes longer, than its reader allows.

Called by `cluster.records` and `metrics.scrape`. A hostile engine must cost its own run at most, not the memory of whoever asks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from trimtab_tuner.errors import ServerError


async def get(
    client: httpx.AsyncClient,
    url: str,
    *,
    max_bytes: int,
    max_s: float,
    timeout_s: float,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """→ status and body. `max_s` for all of it, `timeout_s` between two bytes.

    Raises httpx.HTTPError, TimeoutError, and ServerError for a body that is longer than `max_bytes`, unpacked.
    """
    async with (
        asyncio.timeout(max_s),
        client.stream(
            "GET", url, params=dict(query or {}) or None, headers=dict(headers or {}), timeout=timeout_s
        ) as answer,
    ):
        read = bytearray()
        async for part in answer.aiter_bytes():
            read += part
            if len(read) > max_bytes:
                raise ServerError(f"the answer is longer than {max_bytes >> 20} MiB")
        return answer.status_code, bytes(read)
