"""A stand-in for one engine: the runtime contract's live configuration and health, no model.

Start arguments, documents, generations and leases are read and judged by the engine's own code, so that what this takes an engine
takes too. Used by `fake`. It checks no admin token and serves no completions.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Sequence
from typing import Any

from trimtab_engine.cli import build_parser, configuration
from trimtab_engine.errors import ConfigError, GenerationConflict
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_engine.server.live import parse_document

Json = dict[str, Any]


class FakeEngine:
    """One engine's state; `now` arguments are the caller's monotonic seconds."""

    def __init__(self, arguments: Sequence[str], live_json: bytes | None) -> None:
        """arguments: the container's; live_json: what its live config file holds. Raises ConfigError like an engine."""
        complaint = io.StringIO()
        try:
            with contextlib.redirect_stderr(complaint):
                parsed = build_parser().parse_args(list(arguments))
        except SystemExit as error:
            raise ConfigError("arguments", " ".join(arguments), complaint.getvalue().strip()) from error
        parsed.live_config = None  # the file of a pod is not on this machine
        config, _options, incumbent, _ = configuration(parsed)
        boot_error = None
        if live_json is not None:
            try:
                document = parse_document(json.loads(live_json), config.ceilings)
                incumbent = Versioned(document.generation or 0, document.source, document.config)
            except (ConfigError, ValueError) as error:
                boot_error = str(error)
        self._live = LiveState(incumbent, config.ceilings, boot_error)
        self._ceilings = config.ceilings
        self._begun_unix_s = time.time()
        self.leaving = False

    def answer(self, method: str, path: str, body: bytes, now: float) -> tuple[int, Json | str]:
        """(HTTP status, JSON or text) for one request on either port."""
        self._live.expire(now)
        route = (method, path.partition("?")[0])
        if route == ("GET", "/ready"):
            return (503, {"status": "leaving"}) if self.leaving else (200, {"status": "ready"})
        if route == ("GET", "/health"):
            return 200, {"status": "ok"}
        if route == ("GET", "/metrics"):
            return 200, self._metrics()
        if route == ("GET", "/admin/live-config"):
            return 200, self._read_back()
        if route == ("PUT", "/admin/live-config"):
            return self._put(body, now)
        if route == ("DELETE", "/admin/live-config/candidate"):
            self._live.end_candidate()
            return 200, self._read_back()
        if route == ("GET", "/admin/workload"):
            return 200, {"records": [], "next": 0, "dropped": 0}
        if route == ("POST", "/admin/drain"):
            self.leaving = True
            return 202, {"phase": "leaving"}
        return 404, {"error": {"message": f"the fake runtime has no {method} {path}"}}

    def _put(self, body: bytes, now: float) -> tuple[int, Json]:
        old = self._live.in_force.to_json()
        try:
            document = parse_document(json.loads(body), self._ceilings)
            generation = document.generation
            if generation is None:
                generation = self._live.highest_generation + 1
            self._live.offer(Versioned(generation, document.source, document.config), document.lease_s, now)
        except ConfigError as error:
            shown = {
                "path": error.path,
                "value": error.value,
                "allowed": error.allowed,
                "message": str(error),
            }
            return 400, {"error": shown}
        except ValueError as error:
            return 400, {"error": {"message": f"no JSON: {error}"}}
        except GenerationConflict as error:
            return 409, {
                "error": {"path": "generation", "message": str(error)},
                "readback": self._read_back(),
            }
        new = self._live.in_force.to_json()
        return 200, {"old": old, "new": new, "generation": generation, "readback": self._read_back()}

    def _read_back(self) -> Json:
        shown = self._live.to_json(time.time() - time.monotonic())
        return {**shown, "pending": None, "file_error": None, "process_start": self._begun_unix_s}

    def _metrics(self) -> str:
        return (
            f"# TYPE trimtab_live_config_generation gauge\n"
            f"trimtab_live_config_generation {self._live.in_force.generation}\n"
            f"# TYPE trimtab_process_start_time_seconds gauge\n"
            f"trimtab_process_start_time_seconds {self._begun_unix_s}\n"
        )
