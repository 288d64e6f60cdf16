"""A whole test cluster: control plane and nodes; or a connection to one that is there already.

`start` runs inside a namespace (`support.cluster.namespace`). Tests get it by the fixtures of `tests/cluster/conftest.py`, people by
`make cluster`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.cluster import binaries, host_tools
from support.cluster.binaries import Unavailable
from support.cluster.children import Child
from support.cluster.control_plane import PROXY_NODE, ControlPlane
from support.cluster.kubectl import Kubectl

_NODE_START_S = 120.0
ALLOWED_CONTEXTS = "TRIMTAB_ALLOWED_CONTEXTS"


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """One node to start. `fake`: pods are answered by one process, none is started."""

    name: str
    gpus: int = 2
    fake: bool = False
    arguments: tuple[str, ...] = ()  # further ones for the node agent


DEFAULT_NODES = (NodeOptions("node-a"), NodeOptions("node-b"))


class Cluster:
    """A running cluster of ours."""

    def __init__(self, control_plane: ControlPlane, programs: Path, folder: Path) -> None:
        self.control_plane = control_plane
        self.folder = folder
        self.kubeconfig = control_plane.kubeconfig
        self.kubectl = Kubectl(programs / "kubectl", self.kubeconfig)
        self._agents: dict[str, Child] = {}
        self._index = 0

    def add_node(self, options: NodeOptions) -> None:
        """Start its agent; it registers itself, see `wait_for_node`."""
        assert options.name not in self._agents, f"there is a node {options.name} already"
        self._index += 1
        module = "support.cluster.agent.fake" if options.fake else "support.cluster.agent.main"
        logs = self.control_plane.logs
        self._agents[options.name] = Child.start(
            options.name,
            [
                *(sys.executable, "-P", "-m", module, "--name", options.name, "--index", str(self._index)),
                *("--pki", str(self.control_plane.pki), "--folder", str(self.folder / "data" / "pods")),
                *("--logs", str(logs / "pods"), "--gpus", str(options.gpus)),
                *("--version", binaries.kubernetes_version(), *options.arguments),
            ],
            logs / f"agent-{options.name}.log",
        )

    def wait_for_node(self, name: str) -> None:
        """Until it is Ready and pods may be bound to it."""
        deadline_s = time.monotonic() + _NODE_START_S
        while True:
            self._agents[name].check()
            nodes = {node["metadata"]["name"]: node for node in self.kubectl.items("nodes")}
            if name in nodes and is_ready(nodes[name]) and not nodes[name]["spec"].get("taints"):
                return
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{name} is not Ready:\n{self._agents[name].log_tail()}")
            time.sleep(0.1)

    def silence_node(self, name: str) -> None:
        """The node stops talking (its pods go on), as when its network is cut."""
        self._agents[name].signal(signal.SIGSTOP)

    def wake_node(self, name: str) -> None:
        """It talks again."""
        self._agents[name].signal(signal.SIGCONT)

    def remove_node(self, name: str) -> None:
        """End its agent, its pods with it, and delete the Node."""
        self._agents.pop(name).stop()
        self.kubectl("delete", "node", name, "--ignore-not-found")

    def agent(self, name: str) -> Child:
        """The process of a node."""
        return self._agents[name]

    def stop(self) -> None:
        """Nodes first, then the control plane."""
        while self._agents:
            self._agents.popitem()[1].stop()
        self.control_plane.stop()


@contextlib.contextmanager
def start(
    folder: Path, nodes: Sequence[NodeOptions] = DEFAULT_NODES, apiserver: Sequence[str] = ()
) -> Iterator[Cluster]:
    """A cluster until the block ends; all its files lie in `folder`, its data in memory. Raises Unavailable.

    nodes: one of them has the name PROXY_NODE; apiserver: further flags of kube-apiserver.
    """
    assert any(options.name == PROXY_NODE for options in nodes), f"kube-proxy needs a node {PROXY_NODE}"
    programs = binaries.find_or_build()
    os.environ["PATH"] = host_tools.search_path()
    data = folder / "data"
    data.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", str(data)], check=True)
    (data / "pods").mkdir()
    control_plane = ControlPlane(programs, folder, apiserver)
    cluster = Cluster(control_plane, programs, folder)
    try:
        control_plane.start()
        for options in nodes:
            cluster.add_node(options)
        for options in nodes:
            cluster.wait_for_node(options.name)
        control_plane.start_proxy()
        yield cluster
    finally:
        cluster.stop()
        subprocess.run(["umount", "--lazy", str(data)], check=False)  # so that the folder can be deleted


def existing() -> Kubectl | None:
    """kubectl for the cluster that the environment names; None when it names none. Raises Unavailable.

    USE_EXISTING_CLUSTER=true alone is not enough: the current context must be listed in TRIMTAB_ALLOWED_CONTEXTS (comma
    separated), so that a developer's own KUBECONFIG is never touched by accident.
    """
    if os.environ.get("USE_EXISTING_CLUSTER", "").lower() != "true":
        return None
    kubeconfig = Path(os.environ.get("KUBECONFIG", Path.home() / ".kube" / "config"))
    program = binaries.find_or_build() / "kubectl"
    if not kubeconfig.is_file():
        raise Unavailable(f"USE_EXISTING_CLUSTER=true, but there is no kubeconfig {kubeconfig}")
    shown = subprocess.run(
        [str(program), "config", "view", "--output", "json", "--kubeconfig", str(kubeconfig)],
        capture_output=True,
        text=True,
        check=True,
    )
    context = json.loads(shown.stdout).get("current-context", "")
    allowed = [name for name in os.environ.get(ALLOWED_CONTEXTS, "").split(",") if name]
    if context not in allowed:
        raise Unavailable(
            f"USE_EXISTING_CLUSTER=true, but the context {context!r} is not allowed: {ALLOWED_CONTEXTS} lists {allowed}"
        )
    return Kubectl(program, kubeconfig, context=context)


def is_ready(item: dict[str, object]) -> bool:
    """Whether condition Ready (of a pod, node or service of ours) is True."""
    status = item.get("status")
    conditions = status.get("conditions", []) if isinstance(status, dict) else []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
