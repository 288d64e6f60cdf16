"""Keys, tenants, classes, the queue limit and ignored priorities, on a server that has them all."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import httpx
import openai
import pytest

from support.engine_server import EngineServer, wait_until

MODEL = "guarded"
ANNA = {"Authorization": "Bearer sk-anna"}


def client(server: EngineServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60.0)


def complete(server: EngineServer, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    asked = {"prompt": "hi", "max_tokens": 1, **body}
    return httpx.post(
        f"{server.url}/v1/completions", json=asked, headers={**ANNA, **(headers or {})}, timeout=60.0
    )


def last_record(server: EngineServer) -> dict[str, Any]:
    records: list[dict[str, Any]] = httpx.get(f"{server.admin_url}/admin/workload").json()["records"]
    return records[-1]


def metric(server: EngineServer, name: str) -> float:
    found = re.search(
        rf"^{re.escape(name)} ([0-9.e+-]+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE
    )
    return float(found[1]) if found else 0.0


def test_without_a_known_key_there_is_an_authentication_error(guarded_engine: EngineServer) -> None:
    with client(guarded_engine, "sk-wrong") as made, pytest.raises(openai.AuthenticationError) as caught:
        made.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/guarded"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
def test_every_route_with_content_wants_a_key(guarded_engine: EngineServer, method: str, path: str) -> None:
    answer = httpx.request(method, f"{guarded_engine.url}{path}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "AuthenticationError"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/ping"])
def test_probes_and_scrapes_want_none(guarded_engine: EngineServer, path: str) -> None:
    assert httpx.get(f"{guarded_engine.url}{path}").status_code == 200


def test_the_tenant_is_the_key_s_name_or_a_trusted_header(guarded_engine: EngineServer) -> None:
    with client(guarded_engine, "sk-ben") as made:
        made.completions.create(model=MODEL, prompt="hi", max_tokens=1)
    assert last_record(guarded_engine)["tenant"] == "ben"
    assert complete(guarded_engine, {"X-Tenant": "gateway-says"}).status_code == 200
    assert last_record(guarded_engine)["tenant"] == "gateway-says"


@pytest.mark.parametrize(
    ("headers", "body", "want"),
    [
        ({}, {}, "default"),
        ({}, {"slo_class": "batch"}, "batch"),
        ({}, {"vllm_xargs": {"slo_class": "batch"}}, "batch"),
        ({"X-Class": "batch"}, {}, "batch"),
        ({"X-Class": "default"}, {"slo_class": "batch"}, "default"),
        ({"X-Other": "batch"}, {}, "default"),
    ],
)
def test_the_class_comes_from_body_or_trusted_header(
    guarded_engine: EngineServer, headers: dict[str, str], body: dict[str, Any], want: str
) -> None:
    assert complete(guarded_engine, headers, **body).status_code == 200
    assert last_record(guarded_engine)["slo_class"] == want


def test_an_unknown_class_is_refused_whoever_says_it(guarded_engine: EngineServer) -> None:
    for headers, body in (({}, {"slo_class": "gold"}), ({"X-Class": "gold"}, {})):
        answer = complete(guarded_engine, headers, **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "slo_class: 'gold' is not allowed; one of default, batch"


def test_replies_carry_the_generation_in_force(guarded_engine: EngineServer) -> None:
    in_force = guarded_engine.live_config()["in_force"]["generation"]
    assert complete(guarded_engine).headers["x-trimtab-generation"] == str(in_force)


def test_a_priority_is_accepted_and_counted_as_ignored_under_fcfs(guarded_engine: EngineServer) -> None:
    before = metric(guarded_engine, "trimtab_priority_ignored_total")
    assert complete(guarded_engine, priority=-5).status_code == 200
    assert metric(guarded_engine, "trimtab_priority_ignored_total") == before + 1


def test_a_full_queue_answers_503_with_retry_after_and_books_a_violation(
    guarded_engine: EngineServer,
) -> None:
    violated = 'trimtab_slo_requests_total{generation="%d",outcome="violated",slo="ttft",slo_class="default"}'
    name = violated % guarded_engine.live_config()["in_force"]["generation"]
    long = {"prompt": "hi", "max_tokens": 1900, "stream": True}
    url = f"{guarded_engine.url}/v1/completions"
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(httpx.Client(headers=ANNA, timeout=60.0))
        for _ in range(4):  # two run, two wait
            assert stack.enter_context(http.stream("POST", url, json=long)).status_code == 200
        before = metric(guarded_engine, name)
        rejected = metric(guarded_engine, 'trimtab_rejections_total{reason="queue_full"}')
        answer = complete(guarded_engine)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert answer.json()["error"]["code"] == "queue_full"
        assert metric(guarded_engine, 'trimtab_rejections_total{reason="queue_full"}') == rejected + 1
        assert metric(guarded_engine, name) >= before + 1
        # All or none: of several sequences that do not fit together none is started.
        with client(guarded_engine, "sk-anna") as made, pytest.raises(openai.InternalServerError) as caught:
            made.completions.create(model=MODEL, prompt="hi", n=3)
        assert caught.value.status_code == 503
    wait_until(lambda: metric(guarded_engine, "trimtab_num_requests_open") == 0)
    assert complete(guarded_engine).status_code == 200
