"""Condition SLOMet: judged by requests within the window, from a real Prometheus, Unknown whenever nothing can be said."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support.engine_server import wait_until
from support.local_http import QuietHandler, serving
from support.prometheus import start_prometheus
from trimtab_operator import names
from trimtab_operator.api.service import Slo, SloClass
from trimtab_operator.cluster.observe import Key
from trimtab_operator.cluster.slo import SloWatch
from trimtab_operator.plan.slo import MIN_REQUESTS, UNASKED, Counts, judge

CHAT = Key("team-a", "chat")
SLO = Slo(window_s=60.0, classes=(SloClass("batch", objective=80.0),))


@pytest.mark.parametrize(
    ("counts", "verdict", "message"),
    [
        ({}, "Unknown", "fewer than 20 requests within spec.slo.window"),
        ({("default", "ttft"): Counts(MIN_REQUESTS - 1, 0)}, "Unknown", "fewer than 20 requests within spec.slo.window"),
        ({("default", "ttft"): Counts(0, MIN_REQUESTS - 1)}, "Unknown", "fewer than 20 requests within spec.slo.window"),
        ({("default", "ttft"): Counts(MIN_REQUESTS, 0)}, "Met", ""),
        ({("default", "ttft"): Counts(99, 1), ("default", "itl"): Counts(99, 1)}, "Met", ""),
        ({("default", "ttft"): Counts(99, 1), ("default", "itl"): Counts(98, 2)}, "Violated", "itl of class default"),
        ({("batch", "itl"): Counts(80, 20)}, "Met", ""),
        ({("batch", "itl"): Counts(79, 21), ("default", "ttft"): Counts(0, 50)}, "Violated",
         "ttft of class default, itl of class batch"),
        ({("gone", "ttft"): Counts(0, 500)}, "Unknown", "fewer than 20 requests within spec.slo.window"),
    ],
)  # fmt: skip
def test_the_verdict_is_by_share_of_requests_in_each_class(
    counts: dict[tuple[str, str], Counts], verdict: str, message: str
) -> None:
    found = judge(SLO, counts)
    assert (found.verdict, found.message) == (verdict, message)


@contextmanager
def web_server(answer: dict[str, tuple[int, str]], heard: list[dict[str, str]]) -> Iterator[str]:
    """Answers `answer[""]` to everything; `heard` gets the request headers."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            heard.append(dict(self.headers))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, text = answer[""]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

    with serving(Handler) as port:
        yield f"http://127.0.0.1:{port}"


def exposition(met: int, violated: int) -> tuple[int, str]:
    """An engine's counters."""
    series = 'trimtab_slo_requests_total{slo_class="default",slo="itl",generation="%d",outcome="%s"} %d\n'
    text = "# TYPE trimtab_slo_requests_total counter\n"
    # Two generations: the counts of both are within the window.
    for generation in (1, 2):
        text += series % (generation, "met", met) + series % (generation, "violated", violated)
    return 200, text


@pytest.mark.slow
def test_verdicts_follow_a_real_prometheus_and_are_told_when_they_change() -> None:
    engine = {"": exposition(0, 0)}
    labels = {"namespace": CHAT.namespace, "pod": "chat-engine-7c9d5b6f4-x2x4z"}
    told: list[Key] = []
    with web_server(engine, []) as target, start_prometheus([f"{target}/metrics"], labels=labels) as url:
        watch = SloWatch(url, None, told.append)
        other = Key("team-b", "chat")
        assert watch.about(CHAT, SLO) == watch.about(other, SLO) == UNASKED

        def turned(verdict: str) -> bool:
            watch.turn()
            return watch.about(CHAT, SLO).verdict == verdict

        wait_until(lambda: turned("Unknown"), 60.0)
        engine[""] = exposition(200, 1)
        wait_until(lambda: turned("Met"), 60.0)
        engine[""] = exposition(220, 60)
        wait_until(lambda: turned("Violated"), 60.0)
        assert watch.about(CHAT, SLO).message == "itl of class default"
        assert watch.about(other, SLO).verdict == "Unknown", "another namespace's requests are not its"
        relaxed = replace(SLO, objective=50.0)
        watch.about(CHAT, relaxed)
        watch.turn()
        assert watch.about(CHAT, relaxed).verdict == "Met", "of the edited objective"
        before = len(told)
        watch.turn()
        assert len(told) == before, "nothing is told at rest"
    assert told.count(CHAT) >= 3
    watch.turn()
    lost = watch.about(CHAT, SLO)
    assert (lost.verdict, lost.reason) == ("Unknown", names.METRICS_UNAVAILABLE)
    watch.forget(CHAT)
    assert watch.about(CHAT, SLO) == UNASKED


def test_a_shadows_requests_are_not_the_services_even_where_a_cut_name_looks_alike() -> None:
    # As the API server cuts them to 63 characters: of a run that is called as the service's Deployment is.
    key = Key(CHAT.namespace, "a" * 34)
    labels = {"namespace": key.namespace, "slo_class": "default", "slo": "itl", "outcome": "violated"}
    own, shadow = f"{key.name}-engine-7c9d5b6f4-x2x4z", f"{key.name}-engine-shadow-7c9d5b6f4x2x4z"
    assert len(shadow) == 63
    for pod, verdict in ((own, "Violated"), (shadow, "Unknown")):
        sample = {"metric": {**labels, "pod": pod}, "value": [0, "100"]}
        body = json.dumps({"status": "success", "data": {"result": [sample]}})
        with web_server({"": (200, body)}, []) as url:
            watch = SloWatch(url, None, lambda key: None)
            watch.about(key, SLO)
            watch.turn()
            assert watch.about(key, SLO).verdict == verdict


@pytest.mark.parametrize(
    ("files", "header"),
    [
        ({}, None),
        ({"token": "secret\n"}, "Bearer secret"),
        ({"username": "u", "password": "p"}, "Basic " + base64.b64encode(b"u:p").decode()),
    ],
)
def test_credentials_are_read_anew_each_time(
    files: dict[str, str], header: str | None, tmp_path: Path
) -> None:
    heard: list[dict[str, str]] = []
    with web_server({"": (200, '{"status": "success", "data": {"result": []}}')}, heard) as url:
        watch = SloWatch(url, tmp_path, lambda key: None)
        watch.about(CHAT, SLO)
        watch.turn()
        assert "Authorization" not in heard[0]
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        watch.turn()
        assert heard[1].get("Authorization") == header
        assert watch.about(CHAT, SLO).reason == names.NOT_ENOUGH_SAMPLES


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, "who are you"), "Prometheus answers 401"),
        ((200, "<html>"), "the answer is not Prometheus'"),
        ((200, '{"data": {}}'), "the answer is not Prometheus'"),
    ],
)
def test_what_is_wrong_with_prometheus_is_in_the_message(answer: tuple[int, str], message: str) -> None:
    with web_server({"": answer}, []) as url:
        watch = SloWatch(url, None, lambda key: None)
        watch.about(CHAT, SLO)
        watch.turn()
        found = watch.about(CHAT, SLO)
    assert (found.verdict, found.reason, found.message) == ("Unknown", names.METRICS_UNAVAILABLE, message)


def test_a_broken_certificate_is_a_message_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("nonsense")
    watch = SloWatch("https://127.0.0.1:1", tmp_path, lambda key: None)
    watch.about(CHAT, SLO)
    watch.turn()
    assert watch.about(CHAT, SLO).reason == names.METRICS_UNAVAILABLE
