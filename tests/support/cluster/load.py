"""Clients that load a Service while a test does something to its pods, and an account of every single request.

Raw httpx without retries, a new connection for each request, so that each one is routed anew and nothing is hidden: short streams
one after another, and long ones that outlast a pod's farewell. A request is *served* (the whole stream, to its last token), *refused*
(no connection, or 503 with Retry-After, before anything else) or *lost*: accepted, and not answered to the end.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import httpx

WAIT_S = 90.0  # for answers on a busy machine
END_S = 180.0  # for the last long streams
_PAUSE_S = 0.1
_TIMEOUT = httpx.Timeout(60.0)
_UNPOOLED = httpx.Limits(max_connections=None, max_keepalive_connections=0)

Kind = Literal["served", "refused", "lost"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Times are monotonic seconds."""

    kind: Kind
    is_long: bool
    began_s: float
    ended_s: float
    longest_gap_s: float = 0.0  # between two pieces of the stream
    detail: str = ""

    @property
    def took_s(self) -> float:
        """From sending it to its end."""
        return self.ended_s - self.began_s


class Load:
    """Load between enter and exit; `answers` is complete after the exit, when every request has ended."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "tiny",
        short_clients: int = 2,
        long_clients: int = 2,
        short_tokens: int = 8,
        long_tokens: int = 4000,
        api_key: str | None = None,
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._model = model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._flowing: set[int] = set()  # long clients whose stream has begun
        self.answers: list[Answer] = []
        sizes = [(False, short_tokens)] * short_clients + [(True, long_tokens)] * long_clients
        self._num_long = long_clients
        self._threads = [
            threading.Thread(target=self._client, args=(number, is_long, tokens), daemon=True)
            for number, (is_long, tokens) in enumerate(sizes)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        deadline_s = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a request did not end"

    # While it runs

    def wait_served(self, count: int = 10) -> None:
        """Until `count` further short requests have been served, and every long client is in the middle of a stream."""
        before = self._num_served_short()
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._num_served_short() >= before + count and len(self._flowing) == self._num_long,
                WAIT_S,
            )
        assert arrived, f"no {count} requests were served in {WAIT_S:.0f} s: {self.summary()}"

    def wait_refused(self) -> None:
        """Until one more request has been refused."""
        before = len(self.of_kind("refused"))
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.of_kind("refused")) > before, WAIT_S)
        assert arrived, f"nothing was refused in {WAIT_S:.0f} s: {self.summary()}"

    def stop_asking(self) -> None:
        """No further requests; those under way go on."""
        self._stopping.set()

    # Afterwards

    def of_kind(self, kind: Kind) -> list[Answer]:
        """Answers of one kind, in the order in which they ended."""
        return [answer for answer in self.answers if answer.kind == kind]

    @property
    def failed(self) -> list[Answer]:
        """Refused and lost ones."""
        return [answer for answer in self.answers if answer.kind != "served"]

    def gap_s(self) -> float:
        """From the first refused request to the first one after the last refusal that was served; 0 without refusals."""
        refused = self.of_kind("refused")
        if not refused:
            return 0.0
        first, last = min(a.began_s for a in refused), max(a.began_s for a in refused)
        again = [a.began_s for a in self.of_kind("served") if a.began_s > last]
        assert again, "nothing was served after the last refusal"
        return min(again) - first

    def summary(self) -> str:
        """For failure messages and figures."""
        counts = Counter(answer.kind for answer in self.answers)
        bad = Counter(answer.detail for answer in self.failed)
        return f"{dict(counts)} {dict(bad.most_common(5))}" if bad else f"{dict(counts)}"

    # Clients

    def _num_served_short(self) -> int:
        return sum(answer.kind == "served" and not answer.is_long for answer in self.answers)

    def _client(self, number: int, is_long: bool, tokens: int) -> None:
        with httpx.Client(
            limits=_UNPOOLED, timeout=_TIMEOUT, trust_env=False, headers=self._headers
        ) as client:
            while not self._stopping.is_set():
                answer = self._request(client, number, is_long, tokens)
                with self._changed:
                    self._flowing.discard(number)
                    self.answers.append(answer)
                    self._changed.notify_all()
                self._stopping.wait(_PAUSE_S)

    def _request(self, client: httpx.Client, number: int, is_long: bool, tokens: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": f"Client {number} asks about the sea",
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = time.monotonic()
        connected = False
        stream = _Stream()
        try:
            with client.stream("POST", self._url, json=body) as response:
                connected = True
                if response.status_code != 200:
                    response.read()
                    refused = response.status_code == 503 and "retry-after" in response.headers
                    detail = f"{response.status_code} {response.text[:200]}"
                    return Answer(
                        "refused" if refused else "lost", is_long, began_s, time.monotonic(), detail=detail
                    )
                for line in response.iter_lines():
                    stream.line(line)
                    if is_long and stream.num_pieces == 1:
                        with self._changed:
                            self._flowing.add(number)
                            self._changed.notify_all()
        except httpx.ConnectError as error:
            assert not connected
            return Answer("refused", is_long, began_s, time.monotonic(), detail=repr(error))
        except httpx.HTTPError as error:
            return Answer("lost", is_long, began_s, time.monotonic(), stream.longest_gap_s, repr(error))
        problem = stream.problem(tokens)
        return Answer(
            "served" if problem is None else "lost",
            is_long,
            began_s,
            time.monotonic(),
            stream.longest_gap_s,
            problem or "",
        )


class _Stream:
    """One stream of server-sent events, as far as it has come."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self.longest_gap_s = 0.0
        self._last_s: float | None = None
        self._usage: dict[str, Any] | None = None
        self._error: object = None
        self._is_done = False

    def line(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        now_s = time.monotonic()
        if self._last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.num_pieces += 1
        if line == "data: [DONE]":
            self._is_done = True
            return
        chunk = json.loads(line.removeprefix("data: "))
        self._error = chunk.get("error", self._error)
        self._usage = chunk.get("usage") or self._usage

    def problem(self, tokens: int) -> str | None:
        """What is missing of a whole stream of `tokens` tokens."""
        if self._error is not None:
            return f"error in the stream: {self._error}"
        if not self._is_done:
            return f"the stream ended after {self.num_pieces} pieces without [DONE]"
        came = (self._usage or {}).get("completion_tokens")
        return None if came == tokens else f"{came} of {tokens} tokens came"
