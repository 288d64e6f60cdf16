"""TuningRuns with evaluator Simulator on a service with past traffic: a result, and no engine that notices."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster.kubectl import Kubectl
from support.cluster.story import address, engines, read_back, restarts, service, wait_ready, wait_until
from support.cluster_operator import OperatorProcess
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel
from trimtab_operator.cluster.tokens import Signer

Json = dict[str, Any]
RUN_S = 600.0
BURSTS, OF, TOKENS = 16, 6, 96
# One sequence at a time: who comes last in a burst waits for five others, on any machine.
TUNING = {"mode": "Off", "parameters": [{"name": "maxNumSeqs", "min": 1, "max": 16}]}


def slo(target_ms: int = 3_600_000) -> Json:
    """ITL has room; TTFT is what a queue breaks."""
    return {"ttft": f"{target_ms}ms", "itl": "1h"}


async def bursts(url: str) -> None:
    """Past traffic: each burst comes when the one before is over; before them a few long prompts, so that steps of many tokens
    are known to the step-time model: what it has not seen, a run does not trust."""
    body = {"model": "tiny", "prompt": "hello hello", "max_tokens": TOKENS, "ignore_eos": True}
    long = {**body, "prompt": "hello " * 300, "max_tokens": 8}
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        for _ in range(4):
            (await client.post(f"{url}/v1/completions", json=long)).raise_for_status()
        for _ in range(BURSTS):
            asked = [client.post(f"{url}/v1/completions", json=body) for _ in range(OF)]
            for answer in await asyncio.gather(*asked):
                answer.raise_for_status()
            await asyncio.sleep(0.05)


def lone_request_s(running: OperatorProcess, pod: Json) -> float:
    """How long the engine's own model says that one request takes by itself. HTTP comes on top, and is not simulated."""
    token = Signer.load(running.folder / "admin-key.pem").token(pod["metadata"]["uid"], "read")
    url = f"http://{pod['status']['podIP']}:8001/admin/step-model"
    told = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False).json()
    return TOKENS * StepTimeModel.from_json(told).predict(StepFeatures(1, 1, TOKENS, 0.0))


@pytest.fixture(scope="module")
def past(chat_namespace: Kubectl, running: OperatorProcess, model: Path) -> Kubectl:
    """A service whose engine has recorded bursts, with a target that a lone request keeps and a queue breaks."""
    wanted = service(model, replicas=1, tuning=TUNING, slo=slo())
    wanted["spec"]["engine"]["maxNumSeqs"] = 1
    chat_namespace.apply(wanted)
    wait_ready(chat_namespace, timeout_s=150)
    asyncio.run(bursts(address(chat_namespace)))
    [pod] = engines(chat_namespace)
    target_ms = max(1, round(1500 * lone_request_s(running, pod)))
    patch(chat_namespace, slo=slo(target_ms))
    wait_until(
        lambda: (
            [c["ttft_s"] for c in live(running, chat_namespace)["config"]["slo"]["classes"]]
            == [target_ms / 1000]
        )
    )
    # One request under the targets in force, which the engine counts.
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    url = f"{address(chat_namespace)}/v1/completions"
    httpx.post(url, json=body, timeout=60.0, trust_env=False).raise_for_status()
    return chat_namespace


def patch(kubectl: Kubectl, **spec: Any) -> None:
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps({"spec": spec}))


def live(running: OperatorProcess, kubectl: Kubectl) -> Json:
    """What is in force in the engine, by itself."""
    [pod] = engines(kubectl)
    found: Json = read_back(running, pod)["in_force"]
    return found


def run_to_its_end(kubectl: Kubectl, name: str, **spec: Any) -> Json:
    run = {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "TuningRun",
        "metadata": {"name": name},
        "spec": {"service": "chat", "evaluator": "Simulator", "maxTrials": 6, "timeLimit": "15m", **spec},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(run))
    ended = ("Succeeded", "Failed", "Stopped")
    found: Json = kubectl.wait_for(
        "over", "trun", name, timeout_s=RUN_S, condition=lambda r: r.get("status", {}).get("phase") in ended
    )
    return found


def test_a_simulated_run_finds_a_better_config_and_no_engine_notices(
    past: Kubectl, running: OperatorProcess
) -> None:
    [pod] = engines(past)
    before = live(running, past)
    found = run_to_its_end(past, "try")
    status = found["status"]
    result = status["result"]
    assert (status["phase"], result["verdict"]) == ("Succeeded", "Recommended"), json.dumps(status, indent=1)
    assert result["config"]["maxNumSeqs"] > 1
    assert result["after"]["violated"] < result["before"]["violated"]
    assert result["before"]["p99TtftSeconds"] > result["after"]["p99TtftSeconds"]
    assert "simulated, no engine ran it: chosen on" in result["message"]
    assert "step times of engine " + pod["metadata"]["name"] in result["message"]
    assert "targets missed in 1 requests under what is in force" in result["message"]
    assert 1 <= len(status["trials"]) <= 6
    assert all(trial["requests"] > 0 for trial in status["trials"])
    assert "applied" not in status
    # Mode Off keeps no recommendation, and the engine has heard of nothing.
    assert live(running, past) == before
    assert "recommendation" not in past.get("infsvc", "chat")["status"].get("tuning", {})
    assert {p["metadata"]["uid"]: restarts(p) for p in engines(past)} == {pod["metadata"]["uid"]: 0}


def test_in_mode_recommend_it_is_kept_as_a_recommendation_that_is_not_in_force(
    past: Kubectl, running: OperatorProcess
) -> None:
    patch(past, tuning={**TUNING, "mode": "Recommend"})
    before = live(running, past)
    rows = "".join(
        json.dumps({"arrival_s": burst * 2.0 + k * 0.001, "prompt_tokens": 12, "output_tokens": TOKENS})
        + "\n"
        for burst in range(BURSTS)
        for k in range(OF)
    )
    past.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "bursts"}, "data": {"t.jsonl": rows}}
    )
    traced = {"type": "Trace", "traceRef": {"name": "bursts", "key": "t.jsonl"}}
    result = run_to_its_end(past, "traced", workload=traced)["status"]["result"]
    assert result["verdict"] == "Recommended", json.dumps(result, indent=1)
    assert f"confirmed on {BURSTS * OF // 2} later ones" in result["message"]
    kept = past.wait_for(
        "recommendation", "infsvc", "chat", condition=lambda s: s["status"].get("tuning", {}).get("recommendation", {}).get("run") == "traced"
    )  # fmt: skip
    assert (
        kept["status"]["tuning"]["recommendation"]["values"]["maxNumSeqs"] == result["config"]["maxNumSeqs"]
    )
    assert live(running, past) == before
