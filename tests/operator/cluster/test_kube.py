"""The API client against a real API server: apply, drift after the server's defaults, classified errors, retries, pages."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager

import kubernetes.client
import pytest

from support.cluster.story import wait_until
from support.local_http import QuietHandler, serving
from support.services import BUDGET_PARAMETER, service
from trimtab_operator import names
from trimtab_operator.api.status import Resolved
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import (
    PAGE,
    Conflict,
    Kube,
    NotFound,
    NotLeading,
    Refused,
    Unavailable,
)
from trimtab_operator.plan import nightly
from trimtab_operator.plan.drift import drift, stamped
from trimtab_operator.plan.manifests import Context, Manifest, manifests
from trimtab_operator.plan.tuner_pod import Tuner


def config_map(namespace: str, name: str = "a", **data: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    }


def rich_children(namespace: str) -> list[Manifest]:
    built = service(**{
        "replicas": 3, "service.annotations": {"x": "y"}, "model.cache.sizeLimit": "1024Mi", "security.apiKeySecretRef.name": "keys",
        "security.networkPolicy.ingressFrom": [{"podSelector": {}}],
        "tuning": {"parameters": [BUDGET_PARAMETER], "nightly": {"schedule": "@daily", "timeZone": "Europe/Berlin"}},
        "podTemplate": {"spec": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
            "containers": [{"name": "engine", "resources": {"limits": {"cpu": "1500m", "memory": "2048Mi", "nvidia.com/gpu": 1}},
                            "env": [{"name": "EMPTY", "value": ""}, {"name": "A", "value": "b"}]}],
        }},
    })  # fmt: skip
    children = [
        *nightly.manifests(built, Tuner("tuner:1")),
        *manifests(built, Context(Resolved(image="engine:1"), admin_public_key="KEY")),
    ]
    for child in children:
        child["metadata"]["namespace"] = namespace
    return children


@pytest.mark.cluster
def test_what_the_server_makes_of_our_children_is_no_drift(kube: Kube, namespace: str) -> None:
    for child in map(stamped, rich_children(namespace)):
        kube.apply(child)
        live = kube.get(kinds.BY_NAME[child["kind"]], namespace, child["metadata"]["name"])
        assert live is not None
        assert drift(child, live) == (), child["kind"]


@pytest.mark.cluster
def test_apply_twice_writes_once_and_takes_back_what_it_no_longer_says(kube: Kube, namespace: str) -> None:
    first = kube.apply(config_map(namespace, a="1", b="2"))
    again = kube.apply(config_map(namespace, a="1", b="2"))
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert kube.apply(config_map(namespace, a="1"))["data"] == {"a": "1"}


@pytest.mark.cluster
def test_apply_takes_a_field_back_from_another_manager_and_leaves_the_rest(
    kube: Kube, namespace: str
) -> None:
    kube.apply(config_map(namespace, a="ours"))
    kube.merge(kinds.CONFIG_MAP, namespace, "a", {"data": {"a": "edited", "c": "theirs"}})
    assert kube.apply(config_map(namespace, a="ours"))["data"] == {"a": "ours", "c": "theirs"}


@pytest.mark.cluster
def test_errors_are_classified(kube: Kube, namespace: str) -> None:
    assert kube.get(kinds.CONFIG_MAP, namespace, "none") is None
    kube.create(config_map(namespace))
    with pytest.raises(Conflict):
        kube.create(config_map(namespace))
    bad = rich_children(namespace)[-1]
    bad["spec"]["template"]["spec"]["containers"][0]["image"] = ""
    with pytest.raises(Refused) as refused:
        kube.apply(bad)
    assert "spec.template.spec.containers[0].image" in {field for field, _ in refused.value.causes}
    with pytest.raises(NotFound):
        kube.merge(kinds.CONFIG_MAP, namespace, "none", {"data": {}})


@pytest.mark.cluster
def test_a_field_that_a_kind_does_not_have_is_refused_by_its_path(kube: Kube, namespace: str) -> None:
    deployment = rich_children(namespace)[-1]
    deployment["spec"]["template"]["spec"]["containers"][0]["imagee"] = "a"
    with pytest.raises(Refused, match=r"containers\[name=\"engine\"\]\.imagee: field not declared"):
        kube.apply(deployment)
    resource = {"apiVersion": names.API_VERSION, "kind": names.SERVICE_KIND, "metadata": {"name": "a", "namespace": namespace},
                "spec": {"model": {"uri": "file:///models/any"}}}  # fmt: skip
    kube.create(resource)
    with pytest.raises(Refused, match=r"\.status\.ready: field not declared"):
        kube.apply_status(kinds.SERVICE, namespace, "a", {"ready": True})


@pytest.mark.cluster
def test_delete_takes_only_the_object_that_was_seen(kube: Kube, namespace: str) -> None:
    made = kube.create(config_map(namespace))
    with pytest.raises(Conflict):
        kube.delete(kinds.CONFIG_MAP, namespace, "a", "another-uid")
    kube.delete(kinds.CONFIG_MAP, namespace, "a", made["metadata"]["uid"])
    assert kube.get(kinds.CONFIG_MAP, namespace, "a") is None
    kube.delete(kinds.CONFIG_MAP, namespace, "a", made["metadata"]["uid"])


@pytest.mark.cluster
def test_a_list_of_several_pages_is_whole_and_says_its_kind(kube: Kube, namespace: str) -> None:
    for index in range(7):
        kube.create(config_map(namespace, f"m{index}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab_operator.cluster.kube.PAGE", 3)
        found = kube.list(kinds.CONFIG_MAP, namespace)
        wait_until(lambda: kube.list(kinds.CONFIG_MAP, namespace, cached=True) == found)
    assert [item["metadata"]["name"] for item in found] == [f"m{index}" for index in range(7)]
    assert {item["kind"] for item in found} == {"ConfigMap"}
    assert PAGE == 500


@pytest.mark.cluster
def test_a_process_that_does_not_lead_reads_and_does_not_write(
    kube: Kube, api: object, namespace: str
) -> None:
    def refuse() -> None:
        raise NotLeading("write", None, "NotLeading", "somebody else holds the Lease")

    kube._guard = refuse
    assert kube.list(kinds.CONFIG_MAP, namespace) == []
    with pytest.raises(NotLeading):
        kube.apply(config_map(namespace))
    with pytest.raises(NotLeading):
        kube.create(config_map(namespace))
    assert kube.get(kinds.CONFIG_MAP, namespace, "a") is None


@contextmanager
def scripted(*answers: tuple[int, dict[str, str]]) -> Iterator[tuple[Kube, list[str]]]:
    """A server that gives these answers one after another and then 200, and what it was asked."""
    left, asked = list(answers), []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers = left.pop(0) if left else (200, {})
            body = json.dumps({"reason": "Scripted", "message": "as told", "ok": True}).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PATCH = do_POST = do_GET

    with serving(Handler) as port:
        configuration = kubernetes.client.Configuration(host=f"http://127.0.0.1:{port}")
        yield Kube(configuration, pauses_s=(0.0, 0.0)), asked


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(status: int) -> None:
    with scripted((status, {}), (status, {})) as (kube, asked):
        assert kube.get(kinds.CONFIG_MAP, "n", "a") is not None
        assert len(asked) == 3


def test_retries_end_and_say_what_the_server_said() -> None:
    with scripted(*[(503, {})] * 9) as (kube, asked):
        with pytest.raises(Unavailable, match="as told"):
            kube.get(kinds.CONFIG_MAP, "n", "a")
        assert len(asked) == 3


def test_a_conflict_is_repeated_for_apply_alone() -> None:
    with scripted((409, {})) as (kube, asked):
        kube.apply(config_map("n"))
        assert len(asked) == 2
    with scripted((409, {})) as (kube, asked):
        with pytest.raises(Conflict):
            kube.create(config_map("n"))
        assert len(asked) == 1


def test_a_server_that_is_away_is_unavailable() -> None:
    with scripted() as (kube, _):
        kube._host = "http://127.0.0.1:9"
        with pytest.raises(Unavailable):
            kube.get(kinds.CONFIG_MAP, "n", "a")


def test_the_client_refuses_to_block_an_event_loop() -> None:
    async def call() -> None:
        kube.get(kinds.CONFIG_MAP, "n", "a")

    with scripted() as (kube, asked):
        with pytest.raises(RuntimeError, match="event loop"):
            asyncio.run(call())
        assert asked == []


def test_base64_of_secrets_is_the_callers_matter() -> None:
    # Raw JSON in, raw JSON out: nothing is decoded on the way.
    with scripted() as (kube, _):
        assert kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"},
                            "data": {"k": base64.b64encode(b"v").decode()}})["ok"] is True  # fmt: skip
