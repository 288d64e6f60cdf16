"""What engines answer to the operator, over real sockets: their images are somebody else's, so anything may come, for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from support.local_http import QuietHandler, serving
from trimtab_operator.cluster import engines
from trimtab_operator.cluster.engines import Engines, EngineUnreachable
from trimtab_operator.cluster.tokens import Signer
from trimtab_operator.plan.live_push import Push

Json = dict[str, Any]
CONFIG = {
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
}
DOCUMENT = {"generation": 1, "source": "Spec", "config": CONFIG}
ACCOUNT = {"incumbent": DOCUMENT, "in_force": DOCUMENT, "candidate": None, "highest_generation": 1}
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def engine(
    answer: Answer, asked: list[tuple[str, Json]] | None = None, *, headless: bool = False
) -> Iterator[Json]:
    """A pod whose admin port answers every request by `answer`, and notes bodies in `asked`. `headless`: what is
    answered begins with the status line."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if asked is not None:
                asked.append((self.path, json.loads(body)))
            if not headless:
                self.send_response(200)
                self.end_headers()
            answer(self)

        do_PUT = do_GET

    with serving(Handler) as port:
        ports = [{"name": "admin", "containerPort": port}]
        yield {
            "metadata": {"name": "a", "uid": "u"},
            "spec": {"containers": [{"name": "engine", "ports": ports}]},
            "status": {"podIP": "127.0.0.1"},
        }


@pytest.fixture
def asking() -> Iterator[Engines]:
    made = Engines(Signer.new())
    yield made
    made.close()


def says(content: object) -> Answer:
    return lambda handler: (
        handler.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode()),
        None,
    )[1]


def for_ever(piece: bytes, pause_s: float) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        pause = threading.Event()
        try:
            while True:
                handler.wfile.write(piece)
                pause.wait(pause_s)
        except OSError:
            return  # the operator has hung up

    return answer


def test_an_account_of_the_live_config_is_taken(asking: Engines) -> None:
    with engine(says(ACCOUNT)) as pod:
        assert asking.read_backs({"a": pod}) == {"a": ACCOUNT}


def test_a_pod_is_held_if_it_says_so(asking: Engines) -> None:
    asked: list[tuple[str, Json]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"{}")

    with engine(answer, asked) as pod, engine(says([])) as other:
        assert asking.hold({"a": pod, "b": other}, {"a": 15.0, "b": 15.0}) == {"a"}
    assert asked == [("/admin/drain", {"hold_s": 15.0})]


@pytest.mark.parametrize("answer", [
    says({}), says([]), says(b""), says(b"\xff"), says(b"[" * 100_000), says({**ACCOUNT, "incumbent": None}),
    says({**ACCOUNT, "highest_generation": "1"}), says({**ACCOUNT, "highest_generation": 2**63}),
    says({**ACCOUNT, "candidate": DOCUMENT}), says(json.dumps({**ACCOUNT, "candidate": {**DOCUMENT, "until": float("nan")}}).encode()),
    says({**ACCOUNT, "in_force": {**DOCUMENT, "config": {**CONFIG, "scheduling_policy": "x" * 65}}}),
    says({**ACCOUNT, "in_force": {**DOCUMENT, "config": {**CONFIG, "max_num_seqs": 2**31}}}),
    for_ever(b"x" * 4096, 0.0), for_ever(b"x", 0.02),
])  # fmt: skip
def test_any_other_answer_counts_as_none_and_holds_nobody_up(
    asking: Engines, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ANSWER_S", 1.0)
    with engine(answer) as pod:
        assert asking.read_backs({"a": pod}) == {}
        assert asking.loading({"a": pod}) == {}
        said = asking.say({"a": pod}, {"a": (Push(DOCUMENT),)})
        assert isinstance(said["a"], EngineUnreachable)


@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTT", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 "]
)
def test_headers_that_drip_hold_nobody_up(
    asking: Engines, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ANSWER_S", 1.0)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(begin)
        for_ever(b"x", 0.05)(handler)

    with engine(answer, headless=True) as pod, engine(says(ACCOUNT)) as good:
        assert asking.read_backs({"a": pod, "b": good}) == {"b": ACCOUNT}
        said = asking.say({"a": pod}, {"a": (Push(DOCUMENT),)})
        assert isinstance(said["a"], EngineUnreachable)


def test_a_connection_is_cut_no_sooner_than_its_time_is_over(asking: Engines) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        threading.Event().wait(1.0)
        handler.wfile.write(json.dumps(ACCOUNT).encode())

    with engine(slowly) as pod:
        assert asking.read_backs({"a": pod}) == {"a": ACCOUNT}
