"""Traffic for a whole test: streamed completions one after the other, each over a connection of its own, nothing retried.

Used by tests of faults and rollouts: whatever happens meanwhile, every request must be answered in full and no stream may stand still.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

Json = dict[str, Any]
_PAUSE_S = 0.2  # between a client's streams: there are two cores for everybody


class Traffic:
    """`clients` threads that stream until the block ends. Then (or meanwhile) look at `failed`, `count`, `longest_gap_s`."""

    def __init__(self, url: str, *, clients: int = 1, tokens: int = 24, model: str = "tiny") -> None:
        """url: of the Service, without /v1. tokens: of each stream."""
        self._url = url
        self._body: Json = {
            "model": model,
            "prompt": "hello",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        self.count = 0  # streams that ended as they should
        self.failed: list[str] = []  # what went wrong with the others
        self.longest_gap_s = 0.0  # between two events of one stream, or before its first

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.wait_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(90)

    def wait_more(self, streams: int = 3, timeout_s: float = 120.0) -> None:
        """Until so many further streams have ended well: traffic flows now."""
        want, deadline_s = self.count + streams, time.monotonic() + timeout_s
        while self.count < want and not self.failed:
            assert time.monotonic() < deadline_s, f"{want - self.count} of {streams} streams did not end"
            time.sleep(0.05)
        assert self.failed == [], self.failed

    def check(self, max_gap_s: float = 20.0) -> None:
        """Nothing failed and nothing stood still. The gap's bound is generous: two cores may be shared with a build."""
        assert self.failed == [], self.failed
        assert self.count > 0
        assert self.longest_gap_s < max_gap_s

    def _run(self) -> None:
        while not self._done.is_set():
            began = time.monotonic()
            problem = self._stream()
            with self._lock:
                if problem is None:
                    self.count += 1
                else:
                    self.failed.append(
                        f"{time.strftime('%H:%M:%S')}, after {time.monotonic() - began:.1f} s: {problem}"
                    )
            self._done.wait(_PAUSE_S)

    def _stream(self) -> str | None:
        """One streamed completion → what was wrong with it."""
        last = time.monotonic()
        ended, finish = False, None
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=90, trust_env=False
            ) as answer:
                if answer.status_code != 200:
                    return f"{answer.status_code} {answer.read().decode()}"
                for line in answer.iter_lines():
                    if not line:
                        continue
                    now = time.monotonic()
                    with self._lock:
                        self.longest_gap_s = max(self.longest_gap_s, now - last)
                    last = now
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            return f"error in the stream: {chunk['error']}"
                        finish = chunk["choices"][0]["finish_reason"] or finish
        except httpx.HTTPError as error:
            return repr(error)
        if not ended or finish != "length":
            return f"the stream ended early: [DONE] {ended}, finish_reason {finish}"
        return None
