"""The node's HTTPS port as the API server uses it: `kubectl logs` (`/containerLogs/…`) and `/healthz`.

Only the cluster's authority may call. Logs are the containers' own bytes; `tailLines`, `limitBytes`, `previous` and `follow` are
supported, times (`--since`, `--timestamps`) are not, since lines carry none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from support.cluster.agent.pods import Pods

_POLL_S = 0.2

_log = logging.getLogger(__name__)


async def serve(pods: Pods, address: str, port: int, pki: Path) -> asyncio.Server:
    """Listen; the server runs until it is closed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "kubelet.crt", pki / "kubelet.key")
    context.load_verify_locations(pki / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readline()).decode().split()
            while (await reader.readline()).strip():
                pass
            if len(request) >= 2:
                await _answer(pods, request[1], writer)
        except OSError as error:
            _log.info("log reader left: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(handle, address, port, ssl=context)


async def _answer(pods: Pods, target: str, writer: asyncio.StreamWriter) -> None:
    url = urlsplit(target)
    parts = [unquote(part) for part in url.path.split("/") if part]
    query = {key: values[-1] for key, values in parse_qs(url.query).items()}
    if parts == ["healthz"]:
        await _send(writer, "200 OK", b"ok")
    elif len(parts) == 4 and parts[0] == "containerLogs":
        await _send_logs(pods, (parts[1], parts[2], parts[3]), query, writer)
    else:
        await _send(writer, "404 Not Found", b"this node agent answers /containerLogs and /healthz only")


async def _send(writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _send_logs(
    pods: Pods, target: tuple[str, str, str], query: dict[str, str], writer: asyncio.StreamWriter
) -> None:
    namespace, name, container_name = target
    pod = pods.find(namespace, name)
    container = None if pod is None else pod.container(container_name)
    if container is None:
        await _send(
            writer, "404 Not Found", f"no container {container_name} in pod {namespace}/{name}".encode()
        )
        return
    path = container.log_path(previous=query.get("previous") == "true")
    if not path.exists():
        text = f'container "{container_name}" in pod "{name}" is waiting to start, or has no such run'
        await _send(writer, "400 Bad Request", text.encode())
        return
    content = whole = path.read_bytes()
    if "tailLines" in query:
        lines = content.splitlines(keepends=True)
        content = b"".join(lines[max(0, len(lines) - int(query["tailLines"])) :])
    if "limitBytes" in query:
        content = content[: int(query["limitBytes"])]
    if query.get("follow") != "true":
        await _send(writer, "200 OK", content)
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + content)
    await writer.drain()
    async for more in _grow(path, len(whole), lambda: container.state.running is None):
        writer.write(more)
        await writer.drain()


async def _grow(path: Path, position: int, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """What is appended to `path` after `position`, until the container has ended."""
    while True:
        last = ended()
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            more = file.read()
            position += len(more)
            if more:
                yield more
        if last or not path.exists():
            return
        await asyncio.sleep(_POLL_S)
