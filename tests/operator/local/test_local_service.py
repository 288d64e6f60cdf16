"""`trimtab-operator local` with real engines and the tiny model, used as its users do."""

import contextlib
import copy
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.local_operator import (
    Json,
    LocalOperator,
    alive,
    condition,
    is_settled,
    pids,
    reasons,
    service_resource,
)
from support.tiny_models import tiny_chat_model

TUNING = {
    "mode": "Apply",
    "parameters": [
        {"name": "maxNumBatchedTokens", "min": 32, "max": 4096},
        {"name": "schedulingPolicy", "choices": ["fcfs", "priority"]},
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LocalOperator]:
    """The service that tests of this module share: starting engines is what takes the time."""
    resource = service_resource(model, replicas=2, tuning=TUNING)
    operator = LocalOperator(tmp_path_factory.mktemp("shared"), resource)
    try:
        operator.wait_ready()
        yield operator
    finally:
        operator.stop()


@pytest.fixture
def service(shared: LocalOperator) -> Iterator[LocalOperator]:
    """The shared service with two replicas, settled, and put back to its live start values afterwards."""
    with_replicas(shared, 2)
    before = shared.file.read_text()
    yield shared
    status = shared.status()
    if (
        shared.file.read_text() == before
        and status["live"]["candidate"] is None
        and status["tuning"]["recommendation"] is None
    ):
        return
    shared.control.delete("/admin/live-config/candidate")
    edit_engine(shared, maxNumBatchedTokens=512, schedulingPolicy="fcfs")
    shared.resource["metadata"].pop("annotations", None)
    shared.save()
    shared.wait(
        lambda s: (
            s["tuning"]["state"] == "active"
            and s["live"]["in_force"]["config"]["max_num_batched_tokens"] in (512, 256)
            and s["file"]["error"] is None
        )
    )
    shared.control.delete("/admin/recommendation")
    shared.wait(lambda s: live_in_force(s, max_num_batched_tokens=512, scheduling_policy="fcfs"))


@pytest.fixture
def single(shared: LocalOperator) -> LocalOperator:
    """The shared service with one replica, settled."""
    with_replicas(shared, 1)
    return shared


def with_replicas(operator: LocalOperator, count: int) -> None:
    """So many replicas, settled, under the rollout's defaults."""
    spec = operator.resource["spec"]
    if spec["replicas"] != count or "rollout" in spec:
        spec["replicas"] = count
        spec.pop("rollout", None)
        operator.save()
    operator.wait(lambda s: is_settled(s) and len(s["replicas"]) == count)


def chat(max_tokens: int, stream: bool = True) -> Json:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": max_tokens,
        "stream": stream,
        "temperature": 0,
    }


def tokens_of(response: httpx.Response) -> Iterator[str]:
    """The stream's deltas; fails on an error frame or a missing end."""
    done = False
    for line in response.iter_lines():
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    assert done, "the stream ended without [DONE]"


def edit_engine(operator: LocalOperator, **fields: Any) -> None:
    operator.resource["spec"]["engine"].update(fields)
    operator.save()


def live_in_force(status: Json, **values: Any) -> bool:
    config = status["live"]["in_force"]["config"]
    return is_settled(status) and all(config[key] == value for key, value in values.items())


class StreamingLoad:
    """Clients that stream one chat after another, without any retry, and remember what failed."""

    def __init__(self, url: str, clients: int = 2) -> None:
        self.finished = 0
        self.failures: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> "StreamingLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                try:
                    with client.stream("POST", "/v1/chat/completions", json=chat(24)) as response:
                        assert response.status_code == 200, response.read()
                        for _ in tokens_of(response):
                            pass
                except (httpx.HTTPError, AssertionError) as error:
                    with self._lock:
                        self.failures.append(repr(error))
                else:
                    with self._lock:
                        self.finished += 1
                time.sleep(0.05)  # leaves the engines that start some of the machine

    def wait_for(self, count: int) -> None:
        """Until `count` more chats have finished."""
        want = self.finished + count
        deadline = time.monotonic() + 60
        while self.finished < want and time.monotonic() < deadline and not self.failures:
            time.sleep(0.02)


def test_openai_client_streams_a_chat_through_the_proxy(service: LocalOperator) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        streamed = "".join(event.choices[0].delta.content or "" for event in stream)
        whole = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0
        )
        assert streamed
        assert whole.choices[0].message.content == streamed


def test_status_lists_replicas_with_their_metrics(service: LocalOperator) -> None:
    status = service.status()
    assert status["phase"] == "Ready"
    assert status["url"] == service.url
    assert status["live"]["applied"] == "2/2"
    assert len(set(pids(status).values())) == 2
    targets = service.control.get("/metrics/targets").json()
    (group,) = service.control.get("/metrics/http-sd").json()
    assert [f"http://{host}/metrics" for host in group["targets"]] == targets
    assert group["labels"] == {"service": service.status()["name"]}
    assert "GET /metrics/http-sd" in service.control.get("/").json()["routes"]
    assert targets == [f"{replica['url']}/metrics" for replica in status["replicas"]]
    for target in targets:
        assert "trimtab_num_requests_running" in httpx.get(target, trust_env=False).text


def test_edit_of_a_live_field_restarts_nothing_and_breaks_no_stream(service: LocalOperator) -> None:
    before = service.status()
    request = {**chat(300), "stream_options": {"include_usage": True}}
    with service.client.stream("POST", "/v1/chat/completions", json=request) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        edit_engine(service, maxNumBatchedTokens=128, schedulingPolicy="priority")
        after = service.wait(
            lambda s: live_in_force(s, max_num_batched_tokens=128, scheduling_policy="priority")
        )
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 300
    assert pids(after) == pids(before)
    generation = after["live"]["incumbent"]["generation"]
    assert generation > before["live"]["incumbent"]["generation"]
    assert {replica["generation"] for replica in after["replicas"]} == {generation}
    read_back = service.control.get("/admin/live-config").json()
    assert read_back["applied"] == "2/2"
    for replica in read_back["replicas"]:
        engine = httpx.get(f"{replica['admin_url']}/admin/live-config", trust_env=False).json()
        assert engine["in_force"] == after["live"]["incumbent"]


@pytest.mark.parametrize(
    ("path", "value", "wants"),
    [
        (("spec", "engine", "maxNumBatchedTokens"), 9000, "maxNumBatchedTokens must not exceed ceilings"),
        (
            ("spec", "engine", "schedulingPolicy"),
            "lifo",
            "spec.engine.schedulingPolicy: 'lifo' is not allowed; one of",
        ),
        (("spec", "engine", "maxNumBatchedTokenz"), 1, "spec.engine.maxNumBatchedTokenz"),
        (("spec", "replicas"), -1, "spec.replicas: -1 is not allowed; an integer from 0 to 256"),
        (
            ("spec", "model", "uri"),
            "file:///nowhere/model",
            "spec.model.uri: 'file:///nowhere/model' is not allowed",
        ),
        (("metadata", "name"), "other", "metadata.name: 'other' is not allowed; 'chat' while it runs"),
    ],
    ids=["above-ceiling", "policy", "unknown-field", "range", "no-such-model", "name"],
)
def test_wrong_edit_is_explained_and_changes_nothing(
    service: LocalOperator, path: tuple[str, ...], value: object, wants: str
) -> None:
    before = service.status()
    good = copy.deepcopy(service.resource)
    place = service.resource
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    service.save()
    try:
        after = service.wait(lambda s: s["file"]["error"] is not None)
        assert wants in after["file"]["error"]
        assert condition(after, "Ready")["status"] == "True"
        assert pids(after) == pids(before)
        assert after["live"]["incumbent"] == before["live"]["incumbent"]
    finally:
        service.resource = good
        service.save()
    assert pids(service.wait_ready()) == pids(before)


def test_broken_yaml_is_explained_with_its_line(service: LocalOperator) -> None:
    service.file.write_text("spec: {a: 1\nmetadata: [")
    try:
        error = service.wait(lambda s: s["file"]["error"] is not None)["file"]["error"]
        assert "line 2" in error
    finally:
        service.save()
    service.wait_ready()


def candidate(service: LocalOperator, lease_s: float, **values: Any) -> Json:
    config = service.control.get("/admin/live-config").json()["incumbent"]["config"]
    return {"generation": None, "config": {**config, **values}, "lease_s": lease_s}


def test_candidate_reaches_every_replica_and_ends_alone(service: LocalOperator) -> None:
    before = service.status()
    incumbent = before["live"]["incumbent"]
    answer = service.control.put("/admin/live-config", json=candidate(service, 60, max_num_batched_tokens=64))
    assert answer.status_code == 200, answer.text
    generation = answer.json()["generation"]
    assert generation > incumbent["generation"]
    read_back = answer.json()["readback"]
    assert [r["readback"]["in_force"]["generation"] for r in read_back["replicas"]] == [generation] * 2
    assert read_back["in_force"]["config"]["max_num_batched_tokens"] == 64

    def renew(lease_s: float) -> httpx.Response:
        document = {**candidate(service, lease_s, max_num_batched_tokens=64), "generation": generation}
        return service.control.put("/admin/live-config", json=document)

    renewed = renew(90)
    assert renewed.status_code == 200
    assert renewed.json()["readback"]["candidate"]["until"] > read_back["candidate"]["until"]
    assert renew(1.0).status_code == 200

    # Nobody renews it any more: engines go back by themselves, and the service says so.
    after = service.wait(lambda s: s["live"]["candidate"] is None and is_settled(s))
    assert {replica["generation"] for replica in after["replicas"]} == {incumbent["generation"]}
    assert after["live"]["incumbent"] == incumbent
    assert renew(2.0).status_code == 409


def test_candidate_ends_at_once_on_request(service: LocalOperator) -> None:
    incumbent = service.status()["live"]["incumbent"]
    service.control.put("/admin/live-config", json=candidate(service, 60, max_num_batched_tokens=64))
    read_back = service.control.delete("/admin/live-config/candidate").json()
    assert read_back["candidate"] is None
    assert [r["readback"]["in_force"] for r in read_back["replicas"]] == [incumbent] * 2


@pytest.mark.parametrize(
    ("document", "status", "wants"),
    [
        ({"lease_s": 5, "config": {}}, 400, "config.max_num_batched_tokens"),
        (
            {"lease_s": 500, "config": {}},
            400,
            "lease_s: 500 is not allowed; null, or a number above 0 and up to 120",
        ),
        ({"config": {}}, 409, "edited in"),
        ({"lease_s": 5, "configs": {}}, 400, "configs"),
        ({"lease_s": 5, "generation": 1}, 400, "config"),
    ],
    ids=["partial", "long-lease", "no-lease", "unknown-field", "no-config"],
)
def test_wrong_push_is_refused_with_path_and_range(
    service: LocalOperator, document: Json, status: int, wants: str
) -> None:
    before = service.status()["live"]
    answer = service.control.put("/admin/live-config", json=document)
    assert answer.status_code == status
    assert wants in answer.json()["error"]["message"]
    assert service.status()["live"] == before


def test_candidate_outside_the_persons_bounds_is_refused(service: LocalOperator) -> None:
    for values, wants in (
        ({"max_num_batched_tokens": 8000}, "an integer from 32 to 4096"),
        ({"max_num_seqs": 8}, "spec.tuning.parameters has no maxNumSeqs"),
        ({"priority_aging_s": 1.0}, "it is not tuned"),
    ):
        answer = service.control.put("/admin/live-config", json=candidate(service, 5, **values))
        assert answer.status_code == 400
        assert wants in answer.json()["error"]["message"]
    assert service.status()["live"]["candidate"] is None


def test_recommendation_is_promoted_and_a_persons_edit_voids_it(service: LocalOperator) -> None:
    before = service.status()
    answer = service.control.put(
        "/admin/recommendation", json={"run": "night-1", "config": {"max_num_batched_tokens": 256}}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["promoted"] is True
    status = service.wait(lambda s: live_in_force(s, max_num_batched_tokens=256))
    assert status["live"]["incumbent"]["source"] == "Recommendation"
    assert pids(status) == pids(before)
    on_disk = json.loads((service.folder / "state" / "live" / "live.json").read_text())
    assert on_disk == status["live"]["incumbent"]

    edit_engine(service, maxNumBatchedTokens=1024)
    status = service.wait(lambda s: live_in_force(s, max_num_batched_tokens=1024))
    assert status["live"]["incumbent"]["source"] == "Spec"
    assert status["tuning"]["recommendation"] is None
    assert "RecommendationSuperseded" in reasons(status)


def test_annotation_pauses_and_reverts_tuning(service: LocalOperator) -> None:
    service.control.put("/admin/recommendation", json={"config": {"max_num_batched_tokens": 256}})
    service.control.put("/admin/live-config", json=candidate(service, 60, max_num_batched_tokens=64))

    def annotate(value: str) -> None:
        service.resource["metadata"]["annotations"] = {"serving.trimtab.dev/tuning": value}
        service.save()

    annotate("paused")
    held = service.wait(lambda s: s["live"]["candidate"] is None and is_settled(s), timeout_s=10)
    assert held["live"]["in_force"]["config"]["max_num_batched_tokens"] == 256
    refused = service.control.put("/admin/live-config", json=candidate(service, 5, max_num_batched_tokens=64))
    assert refused.status_code == 409
    assert "paused" in refused.json()["error"]["message"]
    assert refused.json()["error"]["path"] == "metadata.annotations[serving.trimtab.dev/tuning]"

    annotate("reverted")
    service.wait(lambda s: live_in_force(s, max_num_batched_tokens=512), timeout_s=10)


def test_in_a_quiet_time_a_candidate_goes_and_a_promotion_waits_for_its_end(service: LocalOperator) -> None:
    always = [{"schedule": "* * * * *", "duration": "1h"}]
    service.control.put("/admin/live-config", json=candidate(service, 60, max_num_batched_tokens=64))
    service.resource["spec"]["tuning"]["limits"] = {"notDuring": always}
    service.save()
    try:
        quiet = service.wait(
            lambda s: s["live"]["candidate"] is None and live_in_force(s, max_num_batched_tokens=512)
        )
        assert quiet["tuning"]["state"] == "quiet"
        assert "spec.tuning.limits.notDuring[0] (* * * * *)" in quiet["tuning"]["quiet"]["message"]
        quiet = service.wait(lambda s: condition(s, "TuningReady")["reason"] == "QuietTime")
        refused = service.control.put(
            "/admin/live-config", json=candidate(service, 5, max_num_batched_tokens=64)
        )
        assert refused.status_code == 409
        assert refused.json()["error"]["path"] == "spec.tuning.limits.notDuring"
        taken = service.control.put("/admin/recommendation", json={"config": {"max_num_batched_tokens": 256}})
        assert taken.status_code == 200, taken.text
        assert taken.json()["promoted"] is False
        assert "notDuring" in taken.json()["waits"]
        status = service.status()
        assert status["tuning"]["waiting"]["values"] == {"maxNumBatchedTokens": 256}
        assert live_in_force(status, max_num_batched_tokens=512)
    finally:
        del service.resource["spec"]["tuning"]["limits"]
        service.save()
    status = service.wait(lambda s: live_in_force(s, max_num_batched_tokens=256))
    assert status["tuning"]["waiting"] is None
    assert status["tuning"]["state"] == "active"


def test_canary_mode_tries_on_one_replica_and_promotes_nothing(service: LocalOperator) -> None:
    service.resource["spec"]["tuning"]["mode"] = "Canary"
    service.save()
    try:
        service.wait(lambda s: s["tuning"]["mode"] == "Canary" and is_settled(s))
        answer = service.control.put(
            "/admin/live-config", json=candidate(service, 30, max_num_batched_tokens=64)
        )
        assert answer.status_code == 200
        read_back = answer.json()["readback"]
        budgets = [
            r["readback"]["in_force"]["config"]["max_num_batched_tokens"] for r in read_back["replicas"]
        ]
        assert sorted(budgets) == [64, 512]
        assert read_back["applied"] == "2/2"  # each judged by its own desired config
        promotion = service.control.put(
            "/admin/recommendation", json={"config": {"max_num_batched_tokens": 64}}
        )
        assert promotion.status_code == 409
    finally:
        service.resource["spec"]["tuning"]["mode"] = "Apply"
        service.save()
    service.wait(lambda s: s["tuning"]["mode"] == "Apply")


def test_foreign_write_to_one_engine_is_overruled(service: LocalOperator) -> None:
    before = service.status()
    admin_url = before["replicas"][0]["adminUrl"]
    config = {**before["live"]["incumbent"]["config"], "max_num_batched_tokens": 99}
    foreign = httpx.put(f"{admin_url}/admin/live-config", json={"config": config}, trust_env=False)
    assert foreign.status_code == 200
    after = service.wait(
        lambda s: is_settled(s) and s["live"]["incumbent"]["generation"] > foreign.json()["generation"]
    )
    assert after["live"]["incumbent"]["config"] == before["live"]["incumbent"]["config"]
    assert "ConfigDrift" in reasons(after)


def test_workload_of_all_replicas_is_merged(service: LocalOperator) -> None:
    start = service.control.get("/admin/workload").json()["next"]
    for tokens in range(3, 9):
        assert service.client.post("/v1/chat/completions", json=chat(tokens, stream=False)).status_code == 200
    found: list[Json] = []
    deadline = time.monotonic() + 10
    cursor = start
    while len(found) < 6 and time.monotonic() < deadline:
        page = service.control.get("/admin/workload", params={"since": cursor, "limit": 4}).json()
        found += page["records"]
        cursor = page["next"]
    assert sorted(record["output_tokens"] for record in found) == [3, 4, 5, 6, 7, 8]
    assert service.control.get("/admin/workload", params={"since": cursor}).json()["records"] == []
    assert service.control.get("/admin/workload", params={"since": "x"}).status_code == 400


def test_control_port_is_closed_to_web_pages(service: LocalOperator) -> None:
    answer = service.control.put("/admin/live-config", json={}, headers={"Origin": "http://example.com"})
    assert answer.status_code == 403


def test_killed_replica_comes_back_with_the_live_config_while_others_serve(service: LocalOperator) -> None:
    edit_engine(service, maxNumBatchedTokens=160)
    before = service.wait(lambda s: live_in_force(s, max_num_batched_tokens=160))
    victim = before["replicas"][0]
    with StreamingLoad(service.url, clients=2) as load:
        os.kill(victim["pid"], signal.SIGKILL)
        service.wait(lambda s: s["replicas"][0]["pid"] != victim["pid"])
        broken = len(load.failures)  # at most what ran on the victim
        load.failures.clear()
        load.wait_for(3)
        after = service.wait_ready()
        assert load.failures == []
    assert broken <= 2
    replica = after["replicas"][0]
    assert (replica["name"], replica["restarts"]) == (victim["name"], victim["restarts"] + 1)
    engine = httpx.get(f"{replica['adminUrl']}/admin/live-config", trust_env=False).json()
    assert engine["incumbent"] == before["live"]["incumbent"]
    assert engine["boot_error"] is None
    assert pids(after)[before["replicas"][1]["name"]] == before["replicas"][1]["pid"]


def test_replica_that_is_told_to_end_from_outside_fails_no_request_while_another_is_free(
    service: LocalOperator,
) -> None:
    victim = service.status()["replicas"][1]
    with StreamingLoad(service.url) as load:
        load.wait_for(2)
        os.kill(victim["pid"], signal.SIGTERM)
        service.wait(lambda s: s["replicas"][1]["restarts"] > victim["restarts"])
        load.wait_for(2)
        service.wait_ready()
    assert load.failures == []


def test_edit_of_a_restart_only_field_replaces_two_replicas_and_drops_nothing(service: LocalOperator) -> None:
    before = service.status()
    old = service.engine_pids()
    with StreamingLoad(service.url) as load:
        load.wait_for(2)
        edit_engine(service, maxModelLen=768)
        after = service.wait(lambda s: is_settled(s) and not set(pids(s)) & set(pids(before)))
        load.wait_for(2)
    assert load.failures == []
    assert len(after["replicas"]) == 2
    assert alive(old) == []
    assert after["live"]["incumbent"] == before["live"]["incumbent"]


def test_one_replica_is_replaced_by_a_surge_and_drops_nothing(single: LocalOperator) -> None:
    before = single.status()
    with StreamingLoad(single.url) as load:
        load.wait_for(2)
        edit_engine(single, maxModelLen=640)
        after = single.wait(lambda s: is_settled(s) and not set(pids(s)) & set(pids(before)))
        load.wait_for(2)
    assert load.failures == []
    assert len(after["replicas"]) == 1


def test_surge_of_zero_makes_room_first_and_holds_requests_meanwhile(single: LocalOperator) -> None:
    single.resource["spec"]["rollout"] = {"strategy": "RollingUpdate", "maxSurge": 0, "maxUnavailable": 1}
    single.save()
    before = single.wait(is_settled)
    most = 0

    def replaced(status: Json) -> bool:
        nonlocal most
        most = max(most, len(status["replicas"]))
        return is_settled(status) and not set(pids(status)) & set(pids(before))

    with StreamingLoad(single.url) as load:
        load.wait_for(2)
        edit_engine(single, maxModelLen=512)
        single.wait(replaced)
        load.wait_for(2)
    assert load.failures == []  # held, since the next engine came within the time that requests wait
    assert most == 1


def test_interrupt_finishes_streams_and_leaves_no_process(tmp_path: Path, model: Path) -> None:
    service = LocalOperator(tmp_path, service_resource(model))
    try:
        service.wait_ready()
        engines = service.engine_pids()
        assert len(engines) >= 2  # the HTTP process and its worker
        with service.client.stream("POST", "/v1/chat/completions", json=chat(200)) as response:
            deltas = tokens_of(response)
            next(deltas)
            service.process.send_signal(signal.SIGINT)
            assert sum(1 for _ in deltas) > 0
        assert service.process.wait(30) == 0
        assert alive(engines) == []
        assert not (tmp_path / "ready.json").exists()
        with contextlib.suppress(httpx.HTTPError):
            assert service.client.get("/ready").status_code == 503
    finally:
        service.stop()
