"""What a Simulator run makes of what engines tell: the server that is simulated, and whose step times count."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import kubernetes.client
import pytest

from support.services import resource, run_resource
from support.simulations import step_time
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.cluster.kube import Kube
from trimtab_tuner.cluster.objects import run_of, service_of
from trimtab_tuner.cluster.plan import Plan, Work
from trimtab_tuner.cluster.pods import Pod
from trimtab_tuner.cluster.records import Told
from trimtab_tuner.cluster.simulated import counted, plan, server, step_model
from trimtab_tuner.errors import InputError, ServerError
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.exposition import parse
from trimtab_tuner.metrics.reading import Reading
from trimtab_tuner.target import Target


def told(
    name: str,
    *,
    steps: int | None = 100,
    base: float = 0.01,
    score: dict[str, Any] | None = None,
    **info: Any,
) -> Told:
    facts = {"num_blocks": 500, "block_size": 16, "max_model_len": 2048, **info}
    model = None if steps is None else step_time(base).to_json()
    about = {"num_steps": steps, "error_median": 0.02, "error_p95": 0.08} if score is None else score
    return Told(Pod(name, name, "", ""), (), 16, model, facts, about)


def work(workload: str = "Recorded", trace: Path | None = None) -> Work:
    """Of a run that asks nobody."""
    built, served = run_resource(evaluator="Simulator", maxTrials=7), resource()
    built["metadata"]["uid"], served["metadata"]["uid"] = "u", "s"
    client = httpx.AsyncClient()
    return Work(
        namespace="team",
        run=dataclasses.replace(run_of(built), workload=workload),
        service=service_of(served),
        incumbent=LiveConfig(),
        kube=Kube(kubernetes.client.Configuration()),
        client=client,
        target=Target(client, "http://127.0.0.1:9"),
        paused=never,
        time_left_s=600.0,
        trace=trace,
    )


async def never() -> str | None:
    return None


def records(count: int) -> tuple[dict[str, Any], ...]:
    return tuple({"arrival_s": 1000.0 + n, "prompt_tokens": 40, "output_tokens": 8} for n in range(count))


def measured(made: Plan) -> Measurement:
    """What the incumbent's first measurement says."""
    return asyncio.run(made.evaluator.evaluate(None, baseline=None, on_progress=lambda _: None))


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ([("a", None, 200)], "no engine has run enough steps yet"),
        (
            [("a", 100, 0), ("b", 50, 0)],
            "no engine of chat has recorded a request yet, at least 80 are needed (half to choose by, half to confirm); "
            "send it traffic first, then create another run",
        ),
        (
            [("a", 100, 40), ("b", 50, 39)],
            "recorded by 2 engines of chat: 79 requests, at least 80 are needed",
        ),
        ([("a", 100, 1)], "recorded by 1 engine of chat: 1 requests, at least 80 are needed"),
    ],
)
def test_a_run_that_can_find_out_nothing_says_why(
    engines: list[tuple[str, int | None, int]], said: str
) -> None:
    made = plan(
        work(),
        [dataclasses.replace(told(name, steps=steps), records=records(n)) for name, steps, n in engines],
    )
    found = measured(made)
    assert found.status == "unknown"
    assert said in found.reason
    assert (made.touches_engines, made.caveat) == (False, "")


def test_requests_go_to_the_engine_that_had_them_and_a_traces_in_turn(tmp_path: Path) -> None:
    engines = [dataclasses.replace(told(name), records=records(n)) for name, n in (("a", 60), ("b", 40))]
    made = plan(work(), engines)
    assert (made.facts["routing"], made.facts["replicas"], made.facts["requests"]) == ("as recorded", 2, 100)
    assert made.options.max_trials == 9  # seven candidates, the incumbent and the confirmation
    assert not made.options.apply
    found = measured(made)
    assert found.status == "measured"
    assert isinstance(found.reading, Reading)
    assert (found.reading.n, found.reading.targets) == (50, 2)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records(90)))
    traced = plan(work("Trace", path), engines)
    assert (traced.facts["routing"], traced.facts["requests"]) == ("round-robin", 90)
    with pytest.raises(InputError, match="traceRef"):
        plan(work("Trace"), engines)


def test_the_model_that_saw_most_steps_counts_and_says_how_good_it_is() -> None:
    model = step_model([told("a", steps=None), told("b", steps=50), told("c", steps=4000, base=0.02)])
    assert model is not None
    assert model.model == step_time(0.02)
    assert model.describe() == "step times of engine c (median error 2.0%, p95 8.0%, over 4,000 steps)"
    fresh = step_model([told("d", score={"num_steps": 0})])
    assert fresh is not None
    assert fresh.describe() == "step times of engine d (provisional: every step so far waited for a CPU)"
    assert step_model([told("a", steps=None)]) is None
    with pytest.raises(InputError, match="b: step-model"):
        step_model([Told(Pod("b", "b", "", ""), (), 16, {"format": 9}, {})])


def test_the_smallest_pool_is_simulated_with_the_flags_that_engines_tell() -> None:
    flags: dict[str, Any] = {
        "enable_prefix_caching": False,
        "prefill_first": True,
        "shed_late": True,
        "fair_tenants": True,
        "num_swap_blocks": 7,
        "swap_block_s": 0.5,
    }
    found = server("chat", LiveConfig(), [told("a"), told("b", num_blocks=300, **flags)])
    assert (found.name, found.num_blocks, found.block_size, found.max_model_len) == ("chat", 300, 16, 2048)
    assert {name: getattr(found, name) for name in flags} == flags
    # An engine of the version before tells none of them.
    assert server("chat", LiveConfig(), [told("a")]).enable_prefix_caching


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", "many"),
        ("num_blocks", 10**12),  # each would take memory
        ("num_swap_blocks", 10**12),
        ("max_model_len", 10**30),
        ("swap_block_s", "x"),
        ("swap_block_s", [1]),
        ("swap_block_s", -1.0),
        ("swap_block_s", float("nan")),
        ("swap_block_s", float("inf")),
    ],
)
def test_facts_that_no_engine_has_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ServerError, match=f"/admin/info: {name}"):
        server("chat", LiveConfig(), [told("a", **{name: value})])


def test_engines_counts_are_those_of_the_generation_in_force() -> None:
    def engine(generation: int, late: int) -> str:
        counts = [
            ("ttft", "met", 4, 7), ("ttft", "violated", 4, late), ("itl", "violated", 4, 2), ("ttft", "violated", 3, 90),
        ]  # fmt: skip
        rows = [
            f'trimtab_slo_requests_total{{slo_class="default",slo="{slo}",outcome="{outcome}",generation="{g}"}} {n}'
            for slo, outcome, g, n in counts
        ]
        return "\n".join([f"trimtab_live_config_generation {generation}", *rows]) + "\n"

    assert counted([parse(engine(4, 3)), parse(engine(4, 1))]) == (8, 18)
    assert counted([parse(engine(5, 3))]) == (0, 0)
    assert counted([]) == (0, 0)
    odd = engine(4, 3).replace('"} 7', '"} NaN').replace('"} 3', '"} +Inf')
    assert counted([parse(odd)]) == (2, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 10**400, "5", True])
def test_a_score_that_is_none_is_not_known(value: Any) -> None:
    score = {"num_steps": value, "error_median": value, "error_p95": value}
    found = step_model([told("a", score=score)])
    assert found is not None
    assert (found.num_steps, found.error_median, found.error_p95) == (None, None, None)


def test_a_model_of_numbers_without_end_is_refused_by_name() -> None:
    model = {**step_time(0.01).to_json(), "error_high": 10**400}
    with pytest.raises(InputError, match="a: step-model"):
        step_model([Told(Pod("a", "a", "", ""), (), 16, model, {})])
