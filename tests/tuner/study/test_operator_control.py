"""Tuning through an operator's control port: every replica is changed and read, its owner's bounds and switches hold."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from support.engine_server import wait_until
from support.local_operator import LocalOperator, service_resource
from support.study_runs import Simulated, tune
from trimtab_tuner import guardrails
from trimtab_tuner.audit import Audit
from trimtab_tuner.commands.options import allowed_loss, allowed_search
from trimtab_tuner.errors import InputError
from trimtab_tuner.lease import Lease
from trimtab_tuner.metrics import reading as readings
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.metrics.reading import Reading
from trimtab_tuner.metrics.scrape import Scraper
from trimtab_tuner.metrics.snapshot import Window
from trimtab_tuner.target import Target, TargetRefused

T = TypeVar("T")


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalOperator]:
    resource = service_resource(
        tiny_model,
        replicas=2,
        tuning={
            "mode": "Apply",
            "limits": {"maxThroughputLoss": "7.5%"},
            "parameters": [
                {"name": "maxNumBatchedTokens", "min": 64, "max": 512},
                {"name": "schedulingPolicy", "choices": ["fcfs", "priority"]},
            ],
        },
    )
    operator = LocalOperator(tmp_path_factory.mktemp("service"), resource)
    try:
        wait_until(lambda: sum(r["ready"] for r in operator.status()["replicas"]) == 2, 120.0)
        yield operator
    finally:
        operator.stop()


def with_target(service: LocalOperator, work: Callable[[httpx.AsyncClient, Target], Awaitable[T]]) -> T:
    async def main() -> T:
        async with httpx.AsyncClient() as client:
            return await work(client, Target(client, service.control_url))

    return asyncio.run(main())


def test_a_candidate_is_on_every_replica_while_held_and_on_none_after(service: LocalOperator) -> None:
    async def work(client: httpx.AsyncClient, target: Target) -> None:
        before = await target.read()
        assert len(before.replicas) == 2
        async with Lease(target, lease_s=30.0) as lease:
            generation = await lease.move(
                dataclasses.replace(before.incumbent.config, max_num_batched_tokens=128)
            )
            assert set((await target.read()).replicas.values()) == {generation}
        after = await target.read()
        assert set(after.replicas.values()) == {before.incumbent.generation}

    with_target(service, work)


def test_metrics_of_all_replicas_are_one_reading(service: LocalOperator) -> None:
    async def work(client: httpx.AsyncClient, target: Target) -> None:
        targets = await target.metrics_targets()
        assert len(targets) == 2
        scraper = Scraper(client, targets, TRIMTAB)
        first = await scraper.snapshot()
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post(f"{service.url}/v1/completions", json=body, timeout=60.0) for _ in range(8))
        )
        assert {a.status_code for a in answers} == {200}
        generation = (await target.read()).in_force.generation
        found = readings.read(
            Window([first, await scraper.snapshot()]),
            names=TRIMTAB,
            generation=generation,
            min_requests=1,
            max_age_s=10.0,
        )
        assert isinstance(found, Reading), found
        assert (found.n, found.targets) == (8, 2)
        assert found.generation_tokens == 64

    with_target(service, work)


def test_the_owners_parameters_and_mode_are_read_from_the_status(service: LocalOperator) -> None:
    status = with_target(service, lambda client, target: target.status())
    knobs, bounds, policies = allowed_search(status, None, [])
    assert knobs == ("max_num_batched_tokens", "scheduling_policy")
    assert bounds == {"max_num_batched_tokens": (64, 512)}
    assert policies == ("fcfs", "priority")
    assert guardrails.paused(status, pause_file=False) is None
    assert allowed_search(status, None, ["max_num_batched_tokens=128:256"])[1] == {
        "max_num_batched_tokens": (128, 256)
    }


def test_the_owners_limit_on_throughput_is_read_from_the_status(service: LocalOperator) -> None:
    """spec.tuning.limits.maxThroughputLoss; a flag goes before it, and the CRD's default stands where nobody says it."""
    assert service.resource["spec"]["tuning"]["limits"]["maxThroughputLoss"] == "7.5%"
    status = with_target(service, lambda client, target: target.status())
    assert allowed_loss(status, None) == pytest.approx(0.075)
    assert allowed_loss(status, "12%") == pytest.approx(0.12)
    assert allowed_loss(status, "0") == 0.0
    assert allowed_loss({}, None) == pytest.approx(0.03)
    with pytest.raises(InputError, match="--max-throughput-loss"):
        allowed_loss(status, "100%")


def test_a_config_outside_the_owners_bounds_is_refused_by_name(service: LocalOperator) -> None:
    async def work(client: httpx.AsyncClient, target: Target) -> None:
        config = (await target.read()).incumbent.config
        await target.put_candidate(dataclasses.replace(config, max_num_batched_tokens=32), lease_s=5.0)

    with pytest.raises(TargetRefused, match=r"config.max_num_batched_tokens.*from 64 to 512"):
        with_target(service, work)


def test_refusals_teach_the_study_and_do_not_end_the_run(service: LocalOperator) -> None:
    # The space goes down to 16 tokens, the owner allows 64: those below are refused while measuring.
    def asks_the_service(evaluator: Simulated) -> None:
        evaluator.before_each = lambda target, config: target.put_candidate(config, lease_s=60.0)

    audit = Audit()
    result, _ = tune(
        service.control_url, lambda _: 0.4, prepare=asks_the_service, audit=audit, max_trials=9, seed=4
    )
    with_target(service, lambda client, target: target.end_candidate())
    refused = [line for line in audit.lines if line["event"] == "refused"]
    assert refused
    assert result.outcome in ("Kept", "Recommended")
    assert len([t for t in result.trials if t.role == "explore"]) >= 1


def test_a_confirmed_candidate_becomes_a_recommendation_that_the_operator_keeps(
    service: LocalOperator,
) -> None:
    pids = {r["name"]: r["pid"] for r in service.status()["replicas"]}
    result, _ = tune(
        service.control_url,
        lambda config: 0.9 if config.max_num_batched_tokens > 256 else 0.0,
        bounds={"max_num_batched_tokens": (64, 512)},
        apply=True,
    )
    assert result.outcome == "Applied", result.reason
    status = service.status()
    budget = result.after.max_num_batched_tokens
    assert status["live"]["incumbent"]["source"] == "Recommendation"
    assert status["live"]["incumbent"]["config"]["max_num_batched_tokens"] == budget
    assert status["tuning"]["recommendation"]["values"]["maxNumBatchedTokens"] == budget
    assert {r["name"]: r["pid"] for r in status["replicas"]} == pids  # no restart
    service.control.delete("/admin/recommendation").raise_for_status()


def test_an_annotation_pauses_tuning(service: LocalOperator) -> None:
    service.resource["metadata"]["annotations"] = {guardrails.PAUSE_ANNOTATION: "paused"}
    service.save()
    wait_until(lambda: service.status()["tuning"]["state"] == "paused")

    async def work(client: httpx.AsyncClient, target: Target) -> str | None:
        return guardrails.paused(await target.status(), pause_file=False)

    assert "paused by the annotation" in (with_target(service, work) or "")
    del service.resource["metadata"]["annotations"]
    service.save()
    wait_until(lambda: service.status()["tuning"]["state"] == "active")
