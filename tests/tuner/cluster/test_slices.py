"""How real traffic is cut into slices, so that a run fits into its time limit; and which pods are engines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trimtab_tuner.cluster import live, objects, pods
from trimtab_tuner.cluster.plan import Work
from trimtab_tuner.errors import InputError
from trimtab_tuner.units import span_text

Json = dict[str, Any]
SERVICE = objects.service_of({"metadata": {"name": "chat", "uid": "s"}, "spec": {}})
RUN = objects.run_of({"metadata": {"name": "try", "uid": "r"}, "spec": {"service": "chat"}})


def work(left_s: float, slice_s: float | None = None) -> Work:
    nobody: Any = None
    run = dataclasses.replace(RUN, slice_s=slice_s)
    return Work("team", run, SERVICE, nobody, nobody, nobody, nobody, nobody, time_left_s=left_s)


def test_two_hours_hold_windows_of_five_minutes() -> None:
    assert live.slices(work(7055)) == (300.0, 8)
    assert live.washout_s(300.0) == 30.0


def test_a_shorter_limit_costs_pairs_before_it_costs_length() -> None:
    assert live.slices(work(5000)) == (300.0, 6)


@pytest.mark.parametrize("left_s", [60.0, 600.0, 3000.0])
def test_a_limit_that_holds_no_whole_window_shortens_slices(left_s: float) -> None:
    length_s, pairs = live.slices(work(left_s))
    assert pairs == 6
    assert length_s < 300.0
    assert 14 * (length_s + live.washout_s(length_s)) == pytest.approx(left_s, rel=0.3)
    assert 14 * (length_s + live.washout_s(length_s)) <= left_s


def test_a_slice_that_was_asked_for_is_kept_or_refused() -> None:
    assert live.slices(work(600, 3.0)) == (3.0, 8)
    with pytest.raises(
        InputError, match=r"spec\.timeLimit.*at least 17m30s for slices of 1m; slices of 34s would fit"
    ):
        live.slices(work(600, 60.0))


def test_a_limit_that_holds_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"spec\.timeLimit"):
        live.slices(work(5.0))


def endpoint_slice(**endpoint: Any) -> Json:
    one = {
        "addresses": ["10.0.0.7"],
        "targetRef": {"kind": "Pod", "name": "chat-engine-x", "uid": "u"},
        **endpoint,
    }
    return {"ports": [{"name": "http", "port": 8000}], "endpoints": [one]}


def test_an_engine_is_a_ready_pod_behind_the_service() -> None:
    assert pods.of_slice(endpoint_slice(conditions={"ready": True})) == [
        pods.Pod("chat-engine-x", "u", "http://10.0.0.7:8000", "http://10.0.0.7:8001")
    ]
    assert len(pods.of_slice(endpoint_slice())) == 1, "absent means ready"
    assert pods.of_slice(endpoint_slice(conditions={"ready": False})) == []
    assert pods.of_slice(endpoint_slice(targetRef={"kind": "Node", "name": "n", "uid": "u"})) == []
    assert pods.of_slice({"ports": None, "endpoints": None}) == []
    v6 = pods.of_slice(endpoint_slice(addresses=["fd00::7"]))
    assert v6[0].metrics_url == "http://[fd00::7]:8000/metrics"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5s"),
        (59, "59s"),
        (120, "2m"),
        (3600, "1h"),
        (3605, "1h5s"),
        (7052, "1h57m32s"),
        (151_620, "42h7m"),
    ],
)
def test_long_times_are_told_as_people_write_them(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
