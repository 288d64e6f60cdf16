"""The client of the runtime contract, against a real engine."""

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TypeVar

import httpx
import pytest

from support.engine_server import EngineServer, wait_until
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.errors import ServerError
from trimtab_tuner.lease import Lease
from trimtab_tuner.target import (
    Promotion,
    Target,
    TargetRefused,
    TargetUnauthorised,
    TargetUnreachable,
    readback,
)

T = TypeVar("T")


def with_target(url: str, work: Callable[[Target], Awaitable[T]]) -> T:
    async def main() -> T:
        async with httpx.AsyncClient() as client:
            return await work(Target(client, url))

    return asyncio.run(main())


def in_force(engine: EngineServer) -> tuple[int, int]:
    found = engine.live_config()["in_force"]
    return found["generation"], found["config"]["max_num_seqs"]


def test_a_candidate_is_in_force_when_put_returns_and_gone_when_ended(engine: EngineServer) -> None:
    async def work(target: Target) -> None:
        before = await target.read()
        candidate = dataclasses.replace(before.incumbent.config, max_num_seqs=7)
        generation = await target.put_candidate(candidate, lease_s=60.0)
        assert generation > before.incumbent.generation
        assert in_force(engine) == (generation, 7)
        assert engine.live_config()["incumbent"]["generation"] == before.incumbent.generation
        await target.end_candidate()
        assert in_force(engine) == (before.incumbent.generation, 1)
        await target.end_candidate()  # once more changes nothing

    with_target(engine.admin_url, work)


def test_the_serving_port_is_told_from_a_control_port(engine: EngineServer) -> None:
    async def work(target: Target) -> None:
        with pytest.raises(
            TargetUnreachable, match="is this an operator's control port or an engine's admin"
        ):
            await target.read()

    with_target(engine.url, work)


def test_an_unrenewed_candidate_is_ended_by_the_engine(engine: EngineServer) -> None:
    async def work(target: Target) -> None:
        config = (await target.read()).incumbent.config
        candidate = dataclasses.replace(config, max_num_seqs=7)
        generation = await target.put_candidate(candidate, lease_s=60.0)
        await target.put_candidate(candidate, lease_s=0.1, generation=generation)

    with_target(engine.admin_url, work)
    wait_until(lambda: in_force(engine)[1] == 1)
    assert engine.live_config()["candidate"] is None


def test_a_lease_is_renewed_while_held_and_reverted_when_left(engine: EngineServer) -> None:
    async def work(target: Target) -> None:
        config = (await target.read()).incumbent.config
        async with Lease(target, lease_s=9.0) as lease:
            first = await lease.move(dataclasses.replace(config, max_num_seqs=7))
            until = engine.live_config()["candidate"]["until"]
            async with asyncio.timeout(60):
                while engine.live_config()["candidate"]["until"] <= until:
                    await asyncio.sleep(0.1)
            assert in_force(engine) == (first, 7)
            second = await lease.move(dataclasses.replace(config, max_num_seqs=9))
            assert in_force(engine) == (second, 9)
            assert lease.lost is None
        assert in_force(engine)[1] == 1

    with_target(engine.admin_url, work)


def test_an_error_inside_a_lease_reverts_too(engine: EngineServer) -> None:
    async def work(target: Target) -> None:
        config = (await target.read()).incumbent.config
        async with Lease(target, lease_s=60.0) as lease:
            await lease.move(dataclasses.replace(config, max_num_seqs=7))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        with_target(engine.admin_url, work)
    assert in_force(engine)[1] == 1


def test_a_lease_that_somebody_else_ends_is_noticed(engine: EngineServer) -> None:
    async def work(target: Target) -> str | None:
        config = (await target.read()).incumbent.config
        async with Lease(target, lease_s=6.0) as lease:
            await lease.move(dataclasses.replace(config, max_num_seqs=7))
            await target.end_candidate()
            for _ in range(600):
                if lease.lost:
                    break
                await asyncio.sleep(0.1)
            return lease.lost

    assert "refused" in (with_target(engine.admin_url, work) or "")


def test_a_refused_config_names_path_value_and_range_and_changes_nothing(engine: EngineServer) -> None:
    before = in_force(engine)

    async def work(target: Target) -> None:
        config = (await target.read()).incumbent.config
        await target.put_candidate(dataclasses.replace(config, max_num_batched_tokens=10**6), lease_s=5.0)

    with pytest.raises(
        TargetRefused, match=r"max_num_batched_tokens: 1000000 is not allowed; an integer from 1 to 8192"
    ):
        with_target(engine.admin_url, work)
    assert in_force(engine) == before


def test_a_promoted_config_becomes_the_incumbent_and_stays(engine: EngineServer) -> None:
    async def work(target: Target) -> Promotion:
        config = (await target.read()).incumbent.config
        return await target.promote(dataclasses.replace(config, max_num_seqs=5))

    promotion = with_target(engine.admin_url, work)
    incumbent = engine.live_config()["incumbent"]
    assert promotion == Promotion(incumbent["generation"], in_force=True)
    assert incumbent["source"] == "Recommendation"
    assert incumbent["config"]["max_num_seqs"] == 5


def test_a_bare_engine_has_its_metrics_on_the_admin_port_and_no_status(engine: EngineServer) -> None:
    async def work(target: Target) -> None:
        assert await target.metrics_targets() == (f"{engine.admin_url}/metrics",)
        assert await target.status() == {}

    with_target(engine.admin_url, work)


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """Starts servers that give one answer to everything: what a wrong address or a gateway in between may say."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (401, b'{"error": {"message": "expired"}}', TargetUnauthorised, "expired; see --token-file"),
        (403, b"no", TargetUnauthorised, "403"),
        (409, b'{"error": {"message": "old"}}', TargetRefused, "old"),
        (
            409,
            b'{"error": {"path": "generation", "value": null, "allowed": null, "message": "its lease has ended"}}',
            TargetRefused,
            "its lease has ended",
        ),
        (503, b"", TargetUnreachable, "503"),
        (200, b"<html>", ServerError, "is this an admin port"),
        (200, b'{"fine": 1}', ServerError, "no read-back"),
    ],
)
def test_errors_are_sorted_by_what_can_be_done(
    answering: Callable[[int, bytes], str],
    status: int,
    body: bytes,
    error: type[ServerError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        with_target(answering(status, body), lambda target: target.read())


def test_nobody_there_is_unreachable() -> None:
    with pytest.raises(TargetUnreachable, match="ConnectError"):
        with_target("http://127.0.0.1:9", lambda target: target.read())


def test_a_service_counts_as_changed_only_when_every_replica_shows_it() -> None:
    config = LiveConfig().to_json()
    one = {"generation": 4, "source": "Spec", "config": config}
    document = {
        "incumbent": one,
        "in_force": one,
        "ceilings": {"max_num_batched_tokens": 8192, "max_num_seqs": 256},
        "replicas": [
            {"name": "a", "readback": {"in_force": one}},
            {"name": "b", "readback": {"in_force": {**one, "generation": 3}}},
            {"name": "c", "readback": None},
        ],
    }
    found = readback(document)
    assert found.replicas == {"a": 4, "b": 3, "c": -1}
    assert not found.shows(4)
    assert readback({**document, "replicas": document["replicas"][:1]}).shows(4)  # type: ignore[index]
