"""`/healthz`, `/readyz` and `/metrics` of the operator itself, on one small HTTP server in a thread. Used by `main`.

Healthy means that work can be done, not that a process exists: threads alive, services listed not long ago, no watch that owes
a change. Kubernetes restarts an operator that is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HealthServer:
    """See the module. `trouble` and `not_ready` return what is wrong, in words, or None."""

    def __init__(
        self,
        host: str,
        port: int,
        trouble: Callable[[], str | None],
        not_ready: Callable[[], str | None],
        metrics: Callable[[], bytes],
    ) -> None:
        checks = {"/healthz": trouble, "/readyz": not_ready}

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # a client that says nothing must not hold a thread

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
                elif path in checks:
                    wrong = checks[path]()
                    self._answer(503 if wrong else 200, (wrong or "ok").encode(), "text/plain")
                else:
                    self._answer(404, b"try /healthz, /readyz or /metrics", "text/plain")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: probes come every few seconds."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
