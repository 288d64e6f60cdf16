"""The operator dies, sleeps, or is there twice: pods serve on, no candidate outlives its lease, and only one operator writes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    BUDGET,
    LEASE_S,
    address,
    budget,
    budgets,
    edit_budget,
    engines,
    read_back,
    restarts,
    start_run,
    wait_ready,
    wait_until,
)
from support.cluster.traffic import Traffic
from support.cluster_operator import OperatorProcess, operator

TAKE_OVER_S = 15.0 + 3.0  # the Lease's duration, and how often a follower looks
MARGIN_S = 20.0  # for a machine that is busy otherwise


def candidate_in_force(running: OperatorProcess, chat: Kubectl, tokens: int = 128) -> None:
    """Both engines try a candidate, for longer than any of these tests takes."""
    start_run(chat, tokens, 600)
    wait_until(lambda: budgets(running, chat) == [tokens, tokens])


def wait_incumbents(running: OperatorProcess, pods: list[dict[str, object]]) -> None:
    """Until both engines have ended their candidate by themselves: at the end of its lease, neither sooner nor later."""
    ends = [read_back(running, pod)["candidate"]["until"] for pod in pods]
    wait_until(
        lambda: [budget(running, pod) for pod in pods] == [BUDGET, BUDGET],
        timeout_s=LEASE_S + MARGIN_S,
        what="a candidate outlived its lease",
    )
    assert time.time() >= min(ends) - 2, "it was the lease that ended it"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("killed", id="killed"),
        pytest.param("uninstalled", id="uninstalled", marks=pytest.mark.slow),
    ],
)
def test_an_operator_that_goes_in_mid_lease_leaves_no_candidate_behind(
    chat: Kubectl, cluster: Cluster, running: OperatorProcess, how: str
) -> None:
    candidate_in_force(running, chat)
    pods = engines(chat)
    with Traffic(address(chat)) as traffic:
        if how == "killed":
            running.stop(signal.SIGKILL)
        else:  # what `helm uninstall` leaves: the CRDs, and with them services, runs and their children
            assert running.stop() == 0
            cluster.kubectl("delete", "lease", "trimtab-operator")
        try:
            wait_incumbents(running, pods)
            traffic.wait_more()
        finally:
            running.start()
        # The next life goes on with the run, under a number that no engine has seen.
        wait_until(lambda: budgets(running, chat) == [128, 128])
    traffic.check()
    assert [restarts(pod) for pod in engines(chat)] == [0, 0]
    assert {p["metadata"]["uid"] for p in engines(chat)} == {p["metadata"]["uid"] for p in pods}


def test_a_run_that_is_deleted_in_mid_lease_ends_its_candidate(
    chat: Kubectl, running: OperatorProcess
) -> None:
    candidate_in_force(running, chat)
    chat("delete", "trun", "chat-1")
    wait_until(
        lambda: budgets(running, chat) == [BUDGET, BUDGET],
        timeout_s=LEASE_S - 5,
        what="ended by its lease at best, not by the deletion",
    )


def test_an_operator_that_dies_in_mid_rollout_finishes_it_in_its_next_life(
    chat: Kubectl, running: OperatorProcess
) -> None:
    before = {pod["metadata"]["uid"] for pod in engines(chat)}
    with Traffic(address(chat)) as traffic:
        chat("patch", "infsvc", "chat", "--type=merge", "-p", '{"spec": {"engine": {"maxModelLen": 512}}}')
        chat.wait_for("begun", "deployment", "chat-engine",
                      condition=lambda d: d["status"].get("updatedReplicas", 0) == 1)  # fmt: skip
        running.stop(signal.SIGKILL)
        try:
            traffic.wait_more()
        finally:
            running.start()
        wait_ready(chat, timeout_s=150)
        traffic.wait_more()
    traffic.check()
    assert not before & {pod["metadata"]["uid"] for pod in engines(chat)}


def test_of_two_operators_only_one_writes_whichever_dies_or_sleeps(
    chat: Kubectl, cluster: Cluster, running: OperatorProcess, tmp_path: Path
) -> None:
    with (
        operator(cluster.kubeconfig, running.folder, "second", *running.options) as second,
        Traffic(address(chat)) as traffic,
    ):
        assert (leads(running), leads(second)) == (True, False)
        edit_budget(chat, 256)
        wait_until(lambda: budgets(running, chat) == [256, 256])
        assert second.writes() == 0
        assert second.metric("trimtab_operator_reconcile_total") == 0
        wait_until(
            lambda: second.metric("trimtab_operator_queue_length") == 0, what="a follower owes no look"
        )
        # Asleep: a machine that stands still for a while. It must not believe that it still leads when it wakes.
        before = settled_writes(running)
        assert running.process is not None
        running.process.send_signal(signal.SIGSTOP)
        try:
            assert wait_until(lambda: leads(second), TAKE_OVER_S + MARGIN_S) > 5, (
                "not while the Lease is valid"
            )
            edit_budget(chat, 200)
            wait_until(lambda: budgets(second, chat) == [200, 200])
        finally:
            running.process.send_signal(signal.SIGCONT)
        wait_until(lambda: not leads(running))
        assert running.metric("trimtab_operator_services{") == 0, "it would count what the other one counts"
        edit_budget(chat, 300)
        wait_until(lambda: budgets(second, chat) == [300, 300])
        assert running.writes() == before
        # Dead: the other one takes over within the Lease's duration.
        second.stop(signal.SIGKILL)
        edit_budget(chat, 400)
        wait_until(lambda: leads(running), TAKE_OVER_S + MARGIN_S)
        wait_until(lambda: budgets(running, chat) == [400, 400])
        # Ended in order: the Lease is handed over, not waited for.
        second.start()
        assert running.stop() == 0
        lease = cluster.kubectl.get("lease", "trimtab-operator")["spec"]
        assert lease.get("holderIdentity", "") in ("", "second"), "it still stands for the one that has ended"
        try:
            assert wait_until(lambda: leads(second)) < 12
            assert second.stop() == 0
        finally:
            running.start()
        wait_until(lambda: leads(running))
    traffic.check()
    assert [restarts(pod) for pod in engines(chat)] == [0, 0]


def leads(process: OperatorProcess) -> bool:
    """Whether it holds the Lease, by its own account."""
    return process.metric("trimtab_operator_leading") == 1


def settled_writes(process: OperatorProcess) -> float:
    """How much it has written, once it has written all that it wants to say."""
    counts = [-1.0]

    def settled() -> bool:
        time.sleep(2)
        counts.append(process.writes())
        return counts[-1] == counts[-2]

    wait_until(settled)
    return counts[-1]
