"""The chart's life on a cluster, by helm itself: install, upgrade from a previous chart, uninstall, reinstall; and its two scopes.

The operator runs as the chart's pod, with the chart's rights. CRDs belong to the release here, so the module starts without any
and leaves none.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster import rights
from support.cluster.cluster import Cluster
from support.cluster.helm import CHART, RELEASE, Helm, HelmError
from support.cluster.kubectl import Kubectl
from support.cluster.load import Load
from support.cluster.reach import get
from support.cluster.rollouts import check_nothing_failed
from support.cluster.story import (
    LEASE_S,
    TUNABLE,
    address,
    condition,
    edit_budget,
    engines,
    read_back_by,
    service,
    start_run,
    wait_condition,
    wait_ready,
    wait_until,
)
from support.cluster_operator import write_admin_key
from trimtab_operator import crds

Json = dict[str, Any]
CRDS = ("inferenceservices.serving.trimtab.dev", "tuningruns.serving.trimtab.dev")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "helm.md"
WAIT = ("--wait", "--timeout=120s")
LATER_FIELD = "startupTimeout"  # of the CRD; the previous chart does not know it


@pytest.fixture(scope="module")
def no_crds(cluster: Cluster) -> Iterator[Kubectl]:
    """The administrator's kubectl on a cluster without our kinds."""
    admin = cluster.kubectl

    def remove() -> None:
        admin("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=90s")

    remove()
    yield admin
    remove()


@pytest.fixture
def home(no_crds: Kubectl, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace at the restricted level for the operator, beside the test's own; releases in it are uninstalled."""
    name = f"{kubectl.namespace[:48]}-home"
    no_crds("create", "namespace", name)
    no_crds("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield no_crds.within(name)
    helm = Helm.find(no_crds.kubeconfig, name)
    if RELEASE in helm("list", "--short").split():
        helm("uninstall", RELEASE)
    no_crds("delete", "namespace", name, "--wait=false")


@pytest.fixture
def crds_by_hand(no_crds: Kubectl) -> None:
    """Our kinds, put there by an administrator."""
    no_crds("apply", "--server-side", "--force-conflicts", "-f", str(crds.directory()))
    no_crds("wait", "--for=condition=Established", *(f"crd/{name}" for name in CRDS), "--timeout=60s")


def previous_chart(folder: Path) -> Path:
    """The chart as an earlier version might have been: other versions, a CRD without a field, a Deployment without a setting."""
    made = folder / "trimtab"
    shutil.copytree(CHART, made)
    chart = yaml.safe_load((made / "Chart.yaml").read_text())
    chart.update(version="0.1.9", appVersion="0.0.9")
    (made / "Chart.yaml").write_text(yaml.safe_dump(chart))
    crd_file = made / "files" / "inferenceservice.yaml"
    crd = yaml.safe_load(crd_file.read_text())
    [version] = crd["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][LATER_FIELD]
    version["additionalPrinterColumns"] = version["additionalPrinterColumns"][:3]
    crd_file.write_text(yaml.safe_dump(crd))
    template = made / "templates" / "deployment.yaml"
    text = template.read_text()
    template.write_text(re.sub(r"\n +enableServiceLinks: false", "", text))
    assert template.read_text() != text
    return made


def operator_pods(home: Kubectl) -> list[Json]:
    """Those that are not leaving."""
    listed = home.items("pods", "-l", "app.kubernetes.io/component=operator")
    return [pod for pod in listed if "deletionTimestamp" not in pod["metadata"]]


def fields_of_spec(kubectl: Kubectl) -> set[str]:
    """What the API server's schema knows."""
    crd = kubectl.get("crd", CRDS[0])
    return set(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def uid(pod: Json) -> str:
    """Of a pod that must stay the same one."""
    found: str = pod["metadata"]["uid"]
    return found


def test_engines_serve_through_upgrade_uninstall_and_reinstall(
    home: Kubectl, kubectl: Kubectl, model: Path, tmp_path: Path
) -> None:
    helm = Helm.find(home.kubeconfig, home.namespace)
    helm("install", RELEASE, str(previous_chart(tmp_path)), *WAIT)
    assert LATER_FIELD not in fields_of_spec(kubectl)
    kubectl.apply(service(model, tuning=TUNABLE))
    wait_ready(kubectl)
    [engine], [first] = engines(kubectl), operator_pods(home)
    url = f"{address(kubectl)}/v1/models"

    def serves() -> bool:
        answer = get(url)
        return answer is not None and answer.status_code == 200

    # Upgrade: CRD, operator, default image and what it makes pods of are new; engines are not.
    next_operator = {"images": {"operator": {"repository": "trimtab-next-operator"}}}
    with Load(address(kubectl), long_tokens=800) as load:
        load.wait_served()
        said = helm("upgrade", RELEASE, str(CHART), *WAIT, values=next_operator)
        assert f"deployment/{RELEASE}-operator" in said, "the notes"
        assert LATER_FIELD in fields_of_spec(kubectl)
        assert len(kubectl.get("crd", CRDS[0])["spec"]["versions"][0]["additionalPrinterColumns"]) > 3
        [second] = operator_pods(home)
        assert uid(second) != uid(first)
        found = wait_condition(kubectl, "UpgradeAvailable", "True")
        assert found["status"]["resolved"]["image"] == "trimtab/engine:0.0.9"
        edit_budget(kubectl, 256)
        kubectl.wait_for(
            "a live edit in force", "infsvc", "chat", condition=lambda s: applied_budget(s) == 256
        )
        assert [uid(pod) for pod in kubectl.items("pods")] == [uid(engine)], "an upgrade restarts no engine"
        load.wait_served()
    check_nothing_failed(load)

    # Uninstall in mid-lease: no operator, no rights, all else stays, and the engine goes back by itself.
    key_file = operators_key(home, tmp_path)
    start_run(kubectl, 64, 600)
    wait_until(lambda: read_back_by(key_file, engine)["in_force"]["config"]["max_num_batched_tokens"] == 64)
    helm("uninstall", RELEASE, *WAIT)
    assert home.items("deployments", "-l", "app.kubernetes.io/part-of=trimtab") == []
    assert kubectl("get", "clusterrole", f"{RELEASE}-operator", "--ignore-not-found") == ""
    assert kubectl.get("crd", *CRDS)["items"]
    assert condition(kubectl.get("infsvc", "chat"), "Ready")["status"] == "True"
    assert [uid(pod) for pod in engines(kubectl)] == [uid(engine)]
    wait_until(serves)
    wait_until(lambda: read_back_by(key_file, engine)["candidate"] is None, LEASE_S + 20)
    assert read_back_by(key_file, engine)["in_force"]["config"]["max_num_batched_tokens"] == 256
    kubectl("delete", "trun", "chat-1")

    # Reinstall: it takes over what is there.
    edit_budget(kubectl, 128)
    helm("install", RELEASE, str(CHART), *WAIT)
    kubectl.wait_for("a live edit in force", "infsvc", "chat", condition=lambda s: applied_budget(s) == 128)
    assert [uid(pod) for pod in engines(kubectl)] == [uid(engine)]
    assert serves()


def operators_key(home: Kubectl, folder: Path) -> Path:
    """The key that the operator signs with, as an administrator may read it."""
    [secret] = [s for s in home.items("secrets") if "admin-key.pem" in s.get("data", {})]
    file = folder / "admin-key.pem"
    file.write_bytes(base64.b64decode(secret["data"]["admin-key.pem"]))
    return file


def applied_budget(found: Json) -> object:
    """What all engines read back, None while they differ."""
    return found["status"].get("engine", {}).get("applied", {}).get("maxNumBatchedTokens")


@pytest.fixture
def rights_for_admins(no_crds: Kubectl) -> Iterator[Callable[[], None]]:
    """Call it to add what docs/helm.md has an administrator of the cluster add to ClusterRole admin."""
    pieces = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    [role] = [yaml.safe_load(text) for text in pieces if "aggregate-to-admin" in text]

    def add() -> None:
        no_crds.apply(role)
        no_crds.wait_for("aggregated", "clusterrole", "admin",
                         condition=lambda found: all(rule in found["rules"] for rule in role["rules"]))  # fmt: skip

    yield add
    no_crds("delete", "clusterrole", role["metadata"]["name"], "--ignore-not-found")


def namespace_admin(places: Sequence[Kubectl], folder: Path) -> Kubectl:
    """Somebody with ClusterRole admin in these namespaces, the first one at home, and no right elsewhere."""
    home = places[0]
    home("create", "serviceaccount", "installer")
    for place in places:
        place(
            "create",
            "rolebinding",
            "installer",
            "--clusterrole=admin",
            f"--serviceaccount={home.namespace}:installer",
        )
    return Kubectl(home.program, rights.kubeconfig_of(home, folder, "installer"), home.namespace)


@pytest.mark.usefixtures("crds_by_hand")
def test_an_admin_of_namespaces_alone_installs_for_two_of_them_without_any_cluster_right(
    home: Kubectl, kubectl: Kubectl, model: Path, tmp_path: Path, rights_for_admins: Callable[[], None]
) -> None:
    served = [kubectl.namespace, f"{kubectl.namespace[:48]}-b"]
    other = f"{kubectl.namespace[:48]}-c"
    for name in (served[1], other):
        home("create", "namespace", name)
    try:
        installer = namespace_admin([home, *map(home.within, served)], tmp_path)
        helm = Helm.find(installer.kubeconfig, home.namespace)
        values = {"watchNamespaces": served, "crds": {"install": False}}
        # Nobody may grant what they do not hold, and Kubernetes' own role knows nothing of our kinds.
        with pytest.raises(
            HelmError, match="attempting to grant RBAC permissions not currently held"
        ) as refused:
            helm("install", RELEASE, str(CHART), values=values)
        print(refused.value)
        rights_for_admins()
        helm("upgrade", "--install", RELEASE, str(CHART), *WAIT, values=values)
        who = f"--as=system:serviceaccount:{home.namespace}:{RELEASE}-operator"
        nobody = f"--as=system:serviceaccount:{home.namespace}:default"
        for place in ("default", other):
            there = home.within(place)
            assert there("auth", "can-i", "--list", who) == there("auth", "can-i", "--list", nobody)
        assert home("auth", "can-i", "list", "infsvc", "-A", who, check=False).strip() == "no"
        for resource in ("secrets", "configmaps"):
            for verb in ("get", "list", "watch"):
                assert home("auth", "can-i", verb, resource, who, check=False).strip() == "no"
        assert home("auth", "can-i", "create", "secrets", who).strip() == "yes"
        made = helm("get", "manifest", RELEASE)
        assert {"Role", "RoleBinding"} <= {o["kind"] for o in yaml.safe_load_all(made) if o}
        cluster_scoped = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
        assert not cluster_scoped & {o["kind"] for o in yaml.safe_load_all(made) if o}
        home.within(other).apply(service(model))
        for place in served:
            installer.within(place).apply(service(model))
        for place in served:
            wait_ready(home.within(place), timeout_s=120)
        assert not home.within(other).get("infsvc", "chat").get("status"), "nobody serves that namespace"
    finally:
        for name in (served[1], other):
            home("delete", "namespace", name, "--wait=false")


@pytest.mark.usefixtures("crds_by_hand")
def test_the_operator_waits_for_a_key_that_somebody_else_brings(
    home: Kubectl, kubectl: Kubectl, tmp_path: Path
) -> None:
    helm = Helm.find(home.kubeconfig, home.namespace)
    # Where it serves it makes a Secret for each run's worker; here it shall make none at home.
    values = {"adminKey": {"create": False, "secretName": "from-vault"}, "crds": {"install": False},
              "watchNamespaces": [kubectl.namespace]}  # fmt: skip
    helm("install", RELEASE, str(CHART), values=values)
    who = f"--as=system:serviceaccount:{home.namespace}:{RELEASE}-operator"
    assert home("auth", "can-i", "create", "secrets", who, check=False).strip() == "no"
    write_admin_key(tmp_path)
    home("create", "secret", "generic", "from-vault", f"--from-file={tmp_path / 'admin-key.pem'}")
    home("rollout", "status", f"deployment/{RELEASE}-operator", "--timeout=120s")
    mounted = json.dumps(operator_pods(home)[0]["spec"]["volumes"])
    assert "from-vault" in mounted
