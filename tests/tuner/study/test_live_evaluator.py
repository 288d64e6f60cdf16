"""Measuring on a real engine: exact counts, guarded, reverted, or Unknown."""

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine_server import EngineServer
from trimtab_tuner import trace as traces
from trimtab_tuner.evaluate import LiveEvaluator, Measurement, ObserveWorkload, Workload
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.metrics.reading import Reading, Unknown
from trimtab_tuner.metrics.scrape import Scraper
from trimtab_tuner.metrics.snapshot import Snapshot
from trimtab_tuner.metrics.source import MetricsSource
from trimtab_tuner.target import Target, TargetRefused
from trimtab_tuner.workload import ReplayWorkload

LOOSE = Limits(min_requests=20, max_factor=None, gauge_factor=1e6)


def quiet(_: float) -> None:
    """Nobody looks at progress here."""


class Leaving:
    """Metrics of an engine that does not answer any more from the moment it is told to be gone."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self.interval_s = source.interval_s
        self.gone = False

    async def snapshot(self, not_before_s: float | None = None) -> Snapshot:
        """See `MetricsSource`."""
        found = await self._source.snapshot(not_before_s)
        if not self.gone:
            return found
        return Snapshot(found.taken_s, (), tuple((s.target, "ConnectError") for s in found.samples))


def evaluate(
    engine: EngineServer,
    trace: Path | None,
    *,
    max_num_seqs: int | None = None,
    limits: Limits = LOOSE,
    metrics: str | None = None,
    during: Callable[[httpx.AsyncClient, Workload], Any] | None = None,
    leaving: list[Leaving] | None = None,
    **options: Any,
) -> Measurement:
    """One measurement; of the incumbent when `max_num_seqs` is None, of live traffic when there is no trace."""

    async def main() -> Measurement:
        async with httpx.AsyncClient() as client:
            target = Target(client, engine.admin_url)
            incumbent = (await target.read()).incumbent.config
            source = Scraper(
                client, [metrics or f"{engine.url}/metrics"], TRIMTAB, interval_s=0.2, timeout_s=30.0
            )
            if leaving is not None:
                leaving.append(Leaving(source))
            workload: Workload = (
                ReplayWorkload(traces.load(trace), engine.url, slo=incumbent.slo)
                if trace
                else ObserveWorkload(5.0)
            )
            evaluator = LiveEvaluator(
                target,
                leaving[0] if leaving else source,
                workload,
                names=TRIMTAB,
                limits=limits,
                washout_s=5.0 if trace else 0.5,
                wait_until_idle=trace is not None,
                **options,
            )
            config = (
                None if max_num_seqs is None else dataclasses.replace(incumbent, max_num_seqs=max_num_seqs)
            )
            work = evaluator.evaluate(config, baseline=None, on_progress=quiet)
            if during is None:
                return await work
            measured, _ = await asyncio.gather(work, during(client, workload))
            assert isinstance(measured, Measurement)
            return measured

    return asyncio.run(main())


def test_a_replay_is_counted_request_by_request_under_its_generation(
    engine: EngineServer, crowd: Path
) -> None:
    before = engine.live_config()["incumbent"]["generation"]
    found = evaluate(engine, crowd, max_num_seqs=16)
    assert found.status == "measured", found.reason
    assert isinstance(found.reading, Reading)
    assert found.generation > before
    assert found.reading.slo("ttft").n == found.reading.slo("itl").n == 30
    assert found.client is not None
    assert found.client["n"] == 30
    assert found.client["failed"] == 0
    assert found.reading.generation_tokens == found.client["output_tokens"] == 1200
    assert sum(block.n for block in found.blocks) == 30
    assert sum(block.violated for block in found.blocks) == found.reading.violated
    assert sum(block.tokens for block in found.blocks) == 1200
    assert sum(block.seconds for block in found.blocks) == pytest.approx(found.client["duration_s"], abs=0.5)
    assert engine.live_config()["in_force"]["generation"] == before


def test_the_server_and_the_sender_agree_on_who_violated(engine: EngineServer, convoys: Path) -> None:
    found = evaluate(engine, convoys)
    assert isinstance(found.reading, Reading), found.reason
    assert found.client is not None
    attainment = found.client["attainment"]
    assert attainment is not None
    assert found.reading.slo("ttft").violated >= 10
    # Server TTFT starts at arrival, client TTFT at the intended send, a little earlier, and four need not wait.
    assert abs((1 - attainment) * 20 - found.reading.slo("ttft").violated) <= 2


def test_live_traffic_is_observed_without_sending_anything(engine: EngineServer) -> None:
    async def traffic(client: httpx.AsyncClient, workload: Workload) -> None:
        while workload.began_s is None:
            await asyncio.sleep(0.05)
        for _ in range(3):
            answer = await client.post(
                f"{engine.url}/v1/completions",
                json={"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4},
                timeout=30.0,
            )
            assert answer.status_code == 200, answer.text

    found = evaluate(engine, None, max_num_seqs=4, during=traffic, min_requests=1)
    assert isinstance(found.reading, Reading), found.reason
    assert found.reading.n == 3
    assert found.client is None


def test_a_candidate_that_breaks_a_guardrail_is_rolled_back_at_once(
    engine: EngineServer, bursts: Path
) -> None:
    strict = dataclasses.replace(LOOSE, gauge_factor=1e-6)  # any open gap is too long
    found = evaluate(engine, bursts, max_num_seqs=16, limits=strict)
    assert found.status == "stopped"
    assert "is allowed" in found.reason
    assert found.ended_s - found.started_s < traces.load(bursts).span_s, "before its last burst was due"
    readback = engine.live_config()
    assert readback["candidate"] is None
    assert readback["in_force"] == readback["incumbent"]


def test_without_metrics_nothing_is_known_and_the_incumbent_stays(engine: EngineServer, bursts: Path) -> None:
    found = evaluate(engine, bursts, max_num_seqs=16, metrics="http://127.0.0.1:9/metrics")
    assert (found.status, found.halted) == ("unknown", False)
    assert isinstance(found.reading, Unknown)
    assert "ConnectError" in found.reading.reason
    readback = engine.live_config()
    assert readback["in_force"] == readback["incumbent"]


def test_a_pause_ends_a_candidate_in_the_middle(engine: EngineServer, bursts: Path) -> None:
    asked = 0

    async def paused() -> str | None:
        nonlocal asked
        asked += 1
        return "paused by hand" if asked > 3 else None

    found = evaluate(engine, bursts, max_num_seqs=16, paused=paused)
    assert (found.status, found.reason, found.halted) == ("unknown", "paused by hand", True)
    readback = engine.live_config()
    assert readback["in_force"] == readback["incumbent"]


async def halted() -> str | None:
    return "a quiet time is in force"


async def nothing_halts() -> str | None:
    return None


def test_a_pause_that_shows_in_something_else_first_is_told_for_what_it_is(
    engine: EngineServer, bursts: Path
) -> None:
    blind = evaluate(engine, bursts, max_num_seqs=16, metrics="http://127.0.0.1:9/metrics", paused=halted)
    assert (blind.status, blind.halted) == ("unknown", True)
    before = engine.live_config()["in_force"]
    refused = evaluate(engine, bursts, max_num_seqs=10**6, paused=halted)
    assert (refused.status, refused.reason, refused.halted) == (
        "unknown",
        "a quiet time is in force",
        True,
    )
    assert engine.live_config()["in_force"] == before


def test_what_ends_a_candidate_without_a_halt_is_none(engine: EngineServer, bursts: Path) -> None:
    async def lacking() -> str | None:
        return "1 of 2 engines are ready"

    found = evaluate(engine, bursts, max_num_seqs=16, paused=lacking, halted=nothing_halts)
    assert (found.status, found.reason, found.halted) == ("unknown", "1 of 2 engines are ready", False)


@pytest.mark.parametrize(
    ("dead", "status"), [("0 of 1 engines are ready", "unknown"), (None, "stopped")], ids=["lost", "alive"]
)
def test_what_a_lost_engine_does_to_its_requests_is_not_booked_on_the_candidate(
    engine: EngineServer, bursts: Path, dead: str | None, status: str
) -> None:
    asked = 0

    async def lost() -> str | None:
        nonlocal asked
        asked += 1
        return dead

    strict = dataclasses.replace(LOOSE, gauge_factor=1e-6)  # any open gap is too long
    found = evaluate(engine, bursts, max_num_seqs=16, limits=strict, lost=lost)
    assert (found.status, found.halted, asked) == (status, False, 1)
    assert found.reason == dead if dead else "is allowed" in found.reason
    readback = engine.live_config()
    assert readback["in_force"] == readback["incumbent"]


def test_a_candidate_that_an_engine_went_down_with_is_stopped_and_told_so(
    engine: EngineServer, bursts: Path
) -> None:
    leaving = list[Leaving]()

    async def goes() -> None:
        leaving[0].gone = True

    strict = dataclasses.replace(LOOSE, gauge_factor=1e-6)  # any open gap is too long
    found = evaluate(engine, bursts, max_num_seqs=16, limits=strict, leaving=leaving, lost=goes)
    assert found.status == "stopped"
    assert re.search(r"is allowed\); no sample at the window's end from .*ConnectError", found.reason), (
        found.reason
    )


def test_live_moves_go_one_factor_of_two_at_a_time(engine: EngineServer) -> None:
    before = engine.live_config()["highest_generation"]
    live = dataclasses.replace(LOOSE, max_factor=2.0)
    found = evaluate(engine, None, max_num_seqs=8, limits=live, min_requests=0)
    assert found.status == "measured", found.reason
    assert found.generation - before == 3  # 1 → 2 → 4 → 8, each its own lease


def test_a_candidate_that_the_engine_refuses_is_an_error_and_changes_nothing(
    engine: EngineServer, bursts: Path
) -> None:
    before = engine.live_config()["in_force"]
    with pytest.raises(TargetRefused, match="max_num_seqs"):
        evaluate(engine, bursts, max_num_seqs=10**6)
    assert engine.live_config()["in_force"] == before
