"""The API server goes away, or the way to it: the operator goes on by itself when it is back, and pods serve throughout.

The operator of these tests reaches the API server through a relay that can be broken. It looks at services by itself only every
ten minutes, so what happens sooner was brought by its watches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from support.cluster.cluster import Cluster
from support.cluster.control_plane import API_PORT
from support.cluster.faults import admin_port_cut, api_server_away, read_back_inside
from support.cluster.kubectl import Kubectl
from support.cluster.relay import BreakableRelay
from support.cluster.story import (
    BUDGET,
    LEASE_S,
    address,
    budget,
    budgets,
    condition,
    edit_budget,
    engines,
    restarts,
    start_run,
    wait_condition,
    wait_until,
)
from support.cluster.traffic import Traffic
from support.cluster_operator import OperatorProcess, operator
from trimtab_operator import crds

AWAY_S = 60.0
MARGIN_S = 20.0  # for a machine that is busy otherwise
SILENCE_S = 70.0  # how long a watch may say nothing before it is opened anew


@pytest.fixture(scope="module")
def relay() -> Iterator[BreakableRelay]:
    """Between operator and API server."""
    with BreakableRelay("127.0.0.1", API_PORT) as carrying:
        yield carrying


@pytest.fixture(scope="module")
def running(
    cluster: Cluster, relay: BreakableRelay, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """The operator behind the relay."""
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    folder = tmp_path_factory.mktemp("operator")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.touch(mode=0o600)
    direct, relayed = f"https://127.0.0.1:{API_PORT}", f"https://127.0.0.1:{relay.port}"
    kubeconfig.write_text(cluster.kubeconfig.read_text().replace(direct, relayed))
    with operator(kubeconfig, folder, "relayed", "--all-namespaces", "--resync", "600",
                  "--operator-namespace", "default") as started:  # fmt: skip
        yield started


def test_an_operator_whose_connections_are_cut_opens_new_ones(
    chat: Kubectl, running: OperatorProcess, relay: BreakableRelay
) -> None:
    with Traffic(address(chat)) as traffic:
        for tokens in (256, 300):
            relay.cut()
            edit_budget(chat, tokens)
            wait_until(partial(in_force_everywhere, running, chat, tokens))
            # A child too: its watch is another one.
            chat("delete", "networkpolicy", "chat-engine")
            wait_until(lambda: len(chat.items("networkpolicies")) == 1)
    traffic.check()
    assert lives_on(running)


@pytest.mark.slow
def test_an_operator_whose_connections_fall_silent_opens_new_ones(
    chat: Kubectl, running: OperatorProcess, relay: BreakableRelay
) -> None:
    with Traffic(address(chat)) as traffic:
        relay.freeze()
        edit_budget(chat, 256)
        wait_until(lambda: budgets(running, chat) == [256, 256], timeout_s=SILENCE_S + 2 * MARGIN_S)
        chat("delete", "networkpolicy", "chat-engine")
        wait_until(lambda: len(chat.items("networkpolicies")) == 1, timeout_s=SILENCE_S + 2 * MARGIN_S)
        edit_budget(chat, 300)
        wait_until(lambda: budgets(running, chat) == [300, 300])
    traffic.check()
    assert lives_on(running)


@pytest.mark.slow
def test_an_operator_that_cannot_reach_the_api_server_lets_a_candidate_lapse(
    chat: Kubectl, running: OperatorProcess, relay: BreakableRelay
) -> None:
    start_run(chat, 128, 600)
    wait_until(lambda: budgets(running, chat) == [128, 128])
    pods = engines(chat)
    with Traffic(address(chat)) as traffic:
        relay.refuse()
        try:
            # Not only once: whoever cannot read what its run wants must not renew either.
            wait_until(lambda: [budget(running, p) for p in pods] == [BUDGET, BUDGET], LEASE_S + MARGIN_S)
            edit_budget(chat, 256)
            traffic.wait_more(10)
            assert [budget(running, pod) for pod in pods] == [BUDGET, BUDGET]
        finally:
            relay.carry()
        # The edit was made while it could not see it. It ends the candidate, since a person's edit wins.
        wait_until(lambda: budgets(running, chat) == [256, 256])
    traffic.check()
    assert lives_on(running)


@pytest.mark.slow
def test_an_operator_cut_off_from_one_pod_says_so_and_that_pod_lets_a_candidate_lapse(
    chat: Kubectl, running: OperatorProcess
) -> None:
    start_run(chat, 128, 600)
    wait_until(lambda: budgets(running, chat) == [128, 128])
    lost, reached = engines(chat)
    with Traffic(address(chat)) as traffic, admin_port_cut(lost):
        wait_until(lambda: in_force(running, lost) == BUDGET, LEASE_S + MARGIN_S)
        assert budget(running, reached) == 128, "the other one goes on"
        edit_budget(chat, 256)
        wait_until(lambda: budget(running, reached) == 256)
        found = wait_condition(chat, "ConfigApplied", "False", "PartiallyApplied")
        assert condition(found, "Ready")["status"] == "True", "Ready never depends on live config"
        # The mounted file reaches the engine on another way than the push.
        wait_until(lambda: in_force(running, lost) == 256)
    wait_condition(chat, "ConfigApplied", "True")
    traffic.check()
    assert [restarts(pod) for pod in engines(chat)] == [0, 0]


@pytest.mark.slow
def test_an_api_server_that_is_away_for_a_minute_stops_nothing_and_loses_nothing(
    chat: Kubectl, cluster: Cluster, running: OperatorProcess
) -> None:
    start_run(chat, 128, 600)
    wait_until(lambda: budgets(running, chat) == [128, 128])
    pods = engines(chat)
    with Traffic(address(chat)) as traffic:
        began = time.monotonic()
        with api_server_away(cluster):
            wait_until(lambda: [budget(running, p) for p in pods] == [BUDGET, BUDGET], LEASE_S + MARGIN_S)
            while time.monotonic() - began < AWAY_S:
                traffic.wait_more()
        # The run is still there, and nobody has edited anything: its candidate is tried again.
        wait_until(lambda: budgets(running, chat) == [128, 128], timeout_s=90)
        edit_budget(chat, 256)
        wait_until(lambda: budgets(running, chat) == [256, 256])
        traffic.wait_more()
    traffic.check()
    assert lives_on(running)
    now = engines(chat)
    assert {p["metadata"]["uid"]: condition(p, "Ready") for p in now} == {
        p["metadata"]["uid"]: condition(p, "Ready") for p in pods
    }, "the same pods, ready all the time"
    assert [restarts(pod) for pod in now] == [0, 0]


@pytest.mark.slow
def test_an_edit_made_just_before_the_api_server_goes_is_not_lost(
    chat: Kubectl, cluster: Cluster, running: OperatorProcess
) -> None:
    with Traffic(address(chat)) as traffic:
        edit_budget(chat, 256)
        with api_server_away(cluster):
            traffic.wait_more()
        wait_until(lambda: budgets(running, chat) == [256, 256], timeout_s=90)
    traffic.check()


def in_force_everywhere(running: OperatorProcess, chat: Kubectl, tokens: int) -> bool:
    """Whether both engines have this budget in force."""
    return budgets(running, chat) == [tokens, tokens]


def in_force(running: OperatorProcess, pod: dict[str, object]) -> int:
    """The budget in force, asked from within the pod."""
    found: int = read_back_inside(running, pod)["in_force"]["config"]["max_num_batched_tokens"]
    return found


def lives_on(running: OperatorProcess) -> bool:
    """Whether this process is still the one that was started, and well."""
    return running.process is not None and running.process.poll() is None and running.healthy()
