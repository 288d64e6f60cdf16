"""A real Prometheus beside the own scraper: the same engine, the same generation, the same numbers."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from support.engine_server import EngineServer
from support.prometheus import start_prometheus
from trimtab_tuner.metrics import reading as readings
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.metrics.promapi import Prometheus, PrometheusError
from trimtab_tuner.metrics.reading import Reading, Unknown
from trimtab_tuner.metrics.scrape import Scraper
from trimtab_tuner.metrics.snapshot import Window


@pytest.fixture(scope="module")
def prometheus(shared_engine: EngineServer) -> Iterator[str]:
    with start_prometheus([f"{shared_engine.url}/metrics"], interval_s=1.0) as url:
        yield url


def test_prometheus_and_the_own_scraper_read_the_same(engine: EngineServer, prometheus: str) -> None:
    async def main() -> tuple[Reading | Unknown, Reading | Unknown]:
        async with httpx.AsyncClient() as client:
            scraper = Scraper(client, [f"{engine.url}/metrics"], TRIMTAB)
            source = Prometheus(client, prometheus, TRIMTAB, selector='job="engine"', interval_s=1.0)
            scraped = [await scraper.snapshot()]
            queried = [await source.snapshot(not_before_s=time.time())]
            for k in range(5):
                answer = await client.post(
                    f"{engine.url}/v1/completions",
                    json={"model": "tiny", "prompt": [5, 6, 7 + k], "max_tokens": 3 + k},
                    timeout=30.0,
                )
                assert answer.status_code == 200, answer.text
            scraped.append(await scraper.snapshot())
            queried.append(await source.snapshot(not_before_s=time.time()))
            generation = engine.live_config()["in_force"]["generation"]
            one, other = (
                readings.read(
                    Window(snapshots), names=TRIMTAB, generation=generation, min_requests=1, max_age_s=10.0
                )
                for snapshots in (scraped, queried)
            )
            return one, other

    own, theirs = asyncio.run(main())
    assert isinstance(own, Reading), own
    assert isinstance(theirs, Reading), theirs
    assert own.n == 5
    assert theirs.counts == own.counts
    assert theirs.steps.keys() == own.steps.keys()
    for kind, both in own.steps.items():
        assert theirs.steps[kind] == pytest.approx(both)
    for field in (
        "generation_tokens",
        "prompt_tokens_computed",
        "step_tokens",
        "share_over_half_budget",
        "ttft_p50_s",
        "itl_p99_s",
        "queue_mean_s",
        "finished",
    ):
        assert getattr(theirs, field) == pytest.approx(getattr(own, field)), field


def test_samples_carry_the_time_of_the_scrape_not_of_the_query(engine: EngineServer, prometheus: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient() as client:
            source = Prometheus(client, prometheus, TRIMTAB, interval_s=1.0)
            asked = time.time()
            snapshot = await source.snapshot(not_before_s=asked)
            assert not snapshot.failures
            (sample,) = snapshot.samples
            assert sample.taken_s >= asked
            assert sample.process_start_s is not None
            assert sample.process_start_s < asked

    asyncio.run(main())


def test_a_selector_that_matches_nothing_is_a_failure_not_a_zero(prometheus: str) -> None:
    async def main() -> str:
        async with httpx.AsyncClient() as client:
            source = Prometheus(client, prometheus, TRIMTAB, selector='job="other"', interval_s=1.0)
            window = Window([await source.snapshot(), await source.snapshot()])
            found = readings.read(window, names=TRIMTAB, generation=0, min_requests=0, max_age_s=10.0)
            assert isinstance(found, Unknown)
            return found.reason

    assert 'no series match {job="other"}' in asyncio.run(main())


def test_old_samples_only_are_a_failure_after_a_bounded_wait(prometheus: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient() as client:
            source = Prometheus(client, prometheus, TRIMTAB, interval_s=0.2)
            snapshot = await source.snapshot(not_before_s=time.time() + 3600)
            assert not snapshot.samples
            assert "new enough" in snapshot.failures[0][1]

    asyncio.run(main())


def test_a_bad_query_and_a_wrong_address_say_why(engine: EngineServer, prometheus: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(PrometheusError, match="parse error"):
                await Prometheus(client, prometheus, TRIMTAB).instant("sum(")
            snapshot = await Prometheus(client, engine.url, TRIMTAB).snapshot()
            assert "is it a Prometheus" in snapshot.failures[0][1]
            snapshot = await Prometheus(client, "http://127.0.0.1:9", TRIMTAB).snapshot()
            assert "ConnectError" in snapshot.failures[0][1]

    asyncio.run(main())
