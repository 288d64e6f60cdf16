"""Pods → replicas: phase, failure and place are read from what kubelet and scheduler wrote."""

from __future__ import annotations

from typing import Any

import pytest

from support.pods import T0, moment, pod, terminated, waiting
from trimtab_operator import names
from trimtab_operator.plan import pods

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"


@pytest.mark.parametrize(
    ("given", "phase", "failure"),
    [
        pytest.param(pod(), "Starting", None, id="loading"),
        pytest.param(pod(ready_since=20), "Running", None, id="ready"),
        pytest.param(pod(was_ready_until=90, started=True), "Running", None, id="lost readiness"),
        pytest.param(pod(ready_since=20, deleting=True), "Draining", None, id="leaving"),
        pytest.param(pod(unschedulable_since=1), "Starting", None, id="no place"),
        pytest.param(pod(scheduled=False), "Starting", None, id="brand new"),
        pytest.param(pod(state=waiting("ContainerCreating")), "Starting", None, id="being created"),
        pytest.param(pod(state=waiting("ErrImagePull", "timeout")), "Starting", None, id="registry stumbles"),
        pytest.param(pod(state=waiting("ImagePullBackOff", "no such tag")), "Starting", names.IMAGE_PULL_FAILED, id="image"),
        pytest.param(pod(state=waiting("CreateContainerConfigError", 'secret "keys" not found')), "Starting",
                     names.CONTAINER_CONFIG_ERROR, id="secret missing"),
        pytest.param(pod(state=terminated(1, "model not found: x")), "Failed", names.MODEL_LOAD_FAILED, id="load failed"),
        pytest.param(pod(state=waiting("CrashLoopBackOff"), last_state=terminated(2, "--dtype: no")), "Failed",
                     names.MODEL_LOAD_FAILED, id="crash loop before ready"),
        pytest.param(pod(state=terminated(1, OOM)), "Failed", names.INSUFFICIENT_GPU, id="device full"),
        pytest.param(pod(state=terminated(137)), "Failed", names.ENGINE_CRASHED, id="killed"),
        pytest.param(pod(state=terminated(137, reason="OOMKilled")), "Failed", names.ENGINE_CRASHED, id="OOMKilled"),
        pytest.param(pod(was_ready_until=90, state=waiting("CrashLoopBackOff"), last_state=terminated(1), restarts=2, started=False),
                     "Failed", names.ENGINE_CRASHED, id="crash after it was ready"),
        pytest.param(pod(restarts=1, last_state=terminated(1)), "Starting", names.MODEL_LOAD_FAILED, id="second start"),
        pytest.param(pod(ready_since=50, restarts=1, last_state=terminated(1)), "Running", None, id="recovered"),
        pytest.param(pod(unschedulable_since=1, message='0/2 nodes are available: persistentvolumeclaim "w" not found.'),
                     "Starting", names.MODEL_LOAD_FAILED, id="claim missing"),
        pytest.param(pod(init=[{"image": "loader:1", "state": waiting("ImagePullBackOff")}], state=waiting("PodInitializing")),
                     "Starting", names.IMAGE_PULL_FAILED, id="init image"),
    ],
)  # fmt: skip
def test_phase_and_failure(given: dict[str, Any], phase: str, failure: str | None) -> None:
    found = pods.replica(given)
    assert (found.phase, found.failure) == (phase, failure)


def test_messages_name_the_cause() -> None:
    assert pods.replica(pod(state=terminated(1, "line one\nno such file: /models/x\n"))).message == (
        "ended with exit status 1: no such file: /models/x"
    )
    assert "signal 11" in pods.replica(pod(state=terminated(139))).message
    assert "memory limit" in pods.replica(pod(state=terminated(137, reason="OOMKilled"))).message
    assert "engine:1" in pods.replica(pod(state=waiting("ImagePullBackOff", "no such tag"))).message
    assert "Insufficient nvidia.com/gpu" in pods.replica(pod(unschedulable_since=3)).message


def test_times_hash_and_generation_come_through() -> None:
    found = pods.replica(pod(unschedulable_since=3, created=1), None, 7)
    assert found.unschedulable_since_s == T0 + 3
    assert found.created_s == T0 + 1
    assert found.template_hash == "h1"
    assert found.generation_rejected == 7
    assert pods.replica(pod(), {"incumbent": {"generation": 4}}).incumbent_generation == 4


@pytest.mark.parametrize(
    ("time", "text"),
    [
        ("9999-12-31T23:59:59-12:00", "9999-12-31T23:59:59Z"),
        ("0001-01-01T00:00:00+14:00", "1000-01-01T00:00:00Z"),
    ],
)
def test_a_moment_that_utc_has_no_year_for_is_cut(time: str, text: str) -> None:
    assert pods.rfc3339(pods.unix(time)) == text


def test_a_pod_that_was_ready_once_is_known_after_an_operator_restart() -> None:
    assert pods.replica(pod(was_ready_until=90, started=False)).was_ready
    assert not pods.replica(pod()).was_ready


def test_an_evicted_pod_is_over_and_no_pod_on_its_way_out_is_spoken_to() -> None:
    assert pods.over(pod(phase="Failed"))
    assert pods.admin_reachable(pod(ready_since=1))
    assert not pods.admin_reachable(pod(ready_since=1, deleting=True))
    assert not pods.admin_reachable(pod())


def test_a_pod_that_only_another_container_holds_back_was_never_ready_and_names_it() -> None:
    found = pod(started=True)
    [engine] = found["status"]["containerStatuses"]
    engine["ready"] = True
    found["status"]["containerStatuses"].append({"name": "companion", "ready": False})
    seen = pods.replica(found)
    assert (seen.ready, seen.was_ready) == (False, False)
    assert seen.message == "its engine is ready, and container companion is not"


def test_a_pod_that_waits_for_a_volume_is_not_one_without_room() -> None:
    for message in (
        "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        '0/2 nodes are available: persistentvolumeclaim "weights" not found.',
    ):
        found = pods.replica(pod(unschedulable_since=3, message=message))
        assert found.unschedulable_since_s is None
        assert found.message == message
    assert pods.replica(pod(unschedulable_since=3)).unschedulable_since_s == T0 + 3


def test_a_download_is_asked_for_while_the_engine_starts_only() -> None:
    assert pods.loads(pod())
    assert not pods.loads(pod(ready_since=20))
    assert not pods.loads(pod(was_ready_until=90, started=True))
    assert not pods.loads(pod(deleting=True))
    assert not pods.loads(pod(state=waiting("ContainerCreating")))
    assert not pods.loads(pod(state=waiting("CrashLoopBackOff"), last_state=terminated(1)))
    assert not pods.loads(pod(unschedulable_since=1))


def test_how_far_a_download_is_stands_in_the_message() -> None:
    found = pods.replica(pod(), loading="downloads the model: 40 % of 2.7 GiB")
    assert (found.downloading, found.message) == (True, "downloads the model: 40 % of 2.7 GiB")
    for loading, failure in (
        ("downloads the model", names.MODEL_LOAD_FAILED),
        ("downloads the model: 0 % of 1.0 GiB", None),
    ):
        again = pods.replica(pod(restarts=1, last_state=terminated(1, "no such model")), loading=loading)
        assert again.failure == failure, "a question to the hub is no news after a failure, bytes are"
        assert again.downloading == (failure is None)
        assert (loading in again.message) == (failure is None)


def test_a_pod_that_lacks_a_volume_is_asked_about_after_a_while_and_says_the_kubelets_words() -> None:
    made = pod(state=waiting("ContainerCreating"), phase="Pending")
    assert not pods.held_up(made, T0 + pods.CREATING_PATIENCE_S - 1)
    assert pods.held_up(made, T0 + pods.CREATING_PATIENCE_S)
    assert not pods.held_up(pod(), T0 + 100), "it runs"
    assert not pods.held_up(pod(state=waiting("ContainerCreating"), deleting=True), T0 + 100)
    events = [
        {"reason": "FailedMount", "message": 'secret "old" not found', "lastTimestamp": moment(1)},
        {"reason": "FailedMount", "message": 'secret "keys" not found', "lastTimestamp": moment(9)},
        {"reason": "Unhealthy", "message": "a probe", "lastTimestamp": moment(20)},
    ]
    said = pods.complaint(events)
    assert said == 'secret "keys" not found'
    assert pods.complaint(events[2:]) is None
    found = pods.replica(made, complaint=said)
    assert (found.failure, found.message) == (names.FAILED_MOUNT, said)
    assert pods.replica(pod(), complaint=said).failure is None, "what was said before it started is over"
