"""Fixtures of the cluster tests: one cluster a session, one namespace a test; and the step into the cluster's namespace.

These tests run by `make test-cluster` (or `pytest -m cluster`): pytest collects, sees that it is outside, and starts itself
again inside (`support.cluster.namespace`), since pods and Services answer there only. With `--clusters N` it starts again outside,
as the one that hands whole files to N workers (pytest-xdist), each of them inside a namespace and so with a cluster of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.capture import CaptureManager

from support.cluster import binaries, host_tools, namespace, stand_in_worker
from support.cluster.binaries import Unavailable
from support.cluster.cluster import Cluster, NodeOptions, existing, start
from support.cluster.kubectl import Kubectl
from support.cluster.monitoring_kinds import crds as monitoring_kinds_crds
from support.cluster.story import BUDGET, TUNABLE, budgets, service, wait_ready, wait_until
from support.cluster_operator import OperatorProcess, operator
from support.tiny_models import tiny_chat_model
from trimtab_operator import crds

_HERE = Path(__file__).parent
_TESTS = _HERE.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.cluster)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start again inside a namespace when cluster tests are to run and this is the outside."""
    ours = [item for item in session.items if item.get_closest_marker("cluster")]
    if not ours or session.config.option.collectonly or namespace.is_inside():
        return
    try:
        if existing() is not None:
            return
        programs = binaries.find_all()
        host_tools.search_path()
        problem = namespace.probe()
        if problem is not None:
            raise Unavailable(problem)
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.exit(f"cluster tests may not be skipped in CI: {error}", returncode=1)
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=str(error)))
        return
    if len(ours) < len(session.items):
        pytest.exit("cluster tests run apart from others: make test-cluster", returncode=1)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    if isinstance(capture, CaptureManager):
        capture.suspend_global_capture(in_=True)
    again = [sys.executable, "-P", "-m", "pytest", *session.config.invocation_params.args]
    clusters = min(session.config.option.clusters, len({item.path for item in ours}))
    command = [*again, *_workers(clusters)] if clusters > 1 else namespace.command_inside(again)
    os.chdir(session.config.invocation_params.dir)
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, "PYTHONPATH": str(_TESTS), **programs})


def _workers(count: int) -> list[str]:
    """pytest-xdist's options for so many workers, each inside a namespace; -v, since dots alone would not tell who does what."""
    python = shlex.join(namespace.command_inside([sys.executable, "-P"]))
    return ["--tx", f"{count}*popen//python={python}", "--dist", "loadfile", "--no-loadscope-reorder", "-v"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Cluster]:
    """A cluster of ours, with nodes node-a and node-b of two GPUs each. Its nodes and programs may be broken, if mended."""
    if existing() is not None:
        pytest.skip("this test breaks parts of a cluster, and so needs one of its own, not an existing one")
    dies = json.dumps([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    next_operator = json.dumps([sys.executable, "-P", str(_TESTS / "support" / "next_version.py")])
    stand_in = json.dumps([sys.executable, "-P", stand_in_worker.__file__])
    arguments = (
        *("--content", str(tiny_model)),  # every image holds the model
        *("--image", f"trimtab-crash={dies}"),
        *("--image", f"trimtab-next-operator={next_operator}"),
        *("--image", f"trimtab-stand-in={stand_in}"),
    )
    nodes = [NodeOptions(name, arguments=arguments) for name in ("node-a", "node-b")]
    with start(tmp_path_factory.mktemp("cluster"), nodes) as running:
        yield running


@pytest.fixture
def kubectl(request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a fresh namespace, deleted afterwards."""
    found = existing()
    admin: Kubectl = request.getfixturevalue("cluster").kubectl if found is None else found
    name = (
        re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:50].strip("-")
        + f"-{os.urandom(2).hex()}"
    )
    admin("create", "namespace", name)
    yield admin.within(name)
    admin("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def model() -> Iterator[Path]:
    """The tiny model where pods may read it, named "tiny"; services mount its parent (`support.cluster.story.service`)."""
    # /run is the namespace's own, so that the folder goes with it, however that ends.
    place = "/run" if namespace.is_inside() else "/dev/shm"
    folder = Path(tempfile.mkdtemp(prefix="trimtab-models-", dir=place))
    folder.chmod(0o755)
    # Long enough for a stream that outlasts a pod's farewell.
    made = tiny_chat_model(folder / "tiny", max_position_embeddings=8192)
    for file in made.iterdir():
        file.chmod(0o644)  # safetensors writes for its own user alone; pods run as another
    yield made
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """One operator for all namespaces, as a process that tests may kill, if they start it again.

    A test module's OPERATOR_OPTIONS are added to its command line.
    """
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    with operator(cluster.kubeconfig, tmp_path_factory.mktemp("operator"), "main", "--all-namespaces", "--resync", "20",
                  "--operator-namespace", "default", *getattr(request.module, "OPERATOR_OPTIONS", ())) as started:  # fmt: skip
        yield started


@pytest.fixture(scope="module")
def chat_namespace(
    cluster: Cluster, running: OperatorProcess, request: pytest.FixtureRequest
) -> Iterator[Kubectl]:
    """kubectl in a namespace for a module's service; see `chat`."""
    name = f"{request.path.stem.replace('_', '-')}-{os.urandom(2).hex()}"
    cluster.kubectl("create", "namespace", name)
    yield cluster.kubectl.within(name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def chat(chat_namespace: Kubectl, running: OperatorProcess, model: Path) -> Kubectl:
    """kubectl where service `chat` is: two ready, tunable replicas, with the spec and the live config of `story.service`.

    They serve a whole module, so that a test costs no engine's start; what the one before it changed is put right first.
    """
    chat_namespace("delete", "trun", "--all")
    wanted = service(model, replicas=2, tuning=TUNABLE)
    chat_namespace.apply(wanted, options=("--force-conflicts",))
    wait_ready(chat_namespace, timeout_s=150)
    wait_until(lambda: budgets(running, chat_namespace) == [BUDGET, BUDGET])
    return chat_namespace


@pytest.fixture
def monitoring_kinds(cluster: Cluster) -> Iterator[None]:
    """The Prometheus operator's kinds are there for the length of a test."""
    made = monitoring_kinds_crds()
    cluster.kubectl.apply(*made)
    cluster.kubectl(
        "wait", "--for=condition=Established", *(f"crd/{crd['metadata']['name']}" for crd in made)
    )
    yield
    cluster.kubectl("delete", "crd", *(crd["metadata"]["name"] for crd in made))
