"""A hub for tests: serves folders over the Hugging Face HTTP API, in this process, with faults on demand.

What it speaks: model info with file hashes, `resolve` with X-Repo-Commit and ETag, redirects of big files to another address (as
a CDN is), Range, tokens, gated and missing models, TLS with an authority of its own. `requests` tells what it was asked.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from support.cluster.certs import write_server_pair

BIG = (".safetensors", ".gguf", "tokenizer.json")  # kept outside of git, behind the CDN


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose path contains `path`."""

    path: str
    status: int | None = None  # answer this instead
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of the body, then the connection is closed
    corrupt: bool = False  # the first byte is another
    endless: bool = False  # the content is followed by more, without an end
    hold_at: int | None = (
        None  # byte of the content to wait at for `released`, whoever asks and however often
    )
    no_ranges: bool = False  # answer 200 with everything, whatever was asked
    times: int = 1
    released: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)  # a hold has begun


@dataclass(frozen=True)
class Asked:
    """One request: where `cdn` is the other address."""

    method: str
    path: str
    start: int
    token: str | None
    cdn: bool
    status: int


@dataclass
class Model:
    """One repository. `token` None: public. `gated`: the token that has accepted the terms."""

    folder: Path
    token: str | None = None
    gated: str | None = None
    tags: dict[str, str] = field(default_factory=dict)  # revision → commit
    lies: dict[str, Any] = field(default_factory=dict)  # what the list of files says of each of them instead

    @property
    def commit(self) -> str:
        """Of what the folder holds now."""
        digest = hashlib.sha1()
        for file in self.files():
            digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def files(self) -> list[Path]:
        """Everything in it."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


class HubServer:
    """A running hub. `url` is its endpoint."""

    def __init__(self, host: str, pki: Path | None) -> None:
        self.models: dict[str, Model] = {}
        self.faults: list[Fault] = []
        self.requests: list[Asked] = []
        self.ca_file: Path | None = None
        self.lock = threading.Lock()
        scheme, context = "http", None
        if pki is not None:
            self.ca_file, certificate, key = write_server_pair(pki, (host,))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            scheme = "https"
        self._servers = []
        for cdn in (False, True):
            server = _Server((host, 0), lambda *words, cdn=cdn: _Handler(self, cdn, *words))
            if context is not None:
                server.socket = context.wrap_socket(
                    server.socket, server_side=True, do_handshake_on_connect=False
                )
            self._servers.append(server)
        self.url, self.cdn_url = (f"{scheme}://{host}:{server.server_port}" for server in self._servers)

    def start(self) -> None:
        """Answer from now on."""
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """No more answers; whoever is held is let go."""
        for fault in self.faults:
            fault.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def fault(self, path: str, **what: Any) -> Fault:
        """Let something go wrong; see `Fault`."""
        made = Fault(path, **what)
        with self.lock:
            self.faults.append(made)
        return made

    def take_fault(self, path: str) -> Fault | None:
        """The fault of this request, which is used up by it."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.path in path and not fault.released.is_set():
                    fault.times -= fault.hold_at is None
                    return fault
        return None

    def downloads(self, suffix: str = "") -> list[Asked]:
        """Requests for content, of files whose name ends so."""
        with self.lock:
            return [
                asked
                for asked in self.requests
                if "/resolve/" in asked.path and asked.path.endswith(suffix) and asked.method == "GET"
            ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: Callable[..., _Handler]) -> None:
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients of these tests are killed and cut off; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: HubServer, cdn: bool, *words: Any) -> None:
        self.hub = hub
        self.cdn = cdn
        super().__init__(*words)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: `HubServer.requests` has it all."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    @property
    def _token(self) -> str | None:
        kind, _, token = (self.headers.get("Authorization") or "").partition(" ")
        return token if kind == "Bearer" else None

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.take_fault(path)
        if fault is not None and fault.status is not None:
            self._say(fault.status, fault.headers, b"{}")
            return
        parts = path.strip("/").split("/")
        if self.cdn:
            self._file(Path("/", *parts[2:]), parts[1], fault)
        elif parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] == "revision":
            self._info("/".join(parts[2:4]), "/".join(parts[5:]))
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), fault)
        else:
            self._say(404, {}, b"{}")

    def _model(self, name: str) -> Model | None:
        """The model if this client may see it; else says why not."""
        model = self.hub.models.get(name)
        if model is None or (model.token is not None and self._token != model.token):
            # As the real one: what may not be seen does not exist, and strangers are asked who they are.
            self._say(401 if self._token is None else 404, {"X-Error-Code": "RepoNotFound"}, b"{}")
            return None
        if model.gated is not None and self._token != model.gated:
            self._say(401 if self._token is None else 403, {"X-Error-Code": "GatedRepo"}, b"{}")
            return None
        return model

    def _info(self, name: str, revision: str) -> None:
        model = self._model(name)
        if model is None:
            return
        if revision not in ("main", model.commit, *model.tags):
            self._say(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
            return
        siblings = []
        for file in model.files():
            entry: dict[str, Any] = {
                "rfilename": str(file.relative_to(model.folder)), "size": file.stat().st_size, "blobId": _git_sha1(file),
            }  # fmt: skip
            if file.name.endswith(BIG):
                entry["lfs"] = {"sha256": _sha256(file), "size": file.stat().st_size, "pointerSize": 130}
            siblings.append({**entry, **model.lies})
        commit = model.tags.get(revision, model.commit)
        body = {
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "tags": [],
            "siblings": siblings,
        }
        self._say(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, name: str, revision: str, path: str, fault: Fault | None) -> None:
        model = self._model(name)
        if model is None:
            return
        file = model.folder / path
        if not file.is_file():
            self._say(404, {"X-Error-Code": "EntryNotFound"}, b"{}")
            return
        if not file.name.endswith(BIG):
            self._file(file, _git_sha1(file), fault, {"X-Repo-Commit": model.commit})
            return
        if fault is not None and fault.hold_at is None:
            with self.hub.lock:
                fault.times += 1  # it is the content's, so the other address shall have it
        digest = _sha256(file)
        headers = {
            "Location": f"{self.hub.cdn_url}/blob/{digest}{file}",
            "X-Repo-Commit": model.commit,
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(file.stat().st_size),
        }
        self._say(302, headers, b"")

    def _file(
        self, file: Path, etag: str, fault: Fault | None, headers: dict[str, str] | None = None
    ) -> None:
        content = file.read_bytes()
        if fault is not None and fault.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        start = 0 if fault is not None and fault.no_ranges else self._start()
        answer = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", **(headers or {})}
        if start >= len(content) > 0:
            self._say(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
            return
        if start:
            answer["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        self._note(206 if start else 200)
        self.send_response(206 if start else 200)
        endless = fault is not None and fault.endless
        length = {"Connection": "close"} if endless else {"Content-Length": str(len(body))}
        for key, value in {**answer, **length}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        while endless:
            try:
                self.wfile.write(body)
            except OSError:
                return  # whoever asked has hung up
            body = bytes(65536)
        if fault is not None and fault.hold_at is not None:
            free = max(0, fault.hold_at - start)
            self.wfile.write(body[:free])
            self.wfile.flush()
            fault.reached.set()
            fault.released.wait()
            body = body[free:]
        if fault is not None and fault.cut_after is not None:
            self.wfile.write(body[: fault.cut_after])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(body)

    def _start(self) -> int:
        unit, _, span = (self.headers.get("Range") or "").partition("=")
        return int(span.partition("-")[0]) if unit == "bytes" else 0

    def _note(self, status: int) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(Asked(self.command, path, self._start(), self._token, self.cdn, status))

    def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._note(status)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_server(host: str = "127.0.0.1", pki: Path | None = None) -> Iterator[HubServer]:
    """A hub that answers until the block ends; with a folder for certificates it speaks TLS."""
    server = HubServer(host, pki)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.02)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git_sha1(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
