"""Another version of the operator takes over, and goes again: no pod is replaced until somebody asks for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.cluster.kubectl import Kubectl
from support.cluster.load import Load
from support.cluster.rollouts import check_nothing_failed
from support.cluster.story import (
    Json,
    address,
    budgets,
    condition,
    edit_budget,
    engines,
    restarts,
    service,
    wait_condition,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess
from support.next_version import MARK

OPERATOR_OPTIONS = ("--image", "trimtab/engine:1")
NEXT_PROGRAM = (sys.executable, "-P", str(Path(__file__).parents[1] / "support" / "next_version.py"))
READY_S = 240


def test_neither_an_upgrade_of_the_operator_nor_the_way_back_replaces_a_pod(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    kubectl.apply(service(model))
    wait_ready(kubectl)
    [pod] = engines(kubectl)
    assert condition(kubectl.get("infsvc", "chat"), "UpgradeAvailable")["status"] == "False"

    def become(program: tuple[str, ...], image: str) -> None:
        running.stop()
        running.program = program
        running.options = (*running.options[:-1], image)
        running.start()

    def only_engine() -> Json:
        [found] = kubectl.items("pods")
        return found

    def check_same(expected: Json) -> None:
        found = only_engine()
        assert found["metadata"]["uid"] == expected["metadata"]["uid"]
        assert restarts(found) == 0

    own = running.program
    try:
        with Load(address(kubectl), long_tokens=800) as load:
            load.wait_served()
            become(NEXT_PROGRAM, "trimtab/engine:2")
            waiting = wait_condition(kubectl, "UpgradeAvailable", "True")
            assert condition(waiting, "Ready")["status"] == "True"
            assert waiting["status"]["resolved"]["image"] == "trimtab/engine:1"
            edit_budget(kubectl, 256)  # it drives the engines of the version before
            wait_until(lambda: budgets(running, kubectl) == [256])
            check_same(pod)

            become(own, "trimtab/engine:1")
            wait_condition(kubectl, "UpgradeAvailable", "False")
            edit_budget(kubectl, 128)
            wait_until(lambda: budgets(running, kubectl) == [128])
            check_same(pod)
            load.wait_served()
        check_nothing_failed(load)

        become(NEXT_PROGRAM, "trimtab/engine:2")
        patch = json.dumps({"spec": {"rollout": {"upgradePolicy": "Auto"}}})
        kubectl("patch", "infsvc", "chat", "--type=merge", "-p", patch)
        wait_until(lambda: len(found := kubectl.items("pods")) == 1 and found[0]["metadata"]["uid"] != pod["metadata"]["uid"],
                   READY_S)  # fmt: skip
        wait_ready(kubectl)
        newer = only_engine()
        [container] = newer["spec"]["containers"]
        assert container["image"] == "trimtab/engine:2"
        assert MARK in container["env"]
        wait_condition(kubectl, "UpgradeAvailable", "False")

        patch = json.dumps({"spec": {"rollout": {"upgradePolicy": "Manual"}}})
        kubectl("patch", "infsvc", "chat", "--type=merge", "-p", patch)
        become(own, "trimtab/engine:1")
        wait_condition(kubectl, "UpgradeAvailable", "True")
        edit_budget(kubectl, 64)
        wait_until(lambda: budgets(running, kubectl) == [64])
        check_same(newer)
    finally:
        if running.program != own:
            become(own, "trimtab/engine:1")
