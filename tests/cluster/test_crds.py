"""Our CRDs on a real API server: they are taken, they refuse, they explain themselves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from support.cluster.kubectl import Kubectl, KubectlError
from support.crd_fields import every_field, spec_schema
from support.rule_cases import CASES
from trimtab_operator import crds, names

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]


@pytest.fixture
def with_crds(kubectl: Kubectl) -> Kubectl:
    """kubectl on a cluster that serves both kinds."""
    kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "inferenceservice.yaml"))
    kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "tuningrun.yaml"))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    return kubectl


def chat(**engine: object) -> Json:
    """A service as a person writes it."""
    return {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"model": {"uri": "hf://org/model"}, "engine": dict(engine)},
    }


def test_every_crd_is_accepted_and_not_flagged_as_unstructural(with_crds: Kubectl) -> None:
    ours = [c for c in with_crds.items("crds") if c["spec"]["group"] == "serving.trimtab.dev"]
    assert len(ours) == 2
    for crd in ours:
        conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
        assert conditions.get("NonStructuralSchema", "False") == "False"
        assert conditions["NamesAccepted"] == "True"


def test_every_example_is_taken(with_crds: Kubectl) -> None:
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        documents = [
            d for d in yaml.safe_load_all(path.read_text()) if d and "serving.trimtab.dev" in d["apiVersion"]
        ]
        assert documents
        with_crds.apply(*documents, options=("--dry-run=server", "--validate=strict"))


def test_a_rule_refuses_with_its_own_message_and_changes_nothing(with_crds: Kubectl) -> None:
    with_crds.apply(chat(maxNumBatchedTokens=2048, ceilings={"maxNumBatchedTokens": 4096}))
    with pytest.raises(
        KubectlError, match=r"maxNumBatchedTokens must not exceed ceilings\.maxNumBatchedTokens"
    ):
        with_crds.apply(chat(maxNumBatchedTokens=8192, ceilings={"maxNumBatchedTokens": 4096}))
    assert with_crds.get("infsvc", "chat")["spec"]["engine"]["maxNumBatchedTokens"] == 2048


@pytest.mark.parametrize("kind", CASES)
def test_each_rule_gives_the_verdict_that_local_mode_gives(with_crds: Kubectl, kind: str) -> None:
    api = client.CustomObjectsApi(
        config.new_client_from_config(str(with_crds.kubeconfig), context=with_crds.context)
    )
    place = (names.GROUP, names.VERSION, with_crds.namespace, f"{kind.lower()}s")

    def said(built: Json, old: Json | None) -> str:
        """Why the API server does not take it, as a new resource or as one that follows `old`; empty when it does."""
        options = {"dry_run": "All", "field_validation": "Strict"}
        try:
            if old is None:
                api.create_namespaced_custom_object(*place, copy.deepcopy(built), **options)
            else:
                version = known[built["metadata"]["name"]]["metadata"]["resourceVersion"]
                changed = {**built, "metadata": {**built["metadata"], "resourceVersion": version}}
                api.replace_namespaced_custom_object(*place, built["metadata"]["name"], changed, **options)
        except client.ApiException as error:
            return str(json.loads(error.body)["message"])
        return ""

    known: dict[str, Json] = {}
    wrong = []
    for case in CASES[kind]:
        if case.old is not None:
            name = case.old["metadata"]["name"]
            known[name] = api.create_namespaced_custom_object(*place, copy.deepcopy(case.old))
        good, bad = said(case.good, case.old), said(case.bad, case.old)
        if good or case.message not in bad:
            wrong.append(f"{case.message}: the good one got {good!r}, the bad one {bad!r}")
        if case.old is not None:
            api.delete_namespaced_custom_object(*place, name)
            del known[name]
    assert wrong == []


def test_a_service_scales_by_kubectl(with_crds: Kubectl) -> None:
    with_crds.apply(chat())
    with_crds("scale", "infsvc/chat", "--replicas=3")
    assert with_crds.get("infsvc", "chat")["spec"]["replicas"] == 3


def test_status_is_a_subresource(with_crds: Kubectl) -> None:
    with_crds.apply(chat())
    patch = json.dumps({"status": {"readyReplicas": 7}})
    with_crds("patch", "infsvc", "chat", "--type=merge", "-p", patch)
    assert "readyReplicas" not in with_crds.get("infsvc", "chat").get("status", {})
    with_crds("patch", "infsvc", "chat", "--type=merge", "--subresource=status", "-p", patch)
    assert with_crds.get("infsvc", "chat")["status"]["readyReplicas"] == 7


def listed(text: str) -> dict[str, str]:
    """Fields of an explained object → their descriptions, in one line each."""
    found: dict[str, str] = {}
    name = ""
    for line in text.split("FIELDS:")[1].splitlines():
        if "\t" in line:
            name = line.split()[0]
            found[name] = ""
        elif name and line.startswith("   "):  # not "enum: …"
            found[name] += f" {line.strip()}"
    return {name: " ".join(words.split()) for name, words in found.items()}


def outline(text: str) -> set[str]:
    """Dotted paths of everything that `kubectl explain --recursive` lists."""
    found: set[str] = set()
    way: list[tuple[int, str]] = []
    for line in text.split("FIELDS:")[1].splitlines():
        if "\t" not in line:
            continue  # the choices of the field above
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        way = [*(step for step in way if step[0] < depth), (depth, name)]
        found.add(".".join(step for _, step in way))
    return found


@pytest.mark.parametrize(
    ("short", "kind", "sections"),
    [("infsvc", names.SERVICE_KIND, ["", "engine", "tuning.parameters"]), ("trun", names.RUN_KIND, [""])],
)
def test_kubectl_explains_every_field_in_its_own_words(
    with_crds: Kubectl, short: str, kind: str, sections: list[str]
) -> None:
    for part in ("spec", "status"):
        schema = crds.openapi(kind)["properties"][part]
        want = {path.replace("[]", "") for path, _ in every_field(schema)}
        assert outline(with_crds("explain", f"{short}.{part}", "--recursive")) == want
    objects = {path: field.get("items", field) for path, field in every_field(spec_schema(kind))}
    objects[""] = spec_schema(kind)
    for path in sections:
        found = listed(with_crds("explain", ".".join(filter(None, [short, "spec", path]))))
        for name, field in objects[path]["properties"].items():
            assert " ".join(field["description"].split()) in found[name], f"{path}.{name}"
