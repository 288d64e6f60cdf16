"""What is refused, as the real client raises it and as raw bodies; and that a refusal disturbs nothing."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from support.engine_server import EngineServer

MODEL = "tiny"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def body_error(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_bad_parameter_is_a_bad_request_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (400, "temperature", "BadRequestError")
    assert "temperature: -1.0 is not allowed; a number of at least 0 and at most 100" in error.message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt"),
        ("/v1/completions", {"prompt": [1, 512]}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [2**40]]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "z"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "slo_class": "gold"}, "slo_class"),
        ("/v1/completions", {"prompt": "a", "vllm_xargs": {"slo_class": 7}}, "slo_class"),
        ("/v1/completions", {"prompt": "a", "request_id": "with space"}, "request_id"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, "stream_options"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "hi"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "pirate", "content": "arr"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {**CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
    ],
)  # fmt: skip
def test_bad_input_is_400_naming_the_parameter(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert body_error(answer)["param"] == param
    assert body_error(answer)["type"] == "BadRequestError"


def test_an_unknown_class_is_told_the_known_ones(http: httpx.Client) -> None:
    error = body_error(http.post("/v1/completions", json={"prompt": "a", "slo_class": "gold"}))
    assert error["message"] == "slo_class: 'gold' is not allowed; one of default"


def test_a_prompt_too_long_is_told_the_real_numbers(client: openai.OpenAI) -> None:
    length = next(iter(client.models.list())).model_extra["max_model_len"]  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * (length + 7))
    assert caught.value.code == "context_length_exceeded"
    assert f"{length + 7} tokens" in caught.value.message
    assert f"at most {length - 1}" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 10, max_tokens=length)
    assert caught.value.param == "max_tokens"
    assert f"at most {length - 10}" in caught.value.message


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_body_that_is_no_json_is_a_bad_request(http: httpx.Client, path: str) -> None:
    answer = http.post(f"/v1/{path}", content=b'{"prompt": ')
    assert answer.status_code == 400
    assert "not valid JSON" in body_error(answer)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 1_100_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "x" * 1_100_000]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1_100_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 3000}, "messages"),
        ("/tokenize", {"prompt": "x" * 1_100_000}, "prompt"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    http: httpx.Client, path: str, body: Any, param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = body_error(answer)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "the model's length is" in error["message"]


def test_a_body_too_long_is_413(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b" " * (33 << 20))
    assert answer.status_code == 413
    assert body_error(answer)["code"] == "body_too_large"


def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert "'tiny'" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("POST", "/nothing", 404), ("GET", "/v1/completions", 405)],
)
def test_what_no_route_answers_has_an_openai_body_too(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert path in body_error(answer)["message"]


def test_embeddings_are_not_here(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="hi")


def test_refusals_leave_the_engine_untouched(http: httpx.Client, served_engine: EngineServer) -> None:
    # Everything above was refused before it reached the engine: it lives, and nothing is open.
    assert http.get("/health").status_code == 200
    metrics = http.get("/metrics").text
    assert "\ntrimtab_num_requests_waiting 0.0" in metrics
    assert served_engine.process.poll() is None
