"""Exception tree of the engine. Imported everywhere; imports nothing.

TrimtabError
├── ConfigError          a flag, a live-config field or a file is wrong: path, value, allowed range
├── ModelLoadError       the model cannot be found, read or fitted into memory
├── RequestError         one request is wrong; becomes an OpenAI-shaped 400 body
│   ├── RequestTooLarge  the request can never fit; carries the limits that it broke
│   └── Unavailable      the request is fine, the moment is not: 503 with Retry-After
│       ├── NotReady     the model is still loading
│       ├── Shed         its deadline can no longer be met (--shed-late)
│       ├── QueueFull    as many requests wait as --max-queued-requests allows
│       └── Draining     the server is going away and takes nothing new
├── GenerationConflict   a live config whose generation is not new (HTTP 409)
└── EngineDead           the engine process ended or stalled; carries the reason
"""

from __future__ import annotations


class TrimtabError(Exception):
    """Root of all errors that the engine raises on purpose."""


class ConfigError(TrimtabError):
    """A configuration value is not allowed. Nothing was changed.

    `path` is dotted (`config.max_num_seqs`, `--block-size`), `allowed` says what would have been right.
    """

    def __init__(self, path: str, value: object, allowed: str) -> None:
        super().__init__(
            f"{path}: missing; {allowed}" if value is None else f"{path}: {value!r} is not allowed; {allowed}"
        )
        self.path = path
        self.value = value
        self.allowed = allowed


class ModelLoadError(TrimtabError):
    """The model cannot be loaded; the message names the file or tensor and what was expected."""


class RequestError(TrimtabError):
    """One request is wrong. `param` names the field, `code` is the OpenAI error code or None."""

    http_status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLarge(RequestError):
    """The request can never fit into the model length or the KV pool."""


class Unavailable(RequestError):
    """Nothing is wrong with the request; try again after `retry_after_s` seconds, here or elsewhere.

    `reason` is the label under which the rejection is counted.
    """

    http_status = 503
    reason = "unavailable"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, code=self.reason)
        self.retry_after_s = retry_after_s


class NotReady(Unavailable):
    """The model is not loaded yet."""

    reason = "loading"


class Shed(Unavailable):
    """The request waited so long that its first token can no longer be in time; no token of it was made."""

    reason = "shed"


class QueueFull(Unavailable):
    """The waiting queue is at its limit."""

    reason = "queue_full"


class Draining(Unavailable):
    """The server is shutting down: what runs finishes, nothing new is taken."""

    reason = "draining"


class GenerationConflict(TrimtabError):
    """The generation is not above all that this engine has seen (or is equal with other content)."""


class EngineDead(TrimtabError):
    """The engine process ended or makes no progress; the message carries the reason."""
