"""A download in words: true, and the same for a whole tenth, so that a status is written ten times and not a thousand."""

from __future__ import annotations

from typing import Any

import pytest

from support.pods import T0, moment, pod
from support.services import service
from trimtab_operator import names
from trimtab_operator.api.status import Resolved, ServiceStatus
from trimtab_operator.plan import cluster
from trimtab_operator.plan.loading import LOOK_EVERY_S, describe
from trimtab_operator.plan.manifests import hash_of, pod_template

GIB = 2**30


def lifecycle(fraction: float, total_bytes: int | None = 27 * GIB // 10, **more: Any) -> dict[str, Any]:
    return {
        "ready": False,
        "phase": "loading",
        "stage": "download",
        "fraction": fraction,
        "total_bytes": total_bytes,
        **more,
    }


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (lifecycle(0.0), "downloads the model: 0 % of 2.7 GiB"),
        (lifecycle(0.43), "downloads the model: 40 % of 2.7 GiB"),
        (lifecycle(0.499), "downloads the model: 40 % of 2.7 GiB"),
        (lifecycle(1.0, 5 * 2**20), "downloads the model: 100 % of 5.0 MiB"),
        (lifecycle(0.0, None), "downloads the model"),
        (lifecycle(0.2, waiting_for="HTTP 503"), "downloads the model: 20 % of 2.7 GiB; waiting: HTTP 503"),
        ({"stage": "load", "fraction": 0.5}, None),
        (["not", "ours"], None),
        (None, None),
        ({"ready": True, "phase": "ready"}, None),
        ({"stage": "download"}, None),
    ],
)  # fmt: skip
def test_words(said: object, want: str | None) -> None:
    assert describe(said) == want


def test_a_thousand_looks_at_a_download_change_the_status_ten_times() -> None:
    built = service(**{"model.uri": "hf://organisation/name"})
    settings = cluster.Settings(Resolved(image="engine:1"))
    wanted = hash_of(pod_template(built, settings.defaults))
    status, texts = ServiceStatus(), []
    children: dict[tuple[str, str], dict[str, Any]] = {}
    for step in range(1001):
        text = describe(lifecycle(step / 1000))
        assert text is not None
        loading = {"chat-engine-1": text}
        observed = cluster.Observed(
            built, status, children, pods=(pod(template_hash=wanted),), loading=loading
        )
        now = T0 + step
        decision = cluster.decide(observed, settings, now, moment(step))
        children |= {(m["kind"], m["metadata"]["name"]): m for m in decision.changes.apply}
        found = cluster.conclude(observed, decision, now, moment(step))
        if found.status != status:
            status = found.status
            ready, loaded = status.condition(names.READY), status.condition(names.MODEL_LOADED)
            assert ready is not None
            assert loaded is not None
            assert text in ready.message
            assert (loaded.reason, loaded.status) == (names.MODEL_DOWNLOADING, "False")
            assert status.model is not None
            assert status.model.state == "Downloading"
            texts.append(text)
        assert found.look_again_s is not None
        assert found.look_again_s <= now + LOOK_EVERY_S
    assert len(texts) == 11


def test_nobody_looks_often_at_a_model_that_is_not_downloaded() -> None:
    built = service()
    settings = cluster.Settings(Resolved(image="engine:1"))
    observed = cluster.Observed(
        built, pods=(pod(template_hash=hash_of(pod_template(built, settings.defaults))),)
    )
    decision = cluster.decide(observed, settings, T0, moment(0))
    found = cluster.conclude(observed, decision, T0, moment(0))
    assert found.look_again_s is None or found.look_again_s > T0 + 60


def test_a_big_download_is_progress_after_the_deadline_and_a_silent_start_is_not() -> None:
    built = service(**{"model.uri": "hf://organisation/name", "rollout.progressDeadline": "60s"})
    settings = cluster.Settings(Resolved(image="engine:1"))
    one = pod(template_hash=hash_of(pod_template(built, settings.defaults)))
    for loading, want in (({"chat-engine-1": "downloads the model"}, "False"), ({}, "True")):
        observed = cluster.Observed(built, pods=(one,), loading=loading)
        decision = cluster.decide(observed, settings, T0 + 100, moment(100))
        stalled = cluster.conclude(observed, decision, T0 + 100, moment(100)).status.condition(names.STALLED)
        assert stalled is not None
        assert stalled.status == want
