"""Shadow runs with several engines of their own: a trace goes to these alone, and what is lost, held or without room is said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import burst
from support.cluster.burst import INTERACTIVE
from support.cluster.faults import engine_processes, kill
from support.cluster.kubectl import Kubectl
from support.cluster.manifests import SLEEP, config_map, phase_is, pod
from support.cluster.shadows import (
    MINE,
    answered,
    create,
    endpoints_seen,
    ready_shadows,
    shadow_left,
    shadow_pods,
    wait_over,
    wait_reason,
    wait_tried,
)
from support.cluster.story import (
    Json,
    address,
    engines,
    read_back,
    restarts,
    service,
    wait_ready,
    wait_until,
)
from support.cluster.traffic import Traffic
from support.cluster_operator import OperatorProcess
from trimtab_operator import names

GPU = "nvidia.com/gpu"
RUN_S = 600.0
#: Two nodes of two GPUs: two engines of the service's, and two of a run's, are all that has room.
TUNING = {"mode": "Recommend", "limits": {"extraReplicas": 2, "maxThroughputLoss": "90%"},
          "parameters": [{"name": "schedulingPolicy", "choices": ["fcfs", "sla-aware"]}]}  # fmt: skip
BURSTS = 8  # of the trace
TRACE = {"type": "Trace", "traceRef": {"name": "bursts", "key": "bursts.jsonl"}}


def slo(target_ms: int = 3_600_000) -> Json:
    """One class in a hurry; everybody else has an hour."""
    hurry = {"name": INTERACTIVE, "ttft": f"{target_ms}ms"}
    return {"ttft": "1h", "itl": "1h", "window": "5m", "classes": [hurry]}


def trace(shape: burst.Shape) -> str:
    """Bursts of requests that nobody waits for, at the end of each some that somebody does."""
    lines = []
    for turn in range(BURSTS):
        for number in range(shape.patient + shape.hurried):
            hurried = number >= shape.patient
            line: Json = {"arrival_s": turn * burst.BURST_S + 0.001 * number, "prompt_tokens": 8,
                          "output_tokens": shape.hurried_tokens if hurried else shape.tokens}  # fmt: skip
            lines.append(json.dumps(line | ({"slo_class": INTERACTIVE} if hurried else {})))
    return "\n".join(lines)


def requests_of(kubectl: Kubectl) -> int:
    """How many the trace has."""
    return len(kubectl.get("configmap", "bursts")["data"]["bursts.jsonl"].splitlines())


def targets_s(running: OperatorProcess, kubectl: Kubectl) -> set[float]:
    """The interactive class' target in each engine of the service."""
    configs = [read_back(running, own)["in_force"]["config"] for own in engines(kubectl)]
    return {c["ttft_s"] for config in configs for c in config["slo"]["classes"] if c["name"] == INTERACTIVE}


@pytest.fixture(scope="module")
def served(chat_namespace: Kubectl, running: OperatorProcess, model: Path) -> Kubectl:
    """Two replicas that hold a GPU each and take one request at a time, and a trace that is made for how fast they are."""
    wanted = service(model, replicas=2, tuning=TUNING, slo=slo())
    wanted["spec"]["engine"]["maxNumSeqs"] = 1
    wanted["spec"]["podTemplate"]["spec"]["containers"][0]["resources"] = {"limits": {GPU: 1}}
    chat_namespace.apply(wanted)
    wait_ready(chat_namespace, timeout_s=150)
    url = address(chat_namespace)
    shape = burst.sized(url, burst.Shape())
    target_ms = round(1000 * burst.TARGET_S)
    patch = {"spec": {"slo": slo(target_ms)}}
    chat_namespace("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps(patch))
    chat_namespace.apply(config_map("bursts", **{"bursts.jsonl": trace(shape)}))
    wait_until(lambda: targets_s(running, chat_namespace) == {target_ms / 1000})
    return chat_namespace


@pytest.fixture
def chat(served: Kubectl) -> Iterator[Kubectl]:
    """The service with both its engines and its trace, without anything of the test before."""
    served("scale", "infsvc", "chat", "--replicas=2")
    wait_until(lambda: len(engines(served)) == 2, 150)
    yield served
    served("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}-")
    served("delete", "trun", "--all")
    served("delete", "pods", "-l", "app=stranger", "--now")
    wait_until(lambda: shadow_left(served) == [], 60, "the shadow outlives its run")


def strangers(kubectl: Kubectl, count: int) -> None:
    """Pods of somebody else's that hold that many GPUs."""
    made = [
        pod(f"stranger-{n}", SLEEP, container={"resources": {"limits": {GPU: "1"}}}) for n in range(count)
    ]
    for one in made:
        one["metadata"]["labels"] = {"app": "stranger"}
    kubectl.apply(*made)
    for one in made:
        kubectl.wait_for("running", "pod", one["metadata"]["name"], condition=phase_is("Running"))


def jobs(kubectl: Kubectl, run: str) -> list[Json]:
    """The run's worker, as far as it was made."""
    return kubectl.items("jobs", "-l", f"{names.LABEL_RUN}={run}")


def noticed(running: OperatorProcess, kubectl: Kubectl) -> dict[str, tuple[Json, int]]:
    """What the service's engines know of live configs, and how often they restarted, by UID."""
    return {own["metadata"]["uid"]: (read_back(running, own), restarts(own)) for own in engines(kubectl)}


def test_a_trace_is_replayed_to_all_added_engines_alone_and_one_that_is_lost_costs_a_trial(
    chat: Kubectl, running: OperatorProcess
) -> None:
    own = engines(chat)
    before, asked = noticed(running, chat), sum(map(answered, own))
    strangers(chat, 1)
    with endpoints_seen(chat) as seen, Traffic(address(chat)) as traffic:
        create(chat, "spread", maxTrials=2, workload=TRACE)
        # There is room for one of the two.
        said = wait_reason(chat, "spread", "Ready", names.SHADOW_NOT_READY, "Insufficient nvidia.com/gpu")
        assert re.match(r"[01] of 2 shadow pods are ready; spread-shadow-", said)
        assert jobs(chat, "spread") == [], "who measures starts when they are there"
        chat("delete", "pod", "stranger-0", "--now")
        run = wait_tried(chat, "spread", on=2, timeout_s=RUN_S)
        first, second = ready_shadows(chat)
        trying = [read_back(running, one)["candidate"] for one in (first, second)]
        number = run["status"]["applied"]["generation"]
        assert [candidate["generation"] for candidate in trying] == [number, number]
        # The incumbent's replay is over. Each had its share of it.
        shares = [answered(first), answered(second)]
        assert sum(shares) >= requests_of(chat)
        assert min(shares) > sum(shares) / 4, shares
        wait_until(lambda: answered(first) + answered(second) > sum(shares) + 5, what="no replay")
        chat("delete", "pod", first["metadata"]["name"], "--now", "--wait=false")
        said = wait_reason(chat, "spread", "Ready", names.SHADOW_NOT_READY, "1 of 2 shadow pods are ready")
        over = wait_over(chat, "spread", RUN_S)
        wait_until(lambda: shadow_left(chat) == [], 60, "the shadow stays")
    traffic.check()
    told = json.dumps(over, indent=1)
    lost, tried = over["trials"]
    assert (lost["state"], lost["message"]) == ("Failed", "1 of 2 engines are ready"), told
    assert tried["state"] == "Complete", told
    assert tried["requests"] >= requests_of(chat), told
    result = over["result"]
    assert (over["phase"], result["verdict"]) == ("Succeeded", "Recommended"), told
    assert result["config"]["schedulingPolicy"] == "sla-aware", told
    assert result["before"]["violated"] > result["after"]["violated"], told
    assert [result[side]["pods"] for side in ("before", "after")] == [2, 2], told
    # The service had its own traffic and nothing else, and heard of nothing.
    assert seen == {one["metadata"]["name"] for one in own}
    assert noticed(running, chat) == before
    wait_until(lambda: sum(map(answered, own)) == asked + traffic.count)
    # What only the garbage collector may remove goes with the run.
    assert len(chat.items("secrets", "-l", MINE)) == 1
    chat("delete", "trun", "spread")
    wait_until(lambda: chat.items("secrets", "-l", MINE) == [], 60, "the key outlives its run")


@pytest.mark.slow
def test_a_run_finds_its_engines_again_after_a_pause_and_says_that_one_was_killed(
    chat: Kubectl, running: OperatorProcess
) -> None:
    chat("scale", "infsvc", "chat", "--replicas=1")
    wait_until(lambda: len(engines(chat)) == 1, 120)
    before = noticed(running, chat)
    create(chat, "alone", maxTrials=1, workload=TRACE)
    wait_tried(chat, "alone", on=1, timeout_s=RUN_S)
    # Two are allowed, and never more than the service has.
    [added] = shadow_pods(chat)
    incumbents = answered(added)
    wait_until(lambda: answered(added) > incumbents + 5, what="no replay")
    where = chat.get("service", "alone-shadow")["spec"]["clusterIP"]
    chat("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}=paused")
    wait_until(lambda: shadow_pods(chat) == [], 60, "a paused run keeps its engines")
    chat.wait_for("cut off", "trun", "alone",
                  condition=lambda r: not r["status"].get("trials") and "applied" not in r["status"])  # fmt: skip
    # Its number is that of its beginning, and its worker knows one address.
    chat("scale", "infsvc", "chat", "--replicas=2")
    chat("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}-")
    wait_tried(chat, "alone", on=1, timeout_s=RUN_S)
    [again] = ready_shadows(chat)
    assert again["metadata"]["uid"] != added["metadata"]["uid"]
    assert chat.get("service", "alone-shadow")["spec"]["clusterIP"] == where
    incumbents = answered(again)
    wait_until(lambda: answered(again) > incumbents + 5, what="no replay")
    kill(engine_processes(again).worker)
    lacks = f"0 of 1 shadow pods are ready; {again['metadata']['name']}: "
    assert "SIGKILL" in wait_reason(chat, "alone", "Ready", names.SHADOW_NOT_READY, lacks)
    over = wait_over(chat, "alone", RUN_S)
    told = json.dumps(over, indent=1)
    # What the pause cut short does not count, whatever its worker saw first of it; a lost engine does.
    [killed] = over["trials"]
    # It was missing, or back before anybody looked.
    assert killed["state"] == "Failed", told
    assert re.search(r"0 of 1 engines are ready|restarted inside the window", killed["message"]), told
    assert (over["phase"], over["result"]["verdict"]) == ("Succeeded", "Inconclusive"), told
    assert killed["message"] in over["result"]["message"], told
    wait_until(lambda: shadow_left(chat) == [], 60, "the shadow stays")
    assert before.items() <= noticed(running, chat).items()


@pytest.mark.slow
def test_a_run_whose_engines_never_find_room_ends_at_its_time_limit_and_says_why(
    chat: Kubectl, running: OperatorProcess
) -> None:
    chat("scale", "infsvc", "chat", "--replicas=1")
    wait_until(lambda: len(chat.items("pods", "-l", f"{names.LABEL_COMPONENT}=engine")) == 1, 120)
    before = noticed(running, chat)
    strangers(chat, 3)
    with Traffic(address(chat)) as traffic:
        create(chat, "full", timeLimit="1m", workload=TRACE)
        said = wait_reason(chat, "full", "Ready", names.SHADOW_NOT_READY, "Insufficient nvidia.com/gpu")
        assert said.startswith("0 of 1 shadow pods are ready; full-shadow-")
        over = wait_over(chat, "full", RUN_S)
        wait_until(lambda: shadow_left(chat) == [], 60, "the shadow stays")
    traffic.check()
    assert over["phase"] == "Stopped"
    ended = wait_reason(chat, "full", "Stalled", names.TIME_LIMIT_REACHED)
    assert ended.startswith("spec.timeLimit (1m) is over without a result; until then 0 of 1 shadow pods")
    assert "Insufficient nvidia.com/gpu" in ended
    assert jobs(chat, "full") == []
    assert noticed(running, chat) == before
