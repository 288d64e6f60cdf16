"""Streaming completions in the background of a test: raw httpx, one thread each, nothing retried."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx


class StreamedCompletion(threading.Thread):
    """One streamed completion of `max_tokens` greedy tokens; `join` it, then look at what came."""

    def __init__(
        self, url: str, *, max_tokens: int, prompt: str = "Tell me about the sea", **body: Any
    ) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        self.status: int | None = None
        self.headers: httpx.Headers | None = None
        self.error: dict[str, Any] | None = None  # of an error frame or body
        self.transport_error: str | None = None
        self.finish_reason: str | None = None
        self.num_tokens: int | None = None
        self.text = ""
        self.done = False  # [DONE] came
        self.flowing = threading.Event()  # some text has come
        self.start()

    def run(self) -> None:
        """Thread body."""
        try:
            with (
                httpx.Client(timeout=httpx.Timeout(60.0)) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=self._body) as answer,
            ):
                self.status, self.headers = answer.status_code, answer.headers
                if answer.status_code != 200:
                    self.error = json.loads(answer.read())["error"]
                    return
                for line in answer.iter_lines():
                    self._line(line)
        except httpx.TransportError as error:
            self.transport_error = repr(error)
        finally:
            self.flowing.set()

    def _line(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                self.error = chunk["error"]
                return
            if chunk.get("usage"):
                self.num_tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"] or self.finish_reason
                if choice["text"]:
                    self.flowing.set()

    def wait_flowing(self) -> None:
        """Wait for the first text."""
        assert self.flowing.wait(60.0), "no text came"
        assert self.status == 200, self.error
        assert self.error is None, self.error

    def result(self) -> StreamedCompletion:
        """Wait for the end."""
        self.join(90.0)
        assert not self.is_alive(), "the stream did not end"
        return self
