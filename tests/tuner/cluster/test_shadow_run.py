"""What a Shadow run replays: the newest recorded requests, as many as there is time for; and to whom: all of its engines, or none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from kubernetes import client as kubernetes_client

from support.services import run_resource
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.cluster import evaluators, metrics, shadow
from trimtab_tuner.cluster.kube import Kube
from trimtab_tuner.cluster.metrics import PodFinder
from trimtab_tuner.cluster.notebook import RunOver
from trimtab_tuner.cluster.objects import run_of
from trimtab_tuner.cluster.shadow import LEAST_REQUESTS, OnceReady, Readiness, newest
from trimtab_tuner.commands import work
from trimtab_tuner.errors import InputError
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import Unknown
from trimtab_tuner.trace import Trace, TraceRequest

HOUR_S = 3600.0


def every(seconds: float, for_s: float = HOUR_S) -> Trace:
    """A request each so many seconds; the last ones have long prompts."""
    count = int(for_s / seconds)
    return Trace(tuple(TraceRequest(i * seconds, 10 + i, 5) for i in range(count)), "test", "records")


def test_it_is_the_last_window_of_the_recording() -> None:
    trace = every(1.0)
    part = newest(trace, 300.0, 10 * HOUR_S)
    assert part.span_s == pytest.approx(300.0, abs=1.0)
    assert part.requests[-1].prompt_tokens == trace.requests[-1].prompt_tokens
    assert part.requests[0].arrival_s == 0.0


def test_it_is_shorter_where_the_time_limit_is_short() -> None:
    # Incumbent, candidate, confirmation and one to spare, each with a quarter of its length for what is between.
    assert newest(every(1.0), 300.0, 600.0).span_s == pytest.approx(120.0, abs=1.0)


def test_it_is_longer_where_the_window_holds_too_few_requests() -> None:
    part = newest(every(30.0), 300.0, 10 * HOUR_S)
    assert len(part) >= LEAST_REQUESTS
    assert part.span_s > 300.0


def test_a_short_recording_is_taken_whole() -> None:
    trace = every(1.0, for_s=50.0)
    assert newest(trace, 300.0, 10 * HOUR_S) == trace


def test_its_candidates_may_be_in_force_in_every_mode_but_off() -> None:
    def modes(evaluator: str) -> tuple[str, ...]:
        built = run_resource(evaluator=evaluator)
        built["metadata"]["uid"] = "u"
        return evaluators.modes(run_of(built))

    assert modes("Shadow") == ("Recommend", "Canary", "Apply")
    assert modes("Live") == ("Canary", "Apply")


@pytest.mark.parametrize("text", ["", "2", "@http://a", "0@http://a", "two@http://a", "2@"])
def test_engines_are_named_by_number_and_address(text: str) -> None:
    assert work._engines("2@http://[fd00::9]:8000").url == "http://[fd00::9]:8000"
    with pytest.raises(InputError, match=r"--engines.*N@URL"):
        work._engines(text)


@dataclass
class Cluster:
    """An API server that knows the EndpointSlice of one Service, whose pods are this very server; and gives their metrics."""

    ready: int = 0
    port: int = 0
    asked: int = 0  # how often for endpoints
    on_asked: Callable[[], None] = field(default=lambda: None)

    def answer(self, path: str) -> str:
        if path == "/metrics":
            return "trimtab_num_requests_running 0\n"
        self.asked += 1
        self.on_asked()
        endpoints = [
            {
                "addresses": ["127.0.0.1"],
                "conditions": {"ready": number < self.ready},
                "targetRef": {"kind": "Pod", "name": f"try-shadow-{number}", "uid": f"u{number}"},
            }
            for number in range(3)
        ]
        made = {"ports": [{"name": "http", "port": self.port}], "endpoints": endpoints}
        return json.dumps({"items": [made]})


@contextlib.contextmanager
def serving(cluster: Cluster) -> Iterator[Kube]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = cluster.answer(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        cluster.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Kube(kubernetes_client.Configuration(host=f"http://127.0.0.1:{cluster.port}"), pauses_s=())
        finally:
            server.shutdown()


async def allowed() -> str | None:
    return None


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are asked for again each time, and without a pause."""
    monkeypatch.setattr(metrics, "FRESH_S", -1.0)
    monkeypatch.setattr(shadow, "LOOK_AGAIN_S", 0.0)


class Counting:
    """An `Evaluator` that notes how many engines there were when it was asked."""

    same_requests = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.began_with: list[int] = []

    async def evaluate(
        self,
        config: LiveConfig | None,
        *,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        self.began_with.append(self._cluster.ready)
        return Measurement("unknown", LiveConfig(), 1, 0.0, 0.0, Unknown(""), ())


def test_nothing_is_measured_before_all_engines_are_there() -> None:
    cluster, said = Cluster(), list[tuple[str, str]]()

    def one_more() -> None:
        cluster.ready = min(2, cluster.asked // 3)

    cluster.on_asked = one_more
    with serving(cluster) as kube:
        find = PodFinder(kube, "team", "try-shadow")
        readiness = Readiness(find, 2, allowed, lambda label, text: said.append((label, text)))
        inner = Counting(cluster)
        measure = OnceReady(inner, readiness).evaluate(None, baseline=None, on_progress=lambda _: None)
        asyncio.run(measure)
    assert inner.began_with == [2]
    assert said == [("engines", "waiting: 0 of 2 engines are ready")], "once, however long it takes"
    assert readiness.waited_s > 0
    assert cluster.asked >= 6


def test_a_run_that_is_over_waits_for_no_engine() -> None:
    async def over() -> str | None:
        raise RunOver("the run is Stopped: its time limit is over")

    with serving(Cluster(ready=1)) as kube:
        readiness = Readiness(PodFinder(kube, "team", "try-shadow"), 2, over, lambda *_: None)
        with pytest.raises(RunOver, match="time limit"):
            asyncio.run(readiness.wait())


@pytest.mark.parametrize(("ready", "said"), [(1, "1 of 2 engines are ready"), (2, None), (3, None)])
def test_a_candidate_goes_when_an_engine_is_lost(ready: int, said: str | None) -> None:
    with serving(Cluster(ready=ready)) as kube:
        readiness = Readiness(PodFinder(kube, "team", "try-shadow"), 2, allowed, lambda *_: None)
        assert asyncio.run(readiness.forbidden()) == said


@pytest.mark.parametrize(("ready", "said"), [(1, "1 of 2 engines are ready"), (2, None)])
def test_the_death_of_an_engine_is_waited_for_until_it_would_show(ready: int, said: str | None) -> None:
    cluster = Cluster(ready=2)

    def later() -> None:
        if cluster.asked >= 3:
            cluster.ready = ready

    cluster.on_asked = later
    with serving(cluster) as kube:
        find = PodFinder(kube, "team", "try-shadow")
        readiness = Readiness(find, 2, allowed, lambda *_: None, loss_shows_s=1.5 if ready == 2 else 60.0)
        assert asyncio.run(readiness.lost()) == said
    assert cluster.asked >= 3


def test_what_holds_a_candidate_is_said_before_what_that_does_to_engines() -> None:
    async def paused() -> str | None:
        return "tuning is paused"

    with serving(Cluster()) as kube:
        readiness = Readiness(PodFinder(kube, "team", "try-shadow"), 2, paused, lambda *_: None)
        assert asyncio.run(readiness.forbidden()) == "tuning is paused"


@pytest.mark.parametrize(
    ("ready", "wanted", "failures"),
    [
        (2, 2, ()),
        (1, 2, (("pods", "1 of 2 engines are ready"),)),
        (1, None, ()),
        (0, None, (("pods", "no ready pod stands behind the service"),)),
    ],
)
def test_numbers_of_fewer_engines_than_a_run_has_are_none(
    ready: int, wanted: int | None, failures: tuple[tuple[str, str], ...]
) -> None:
    async def look(kube: Kube) -> tuple[tuple[str, str], ...]:
        async with httpx.AsyncClient() as client:
            find = PodFinder(kube, "team", "try-shadow")
            return (await metrics.scraping(client, find, 1.0, wanted=wanted).snapshot()).failures

    with serving(Cluster(ready=ready)) as kube:
        assert asyncio.run(look(kube)) == failures
