"""Streams: the frames as clients rely on them, and the same text as the buffered reply."""

from __future__ import annotations

import codecs
import json
from typing import Any

import httpx
import openai
import pytest

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Write a story about a ship 🚢"}]


def frames(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    """Payloads of a stream; the closing [DONE] is checked and left out."""
    with http.stream("POST", path, json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-trimtab-generation"] == "0"
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_chat_chunks_have_openai_s_order(http: httpx.Client) -> None:
    chunks = frames(http, "/v1/chat/completions", messages=MESSAGES, max_tokens=12, temperature=0)
    first, last = chunks[0], chunks[-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {(c["id"], c["created"], c["object"], c["model"]) for c in chunks} == {
        (first["id"], first["created"], "chat.completion.chunk", MODEL)
    }
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert "role" not in last["choices"][0]["delta"]
    assert not any("usage" in c for c in chunks)


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}], ids=str)
def test_usage_comes_only_when_asked_for(http: httpx.Client, options: dict[str, Any]) -> None:
    chunks = frames(http, "/v1/completions", prompt="hi", max_tokens=3, stream_options=options)
    assert not any("usage" in c for c in chunks)


def test_usage_comes_once_and_last(http: httpx.Client) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    chunks = frames(http, "/v1/chat/completions", **asked, stream_options={"include_usage": True})
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    buffered = http.post("/v1/chat/completions", json=asked).json()["usage"]
    streamed = chunks[-1]["usage"]
    assert {**streamed, "prompt_tokens_details": None} == {**buffered, "prompt_tokens_details": None}


def test_usage_can_run_along(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = frames(http, "/v1/completions", prompt="hi", max_tokens=6, stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5, "temperature": 1.3},
    "several": {"seed": 9, "n": 3},
    "stop": {"seed": 3, "stop": ["e", "the ", "\n"]},
    "stop kept": {"seed": 3, "stop": ["a", "r"], "include_stop_str_in_output": True},
    "penalised": {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "specials shown": {"seed": 1, "temperature": 3.0, "skip_special_tokens": False, "ignore_eos": True},
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_deltas_add_up_to_the_buffered_text(http: httpx.Client, path: str, settings: dict[str, Any]) -> None:
    chat = "chat" in path
    asked = {**({"messages": MESSAGES} if chat else {"prompt": "hello"}), "max_tokens": 60, **settings}
    asked |= {"return_token_ids": True}
    buffered = http.post(path, json=asked).json()["choices"]
    texts = ["" for _ in buffered]
    ids: list[list[int]] = [[] for _ in buffered]
    reasons: list[tuple[Any, Any]] = [(None, None) for _ in buffered]
    for chunk in frames(http, path, **asked):
        choice = chunk["choices"][0]
        index = choice["index"]
        text = choice["delta"]["content"] if chat else choice["text"]
        assert reasons[index] == (None, None), "nothing follows the finish"
        texts[index] += text
        ids[index] += choice.get("token_ids", [])
        if choice["finish_reason"] is not None:
            reasons[index] = (choice["finish_reason"], choice["stop_reason"])
    assert texts == [c["message"]["content"] if chat else c["text"] for c in buffered]
    assert ids == [c["token_ids"] for c in buffered]
    assert reasons == [(c["finish_reason"], c["stop_reason"]) for c in buffered]


def test_a_chunk_s_tokens_logprobs_and_text_belong_together(http: httpx.Client) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 40, "seed": 2, "logprobs": True, "top_logprobs": 2}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    count = 0
    for chunk in frames(http, "/v1/chat/completions", **asked)[1:]:
        choice = chunk["choices"][0]
        entries = choice["logprobs"]["content"]
        count += len(entries)
        raw = b"".join(bytes(entry["bytes"]) for entry in entries)
        # The text of exactly these tokens; an unfinished character at their end comes with the token that ends it.
        assert choice["delta"]["content"] == decoder.decode(raw, final=choice["finish_reason"] is not None)
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert count == 40


def test_streamed_completion_logprobs_add_up_to_the_buffered_ones(http: httpx.Client) -> None:
    asked = {"prompt": "hello 🙂", "max_tokens": 20, "seed": 2, "logprobs": 2, "echo": True}
    want = http.post("/v1/completions", json=asked).json()["choices"][0]
    got: dict[str, list[Any]] = {name: [] for name in want["logprobs"]}
    text = ""
    for chunk in frames(http, "/v1/completions", **asked):
        text += chunk["choices"][0]["text"]
        for name, values in chunk["choices"][0]["logprobs"].items():
            got[name] += values
    assert text == want["text"]
    assert (got["tokens"], got["text_offset"]) == (
        want["logprobs"]["tokens"],
        want["logprobs"]["text_offset"],
    )
    assert got["token_logprobs"][1:] == pytest.approx(want["logprobs"]["token_logprobs"][1:], abs=1e-3)


def test_the_client_s_own_stream_reader_is_content(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=10,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    buffered = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=10, seed=1
    )
    assert text == buffered.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 10
