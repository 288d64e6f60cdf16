"""The proxy over real sockets, with small plain HTTP servers as replicas."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from trimtab_operator.local.backends import Backend, Backends
from trimtab_operator.local.proxy import Proxy

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with what it was sent."""
    head, body = await read_request(reader)
    payload = json.dumps({"head": head.decode(), "body": body.decode()}).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload))


@contextlib.asynccontextmanager
async def upstream(handler: Handler, name: str = "chat-0") -> AsyncIterator[Backend]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Backend(name, "127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


@contextlib.asynccontextmanager
async def proxy_over(
    *backends: Backend, hold_s: float = 30.0
) -> AsyncIterator[tuple[Proxy, httpx.AsyncClient]]:
    pool = Backends(hold_s=hold_s)
    pool.set(backends)
    proxy = Proxy(pool)
    await proxy.start("127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", timeout=20) as client:
            yield proxy, client
    finally:
        await proxy.close()


def refused_backend(name: str) -> Backend:
    """An address that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return Backend(name, "127.0.0.1", taken.getsockname()[1])


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def test_request_passes_with_body_and_headers_and_keeps_the_connection() -> None:
    async def scenario() -> None:
        async with upstream(echo) as backend, proxy_over(backend) as (proxy, client):
            for body in ("one", "x" * 300_000):
                answer = await client.post(
                    "/v1/thing?a=b",
                    content=body,
                    headers={
                        "X-Request-Id": "abc",
                        "X-Forwarded-For": "10.0.0.9",
                        "Authorization": "Bearer k",
                    },
                )
                seen = answer.json()
                assert seen["body"] == body
                assert seen["head"].startswith("POST /v1/thing?a=b HTTP/1.1\r\n")
                assert "x-request-id: abc\r\n" in seen["head"]
                assert "x-forwarded-for: 10.0.0.9, 127.0.0.1\r\n" in seen["head"]
                assert "authorization: Bearer k\r\n" in seen["head"]
                assert answer.headers["x-trimtab-replica"] == "chat-0"
            assert len(proxy.connections) == 1
            assert backend.outstanding == 0

    asyncio.run(scenario())


def test_request_without_an_id_gets_one() -> None:
    async def scenario() -> None:
        async with upstream(echo) as backend, proxy_over(backend) as (_, client):
            first, second = [(await client.get("/")).json()["head"] for _ in range(2)]
            assert "x-request-id: " in first
            assert first != second

    asyncio.run(scenario())


def test_chunked_request_body_passes() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        raw = await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))

    async def body() -> AsyncIterator[bytes]:
        yield b"hello "
        yield b"world"

    async def scenario() -> None:
        async with upstream(handler) as backend, proxy_over(backend) as (_, client):
            answer = await client.post("/", content=body())
            assert answer.content == b"6\r\nhello \r\n5\r\nworld\r\n0\r\n\r\n"

    asyncio.run(scenario())


def test_event_passes_before_the_next_one_exists() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
            await go.wait()
            writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

        async with (
            upstream(handler) as backend,
            proxy_over(backend) as (_, client),
            client.stream("POST", "/", content=b"{}") as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines) == "data: 1"
            go.set()
            assert [line async for line in lines] == ["", "data: 2", ""]

    asyncio.run(scenario())


def test_client_that_leaves_frees_its_replica_at_once() -> None:
    async def scenario() -> None:
        noticed = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
            assert await reader.read() == b""
            noticed.set()

        async with upstream(handler) as backend, proxy_over(backend) as (_, client):
            async with client.stream("POST", "/", content=b"{}") as answer:
                await anext(answer.aiter_lines())
                assert backend.outstanding == 1
            await asyncio.wait_for(noticed.wait(), 10)
            await asyncio.wait_for(backend.idle.wait(), 10)

    asyncio.run(scenario())


def test_requests_go_to_the_least_loaded_replica() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await release.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        async with upstream(slow, "a") as a, upstream(slow, "b") as b, proxy_over(a, b) as (_, client):
            requests = [asyncio.create_task(client.get("/")) for _ in range(6)]
            await wait_until(lambda: a.outstanding + b.outstanding == 6)
            assert (a.outstanding, b.outstanding) == (3, 3)
            release.set()
            served = [(await request).headers["x-trimtab-replica"] for request in requests]
            assert sorted(served) == ["a", "a", "a", "b", "b", "b"]

    asyncio.run(scenario())


def test_refused_connection_goes_to_another_replica() -> None:
    async def scenario() -> None:
        async with upstream(echo, "b") as alive, proxy_over(refused_backend("a"), alive) as (_, client):
            answers = [await client.post("/", content=b"hi") for _ in range(4)]
            assert {answer.headers["x-trimtab-replica"] for answer in answers} == {"b"}

    asyncio.run(scenario())


def test_accepted_request_is_never_sent_twice() -> None:
    async def scenario() -> None:
        seen: list[bytes] = []

        async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append((await read_request(reader))[1])

        async with upstream(dies, "a") as a, upstream(dies, "b") as b, proxy_over(a, b) as (_, client):
            answer = await client.post("/", content=b"once")
            assert answer.status_code == 502
            assert "not repeated" in answer.json()["error"]["message"]
            assert seen == [b"once"]

    asyncio.run(scenario())


def leaving(seen: list[bytes], status: int = 503) -> Handler:
    """An engine on its way out: notes what it gets, and says so in its answer."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await read_request(reader))[1])
        writer.write(b"HTTP/1.1 %d X\r\nx-trimtab-phase: refusing\r\ncontent-length: 4\r\n\r\nleft" % status)

    return handler


@pytest.mark.parametrize("body", ["hello", "x" * 300_000], ids=["short", "long"])
def test_request_that_a_leaving_replica_refuses_goes_to_another_whole_and_no_later_one_asks_it(
    body: str,
) -> None:
    async def scenario() -> None:
        seen: list[bytes] = []
        async with (
            upstream(leaving(seen), "a") as a,
            upstream(echo, "b") as b,
            proxy_over(a, b) as (proxy, client),
        ):
            for _ in range(6):
                answer = await client.post("/", content=body)
                assert (answer.status_code, answer.headers["x-trimtab-replica"]) == (200, "b")
                assert answer.json()["body"] == body
            assert seen == [body.encode()], "asked once"
            assert proxy.backends.ready == [b]
            assert (a.outstanding, b.outstanding) == (0, 0)

    asyncio.run(scenario())


def test_request_that_every_replica_refuses_waits_for_a_new_one() -> None:
    async def scenario() -> None:
        seen: list[bytes] = []
        async with (
            upstream(leaving(seen), "a") as a,
            upstream(echo, "b") as b,
            proxy_over(a) as (proxy, client),
        ):
            request = asyncio.create_task(client.post("/", content=b"held"))
            await wait_until(lambda: proxy.backends.num_held == 1)
            proxy.backends.set([a, b])
            assert (await request).json()["body"] == "held"
            assert seen == [b"held"]

    asyncio.run(scenario())


def test_refused_request_too_large_to_keep_is_answered_with_the_refusal() -> None:
    async def scenario() -> None:
        async with upstream(leaving([]), "a") as a, proxy_over(a) as (_, client):
            answer = await client.post("/", content=b"x" * 2_000_000)
            assert (answer.status_code, answer.text) == (503, "left")

    asyncio.run(scenario())


def test_answer_of_a_leaving_replica_passes_and_is_its_last() -> None:
    async def scenario() -> None:
        async with upstream(leaving([], 200), "a") as a, proxy_over(a) as (proxy, client):
            assert (await client.get("/")).text == "left"
            assert proxy.backends.ready == []

    asyncio.run(scenario())


@pytest.mark.parametrize("cut", [b"", b"20\r\ndata: half"], ids=["between-events", "inside-an-event"])
def test_death_in_mid_stream_ends_with_an_error_frame(cut: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n") + cut)

    async def scenario() -> None:
        async with upstream(handler) as backend, proxy_over(backend) as (_, client):
            async with client.stream("POST", "/", content=b"{}") as answer:
                events = [line for line in [line async for line in answer.aiter_lines()] if line]
            assert events[0] == "data: 1"
            assert len(events) == 2
            assert "mid-stream" in json.loads(events[1].removeprefix("data: "))["error"]["message"]

    asyncio.run(scenario())


def test_death_in_a_plain_body_never_looks_whole() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")

    async def scenario() -> None:
        async with upstream(handler) as backend, proxy_over(backend) as (_, client):
            with pytest.raises(httpx.TransportError):
                await client.get("/")

    asyncio.run(scenario())


def test_request_is_held_until_a_replica_is_ready() -> None:
    async def scenario() -> None:
        async with upstream(echo) as backend, proxy_over() as (proxy, client):
            request = asyncio.create_task(client.post("/", content=b"held"))
            await wait_until(lambda: proxy.backends.num_held == 1)
            proxy.backends.set([backend])
            assert (await request).json()["body"] == "held"

    asyncio.run(scenario())


def test_held_request_is_answered_503_when_none_comes() -> None:
    async def scenario() -> None:
        async with proxy_over(hold_s=0.05) as (_, client):
            answer = await client.post("/v1/chat/completions", content=b"{}")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["message"] == "no replica is ready; retry"
            assert (await client.get("/ready")).status_code == 503

    asyncio.run(scenario())


def test_request_to_a_service_of_zero_replicas_is_not_held() -> None:
    async def scenario() -> None:
        async with proxy_over(hold_s=3600) as (proxy, client):
            proxy.backends.expected = False
            answer = await client.get("/v1/models")
            assert answer.status_code == 503
            assert "zero replicas" in answer.text

    asyncio.run(scenario())


def test_probe_is_not_held() -> None:
    async def scenario() -> None:
        async with proxy_over(hold_s=3600) as (_, client):
            assert (await client.get("/ready")).status_code == 503

    asyncio.run(scenario())


def test_client_that_leaves_while_held_is_forgotten() -> None:
    async def scenario() -> None:
        async with proxy_over() as (proxy, client):
            request = asyncio.create_task(client.get("/"))
            await wait_until(lambda: proxy.backends.num_held == 1)
            request.cancel()
            await wait_until(lambda: proxy.backends.num_held == 0)

    asyncio.run(scenario())


def test_slow_client_slows_the_replica_down() -> None:
    async def scenario() -> None:
        sent = 0

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(1000):
                writer.write(chunk(b"x" * 65_536))
                await writer.drain()
                sent += 65_536
            writer.write(b"0\r\n\r\n")

        async with upstream(handler) as backend, proxy_over(backend) as (proxy, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=65_536)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await wait_until(lambda: sent > 0)
            stalled_at = -1
            while sent != stalled_at:
                stalled_at = sent
                await asyncio.sleep(0.2)
            assert sent < 40_000_000  # kernel buffers, not all of it
            total = 0
            while data := await reader.read(1 << 20):
                total += len(data)
                if data.endswith(b"0\r\n\r\n"):
                    break
            assert sent == 65_536_000
            writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nname : value\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nlong: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    ],
    ids=[
        "request-line",
        "version",
        "connect",
        "two-framings",
        "two-lengths",
        "space-before-colon",
        "bad-chunk",
        "long-head",
    ],
)
def test_broken_http_is_refused_and_reaches_no_replica(raw: bytes, status: int) -> None:
    async def scenario() -> None:
        async with upstream(echo) as backend, proxy_over(backend) as (proxy, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(raw)
            assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
            writer.close()
            await asyncio.wait_for(backend.idle.wait(), 10)

    asyncio.run(scenario())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def scenario() -> None:
        async with upstream(echo) as backend, proxy_over(backend) as (proxy, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(
                b"POST /1 HTTP/1.1\r\ncontent-length: 1\r\n\r\naGET /2 HTTP/1.1\r\n\r\nGET /3 HTTP/1.1\r\nconnection: close\r\n\r\n"
            )
            raw = await asyncio.wait_for(reader.read(), 10)
            assert [raw.find(path) > 0 for path in (b"POST /1", b"GET /2", b"GET /3")] == [True] * 3
            assert raw.find(b"POST /1") < raw.find(b"GET /2") < raw.find(b"GET /3")
            writer.close()

    asyncio.run(scenario())


def test_head_request_has_no_body() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")

    async def scenario() -> None:
        async with upstream(handler) as backend, proxy_over(backend) as (_, client):
            assert (await client.head("/")).headers["content-length"] == "1000"

    asyncio.run(scenario())


def test_refusing_new_requests_lets_open_streams_finish() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
            await go.wait()
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        async with upstream(handler) as backend, proxy_over(backend) as (proxy, client):
            async with client.stream("POST", "/", content=b"{}") as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                proxy.refuse_new()
                with pytest.raises(httpx.ConnectError):
                    await client.get("/")
                assert proxy.num_open == 1
                go.set()
                assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
            await wait_until(lambda: proxy.num_open == 0)

    asyncio.run(scenario())
