"""An engine's processes die or hang: the pod comes back by itself with the live config of now, and the condition says what happened."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster.faults import engine_processes, kill
from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    BUDGET,
    LEASE_S,
    budget,
    budgets,
    condition,
    edit_budget,
    engines,
    read_back,
    restarts,
    service,
    start_run,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess

Json = dict[str, Any]


def pod_again(kubectl: Kubectl, pod: Json) -> Json:
    """The pod as it is now."""
    return kubectl.get("pod", pod["metadata"]["name"])


def wait_why(kubectl: Kubectl, pod: Json, words: str) -> Json:
    """Until condition Ready is False, names the pod and says `words` → the resource."""

    def says_why(resource: Json) -> bool:
        ready = condition(resource, "Ready")
        return ready["status"] == "False" and all(
            w in ready["message"] for w in (pod["metadata"]["name"], words)
        )

    return kubectl.wait_for(f"telling that {words}", "infsvc", "chat", condition=says_why, timeout_s=150)


def told_not_ready(kubectl: Kubectl, word: str) -> bool:
    """Whether an event about the service says so."""
    listed = kubectl.items("events", "--field-selector", "involvedObject.kind=InferenceService")
    return any(event["reason"] == "PodsNotReady" and word in event["message"] for event in listed)


def test_an_engine_whose_processes_are_killed_comes_back_with_the_live_config_of_now(
    chat: Kubectl, running: OperatorProcess
) -> None:
    edit_budget(chat, 256)
    wait_until(lambda: budgets(running, chat) == [256, 256])
    victim, other = engines(chat)
    first = restarts(victim)
    # The process that takes requests: the pod is started again at once.
    kill(engine_processes(victim).http)
    wait_until(lambda: restarts(pod_again(chat, victim)) == first + 1)
    wait_ready(chat)
    assert budget(running, victim) == 256, "a crash undoes no edit"
    # Its child, which computes: both end together. The second restart waits for ten seconds, so there is time to look.
    kill(engine_processes(victim).worker)
    found = wait_why(chat, victim, "SIGKILL")
    assert condition(found, "Ready")["reason"] == "PodsNotReady"
    assert condition(found, "Available")["status"] == "True", "the other replica serves"
    assert condition(found, "Stalled")["status"] == "False"
    wait_until(lambda: told_not_ready(chat, "SIGKILL"))
    wait_ready(chat)
    assert budget(running, victim) == 256
    assert restarts(pod_again(chat, victim)) == first + 2
    assert restarts(pod_again(chat, other)) == restarts(other)


def test_an_engine_that_restarts_in_mid_lease_comes_up_with_the_incumbent(
    chat: Kubectl, running: OperatorProcess
) -> None:
    start_run(chat, 128, 600)
    wait_until(lambda: budgets(running, chat) == [128, 128])
    _, victim = engines(chat)  # the other one is in its back-off by the test above
    before = restarts(victim)
    # The operator sleeps, so that nobody gives the engine the candidate again.
    assert running.process is not None
    running.process.send_signal(signal.SIGSTOP)
    try:
        kill(engine_processes(victim).http)
        seen: list[int] = []

        def is_back() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                seen.append(budget(running, victim))
            return bool(seen) and restarts(pod_again(chat, victim)) == before + 1

        wait_until(is_back)
        assert set(seen[-1:]) == {BUDGET}
        assert read_back(running, victim)["candidate"] is None
        # The engine that did not restart goes back when its lease ends.
        wait_until(lambda: budgets(running, chat) == [BUDGET, BUDGET], timeout_s=LEASE_S + 20)
    finally:
        running.process.send_signal(signal.SIGCONT)
    wait_until(lambda: budgets(running, chat) == [128, 128])


@pytest.mark.slow
def test_an_engine_that_hangs_but_listens_is_started_again_and_the_condition_says_so(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    made = service(model)
    made["spec"]["engine"]["extraArgs"] = ["--stall-timeout", "5s"]
    made["spec"]["rollout"]["drainTimeout"] = "1s"
    kubectl.apply(made)
    wait_ready(kubectl)
    [pod] = engines(kubectl)
    worker = engine_processes(pod).worker
    # The pod itself is asked: the Service may refuse yet, right after it is Ready, and an idle engine is not stalled.
    url = f"http://{pod['status']['podIP']}:8000"
    asking = threading.Thread(target=ask_in_vain, args=(url,), daemon=True)
    kill(worker, signal.SIGSTOP)
    asking.start()
    assert httpx.get(f"{url}/ready", timeout=60).status_code == 200, "it listens"
    found = wait_why(kubectl, pod, "engine stalled")
    assert condition(found, "Available")["status"] == "False"
    wait_ready(kubectl)
    [again] = engines(kubectl)
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]
    assert restarts(again) == 1
    wait_until(lambda: told_not_ready(kubectl, "stalled"))
    asking.join(60)


def ask_in_vain(url: str) -> None:
    """A request that gives the engine something to do."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body, timeout=120)
