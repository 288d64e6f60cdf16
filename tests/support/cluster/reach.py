"""HTTP calls to Services that may not be routed yet."""

from __future__ import annotations

import httpx


def get(url: str) -> httpx.Response | None:
    """GET; None while nothing listens there, or kube-proxy has not heard of it."""
    try:
        return httpx.get(url, timeout=10, trust_env=False)
    except httpx.ConnectError:
        return None
