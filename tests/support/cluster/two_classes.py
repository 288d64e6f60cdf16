"""Clients of two classes on one service: many in no hurry, and a few interactive ones whose first token shall come soon.

With one sequence at a time and fcfs an interactive request waits for everybody; under sla-aware it is next. The many are as many as
keep a backlog of `BACKLOG_S` by the engines' own histogram: more where the machine is fast, fewer where others use it. So one target
lies between the two waits on any machine and at any time: below a backlog, and many requests' time long.

They are a process of their own (`python -m support.cluster.two_classes`), two lines of JSON a second to whoever started it: beside a
test's other threads they would be slower than the engines, which then have no backlog however many clients there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

Json = dict[str, Any]
INTERACTIVE = "interactive"
BACKLOG_S = 1.2  # what a request of those in no hurry waits for its first token, about
TARGET_S = 0.35  # of an interactive request
# Of an interactive client between two requests: long enough that they do not queue for one another under sla-aware.
THINKING_S = 1.0
# Whoever is in no hurry takes one answer, a longer one: an engine shall have more work with a request than its client.
TOKENS, PATIENT_TOKENS = 4, 8
LOOK_S = 1.0  # how often it is judged how many are enough
FEWEST = 24.0  # keep it where 30 requests a second are answered
HISTOGRAM = "trimtab_time_to_first_token_seconds"


class TwoClasses:
    """Runs between enter and exit, in a process of its own. Nothing is retried; what goes wrong is in `failed`."""

    def __init__(
        self,
        url: str,
        metrics: Sequence[str],
        *,
        patient: int = 200,
        interactive: int = 12,
        model: str = "tiny",
    ) -> None:
        """url: of the Service, without /v1. `metrics`: of every pod, the URL. `patient`: at most so many of those at once."""
        options = {
            "url": url,
            "metrics": metrics,
            "patient": patient,
            "interactive": interactive,
            "model": model,
        }
        self._command = [sys.executable, "-m", "support.cluster.two_classes", json.dumps(options)]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._clients = 0.0
        self.backlog_s = 0.0  # as last seen
        self.answered = 0
        self.failed: list[str] = []

    def __enter__(self) -> Self:
        tests = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": tests},
        )  # fmt: skip
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(120) == 0, "the clients' process failed"
        finally:
            self._process.kill()
            self._reader.join(10)

    def wait_backlog(self, timeout_s: float = 120.0) -> None:
        """Until the queue is there."""
        deadline_s = time.monotonic() + timeout_s
        while self.backlog_s < 0.8 * BACKLOG_S:
            assert self.failed == [], self.failed
            assert time.monotonic() < deadline_s, (
                f"{self.backlog_s:.2f} s of {BACKLOG_S} s with {self._clients:.0f} clients"
            )
            assert self._process.poll() is None, "the clients' process has ended"
            time.sleep(0.1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                told = json.loads(line)
                self.backlog_s, self._clients = told["backlog_s"], told["clients"]
                self.answered = told["answered"]
                self.failed.extend(told["failed"])


class Clients:
    """All of them, in the process of their own, until its input ends."""

    def __init__(self, url: str, metrics: Sequence[str], patient: int, interactive: int, model: str) -> None:
        """See `TwoClasses`."""
        self._url = f"{url}/v1/completions"
        self._metrics = metrics
        self._model = model
        self._counts = (patient, interactive)
        self._done = asyncio.Event()
        self._at_once = FEWEST  # of those in no hurry
        self._backlog_s = 0.0
        self._answered = 0
        self._failed: list[str] = []

    async def run(self) -> None:
        """Until the input ends."""
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        ended.add_done_callback(lambda _: self._done.set())
        telling = asyncio.create_task(self._tell())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=90.0, trust_env=False) as client:
            patient, interactive = self._counts
            await asyncio.gather(
                self._hold_backlog(client),
                *(self._client(client, None, number) for number in range(patient)),
                *(self._client(client, INTERACTIVE) for _ in range(interactive)),
            )
        await telling
        self._say()

    async def _tell(self) -> None:
        while not self._done.is_set():
            self._say()
            await asyncio.sleep(LOOK_S / 2)

    def _say(self) -> None:
        told = {"backlog_s": self._backlog_s, "clients": self._at_once, "answered": self._answered,
                "failed": self._failed}  # fmt: skip
        self._failed = []
        print(json.dumps(told), flush=True)

    async def _client(self, client: httpx.AsyncClient, slo_class: str | None, number: int = 0) -> None:
        """One request after another; the patient ones sit out while those before them are enough."""
        patient = slo_class is None
        while not self._done.is_set():
            if patient and number >= self._at_once:
                await asyncio.sleep(LOOK_S)
                continue
            try:
                await (self._ask(client) if patient else self._stream(client))
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                self._failed.append(f"{slo_class}: {error!r}")
                await asyncio.sleep(1.0)
                continue
            self._answered += 1
            if not patient:
                await asyncio.sleep(THINKING_S)

    async def _hold_backlog(self, client: httpx.AsyncClient) -> None:
        """The waits follow the number of clients by one backlog's time, so it is changed by the root of what is missing.

        Too long a backlog spoils nothing that anybody measures here, and too short a one all of it. So clients leave slowly: a worker
        that starts makes the machine slow for some seconds, and measures as soon as it is fast again.
        """
        waited_s, answers = 0.0, 0.0
        while not self._done.is_set():
            await asyncio.sleep(LOOK_S)
            try:
                until_s, until = await self._waits(client)
            except httpx.HTTPError as error:
                self._failed.append(f"metrics: {error!r}")
                continue
            if until > answers:
                self._backlog_s = (until_s - waited_s) / (until - answers)
                change = min(1.25, max(0.97, (BACKLOG_S / max(self._backlog_s, 1e-3)) ** 0.5))
                self._at_once = min(float(self._counts[0]), max(FEWEST, self._at_once * change))
            waited_s, answers = until_s, until

    async def _waits(self, client: httpx.AsyncClient) -> tuple[float, float]:
        """Of those in no hurry, by all engines: (seconds to the first token, how many had one), both since the engines' start."""
        sums = {"_sum": 0.0, "_count": 0.0}
        for url in self._metrics:
            families = text_string_to_metric_families((await client.get(url)).text)
            for sample in (sample for family in families for sample in family.samples):
                if sample.labels.get("slo_class") != INTERACTIVE:
                    name, _, part = sample.name.rpartition("_")
                    if name == HISTOGRAM and f"_{part}" in sums:
                        sums[f"_{part}"] += sample.value
        return sums["_sum"], sums["_count"]

    async def _ask(self, client: httpx.AsyncClient) -> None:
        """One completion of somebody in no hurry."""
        answer = await client.post(self._url, json=self._body(PATIENT_TOKENS))
        assert answer.status_code == 200, (answer.status_code, answer.text)
        finish = answer.json()["choices"][0]["finish_reason"]
        assert finish == "length", f"ended by {finish}"

    async def _stream(self, client: httpx.AsyncClient) -> None:
        """One interactive completion, streamed, whole."""
        body = self._body(TOKENS) | {"stream": True, "slo_class": INTERACTIVE}
        finish = None
        async with client.stream("POST", self._url, json=body) as answer:
            assert answer.status_code == 200, (answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                finish = chunk["choices"][0]["finish_reason"] or finish
        assert finish == "length", f"ended by {finish}"

    def _body(self, tokens: int) -> Json:
        return {"model": self._model, "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}


if __name__ == "__main__":
    asyncio.run(Clients(**json.loads(sys.argv[1])).run())
