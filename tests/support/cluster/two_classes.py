"""Streaming clients of two classes on one service: many in no hurry, and a few interactive ones whose first token shall come soon.

With one sequence at a time and fcfs an interactive request waits for everybody; under sla-aware it is next. That difference is one of
places in a queue, so it is there on any machine, fast or busy; only the target has to fit the machine (`calm_target_s`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from types import TracebackType
from typing import Any, Self

import httpx

Json = dict[str, Any]
INTERACTIVE = "interactive"
THINKING_S = 0.2  # of an interactive client between two requests
TOKENS = 4


class TwoClasses:
    """Runs between enter and exit, in a thread of its own. Nothing is retried; what goes wrong is in `failed`."""

    def __init__(self, url: str, *, patient: int = 32, interactive: int = 2, model: str = "tiny") -> None:
        """url: of the Service, without /v1."""
        self._url = f"{url}/v1/completions"
        self._model = model
        self._counts = (patient, interactive)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._done = threading.Event()
        self.first_tokens_s: list[float] = []  # of interactive requests, in order
        self.answered = 0
        self.failed: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(120)

    def calm_target_s(self, timeout_s: float = 120.0) -> float:
        """A third of what an interactive request waits now: missed by those that queue, kept by those that do not."""
        seen, deadline_s = len(self.first_tokens_s) + 4, time.monotonic() + timeout_s
        while len(self.first_tokens_s) < seen + 8:
            assert self.failed == [], self.failed
            assert time.monotonic() < deadline_s, f"{len(self.first_tokens_s)} interactive answers"
            time.sleep(0.1)
        return statistics.median(self.first_tokens_s[seen:]) / 3

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=90.0, trust_env=False) as client:
            patient, interactive = self._counts
            await asyncio.gather(
                *(self._client(client, None) for _ in range(patient)),
                *(self._client(client, INTERACTIVE) for _ in range(interactive)),
            )

    async def _client(self, client: httpx.AsyncClient, slo_class: str | None) -> None:
        while not self._done.is_set():
            try:
                first_s = await self._stream(client, slo_class)
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                self.failed.append(f"{slo_class}: {error!r}")
                await asyncio.sleep(1.0)
                continue
            self.answered += 1
            if slo_class is not None:
                self.first_tokens_s.append(first_s)
                await asyncio.sleep(THINKING_S)

    async def _stream(self, client: httpx.AsyncClient, slo_class: str | None) -> float:
        """One streamed completion → seconds to its first token."""
        body: Json = {
            "model": self._model,
            "prompt": "hello",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        if slo_class is not None:
            body["slo_class"] = slo_class
        began, first_s, finish = time.monotonic(), None, None
        async with client.stream("POST", self._url, json=body) as answer:
            assert answer.status_code == 200, (answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = time.monotonic() - began if first_s is None else first_s
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                finish = chunk["choices"][0]["finish_reason"] or finish
        assert finish == "length", f"ended by {finish}"
        assert first_s is not None
        return first_s
