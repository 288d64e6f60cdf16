"""What engines tell on their admin ports to whoever holds a read token: workload records, step-time model, facts.

Called by the evaluators that need recorded traffic (Simulator, Shadow), once, at the beginning of a run: tokens are good for an
hour. A pod that came later has no token; it is left out, and the caller is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from trimtab_tuner import bounded
from trimtab_tuner.cluster.pods import Pod
from trimtab_tuner.errors import InputError, ServerError

TIMEOUT_S = 30.0  # between two bytes
MAX_ANSWER_S = 120.0
PAGE = 5_000
MAX_PAGES = 20  # an engine's ring holds 20,000
#: Of one answer: a record of a prompt of 100,000 tokens names its prefix blocks in 0.2 MB.
MAX_BYTES = 64 * 2**20
_MOST = 2**53  # of any count

Json = dict[str, Any]


class NoToken(ServerError):
    """No read token for this pod."""


@dataclass(frozen=True, slots=True)
class Told:
    """One engine's account. `records` as in our trace format, oldest first; `model` None: nothing is fitted yet, `score` says how
    good it is. `dropped`: older records that it no longer has."""

    pod: Pod
    records: tuple[Json, ...]
    block_size: int
    model: Json | None
    info: Json
    score: Json = field(default_factory=dict)
    dropped: int = 0


def load_tokens(path: Path | None) -> Mapping[str, str]:
    """Read tokens by pod UID from the mounted file; none without a path. Raises InputError."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError("--tokens", str(path), f"a readable JSON file ({error})") from None
    if not isinstance(found, dict) or not all(isinstance(token, str) for token in found.values()):
        raise InputError("--tokens", str(path), "an object from pod UID to token")
    return found


class Records:
    """Reads admin ports. `client` carries no base URL."""

    def __init__(self, client: httpx.AsyncClient, tokens: Mapping[str, str]) -> None:
        self._client = client
        self._tokens = tokens

    def readable(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """Those of `pods` that there is a token for."""
        return tuple(pod for pod in pods if pod.uid in self._tokens)

    async def ask(self, pod: Pod) -> Told:
        """Everything that one engine tells. Raises NoToken, or ServerError naming pod and answer."""
        records: list[Json] = []
        since, block_size, dropped = 0, 16, 0
        for _ in range(MAX_PAGES):
            page = await self._get(pod, "/admin/workload", {"since": str(since), "limit": str(PAGE)})
            listed = page.get("records", [])
            if not isinstance(listed, list):
                raise ServerError(f"pod {pod.name}: /admin/workload: records: {listed!r:.80} is no list")
            records += [record for record in listed if isinstance(record, dict)]
            block_size = _count(pod, page, "block_size", block_size)
            dropped += _count(pod, page, "dropped", 0)
            following = _count(pod, page, "next", since)
            if following <= since or len(listed) < PAGE:
                break
            since = following
        fitted = await self._get(pod, "/admin/step-model")
        model, score = fitted.get("model"), fitted.get("score")
        return Told(pod, tuple(records), block_size, model if isinstance(model, dict) else None,
                    await self._get(pod, "/admin/info"), score if isinstance(score, dict) else {}, dropped)  # fmt: skip

    async def _get(self, pod: Pod, path: str, query: Mapping[str, str] | None = None) -> Json:
        token = self._tokens.get(pod.uid)
        if token is None:
            raise NoToken(f"pod {pod.name}: there is no read token for it; it came after the run's start")
        where = f"pod {pod.name}: GET {pod.admin_url}{path}"
        try:
            status, body = await bounded.get(
                self._client,
                pod.admin_url + path,
                max_bytes=MAX_BYTES,
                max_s=MAX_ANSWER_S,
                timeout_s=TIMEOUT_S,
                query=query,
                headers={"Authorization": f"Bearer {token}"},
            )
        except ServerError as error:
            raise ServerError(f"{where}: {error}") from None
        except (httpx.HTTPError, TimeoutError) as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from None
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise ServerError(f"{where}: HTTP {status}, no JSON") from None
        if status != 200 or not isinstance(document, dict):
            raise ServerError(f"{where}: HTTP {status}: {body[:200].decode(errors='replace')}")
        return document


def _count(pod: Pod, page: Json, name: str, default: int) -> int:
    value = page.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ServerError(f"pod {pod.name}: /admin/workload: {name}: {value!r:.80} is no count")
    return value
