"""The scraper over real sockets: resets, errors and broken text of a target are seen and never read as zero."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from trimtab_tuner.metrics import reading as readings
from trimtab_tuner.metrics import scrape as scrape_module
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.metrics.reading import Reading, Unknown
from trimtab_tuner.metrics.scrape import Scraper
from trimtab_tuner.metrics.snapshot import Snapshot, Window


class Exporter:
    """A process that exports SLO counters with the client library; `restart` begins it anew."""

    def __init__(self) -> None:
        self.status = 200
        self.body: bytes | None = None
        self.starts = 0
        self.restart()
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.body if exporter.body is not None else generate_latest(exporter.registry)
                self.send_response(exporter.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def restart(self) -> None:
        """Counters at zero and another start time, as after a crash."""
        self.starts += 1
        self.registry = CollectorRegistry()
        self.counter = Counter(
            "trimtab_slo_requests", "x", ["slo_class", "slo", "outcome", "generation"], registry=self.registry
        )
        start = Gauge("trimtab_process_start_time_seconds", "x", registry=self.registry)
        start.set(1_700_000_000.0 + 60 * self.starts)

    def judge(self, met: int, violated: int) -> None:
        """Book requests under generation 1."""
        for slo in ("ttft", "itl"):
            self.counter.labels("default", slo, "met", "1").inc(met)
            self.counter.labels("default", slo, "violated", "1").inc(violated)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    found = Exporter()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_replica_that_took_anothers_place_is_scraped_at_its_own_address(exporter: Exporter) -> None:
    addresses = ["http://127.0.0.1:9/metrics"]  # nobody listens there any more

    async def targets() -> list[str]:
        return addresses

    async def main() -> list[Snapshot]:
        async with httpx.AsyncClient() as client:
            scraper = Scraper(client, targets, TRIMTAB)
            first = await scraper.snapshot()
            addresses[:] = [exporter.url]
            return [first, await scraper.snapshot()]

    before, after = asyncio.run(main())
    assert [target for target, _ in before.failures] == ["http://127.0.0.1:9/metrics"]
    assert [sample.target for sample in after.samples] == [exporter.url]
    assert after.failures == ()


def test_a_replica_replaced_inside_a_window_voids_it(exporter: Exporter) -> None:
    other = Exporter()
    addresses = [exporter.url]

    async def targets() -> list[str]:
        return addresses

    async def main() -> list[Snapshot]:
        async with httpx.AsyncClient() as client:
            scraper = Scraper(client, targets, TRIMTAB)
            exporter.judge(5, 0)
            other.judge(50, 9)
            first = await scraper.snapshot()
            addresses[:] = [other.url]
            return [first, await scraper.snapshot()]

    found = read(asyncio.run(main()))
    other.server.shutdown()
    other.server.server_close()
    assert isinstance(found, Unknown)


def scrape(exporter: Exporter, between: Callable[[], None]) -> list[Snapshot]:
    async def main() -> list[Snapshot]:
        async with httpx.AsyncClient() as client:
            scraper = Scraper(client, [exporter.url], TRIMTAB)
            first = await scraper.snapshot()
            between()
            return [first, await scraper.snapshot()]

    return asyncio.run(main())


def read(snapshots: list[Snapshot]) -> Reading | Unknown:
    return readings.read(Window(snapshots), names=TRIMTAB, generation=1, min_requests=1, max_age_s=10.0)


def test_what_happened_between_two_scrapes_is_counted(exporter: Exporter) -> None:
    exporter.judge(5, 5)
    found = read(scrape(exporter, lambda: exporter.judge(7, 2)))
    assert isinstance(found, Reading)
    assert (found.slo("itl").met, found.slo("itl").violated) == (7, 2)


def test_a_restart_between_two_scrapes_voids_the_window_even_when_counters_grew(exporter: Exporter) -> None:
    exporter.judge(5, 0)

    def crash() -> None:
        exporter.restart()
        exporter.judge(50, 9)

    snapshots = scrape(exporter, crash)
    assert Window(snapshots).increase("trimtab_slo_requests_total", slo="ttft") == 59
    found = read(snapshots)
    assert isinstance(found, Unknown)
    assert "restarted inside the window" in found.reason


@pytest.mark.parametrize(
    ("status", "body", "cause"), [(500, b"", "HTTP 500"), (200, b"fine 1\nbroken{ 1\n", "line 2")]
)
def test_an_error_or_broken_text_is_a_failure_with_its_cause(
    exporter: Exporter, status: int, body: bytes, cause: str
) -> None:
    exporter.judge(5, 0)

    def spoil() -> None:
        exporter.status, exporter.body = status, body

    snapshots = scrape(exporter, spoil)
    assert cause in snapshots[1].failures[0][1]
    found = read(snapshots)
    assert isinstance(found, Unknown)
    assert cause in found.reason


def test_an_exposition_without_an_end_is_a_failure_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_module, "MAX_BYTES", 2**20)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 2**16
            yield b"#" * 2**16

    async def main() -> Snapshot:
        answer = httpx.MockTransport(lambda _: httpx.Response(200, content=endless()))
        async with httpx.AsyncClient(transport=answer) as client:
            return await Scraper(client, ["http://engine/metrics"], TRIMTAB).snapshot()

    snapshot = asyncio.run(main())
    assert snapshot.failures == (("http://engine/metrics", "the answer is longer than 1 MiB"),)
    assert sent < 2**21


def test_an_exposition_that_drips_is_a_failure_with_its_cause() -> None:
    async def dripping() -> AsyncIterator[bytes]:
        while True:
            yield b"#"
            await asyncio.sleep(0.01)

    async def main() -> Snapshot:
        answer = httpx.MockTransport(lambda _: httpx.Response(200, content=dripping()))
        async with httpx.AsyncClient(transport=answer) as client:
            return await Scraper(client, ["http://engine/metrics"], TRIMTAB, timeout_s=0.05).snapshot()

    ((target, why),) = asyncio.run(main()).failures
    assert target == "http://engine/metrics"
    assert why.startswith("TimeoutError")
