"""The door: types, ranges, defaults and what fits. Each refusal names parameter, value and allowed range."""

import json
from typing import Any

import pytest

from trimtab_engine.core.request import SamplingParams
from trimtab_engine.errors import RequestError, RequestTooLarge
from trimtab_engine.server.openai.errors import short
from trimtab_engine.server.openai.params import (
    Limits,
    check_stream,
    check_token_ids,
    fit,
    num_choices,
    sampling_params,
    stop_strings,
)
from trimtab_engine.server.openai.protocol import ChatBody, CompletionBody, parse

LIMITS = Limits(max_model_len=100, vocab_size=512)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({**CHAT, **fields}).encode(), ChatBody)


def check(body: CompletionBody | ChatBody) -> SamplingParams:
    num_choices(body)
    stop_strings(body)
    check_stream(body)
    fit(body, [1, 2, 3], LIMITS)
    return sampling_params(body, defaults={}, limits=LIMITS)


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", "hot", "valid number"),
    ("top_p", 0, "more than 0 and at most 1"),
    ("top_p", 1.01, "more than 0 and at most 1"),
    ("top_k", -2, "at least 0"),
    ("min_p", 1.5, "at most 1"),
    ("presence_penalty", 2.1, "at least -2 and at most 2"),
    ("frequency_penalty", -2.1, "at least -2 and at most 2"),
    ("repetition_penalty", 0, "more than 0"),
    ("n", 0, "at least 1 and at most 128"),
    ("n", 1000, "at least 1 and at most 128"),
    ("n", 1.5, "valid integer"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("max_tokens", 98, "at most 97"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "may be generated (16)"),
    ("seed", 2**63, "64 bits"),
    ("seed", -(2**63) - 1, "64 bits"),
    ("seed", "x", "valid integer"),
    ("stop", "", "1 to 1024 characters"),
    ("stop", ["a", ""], "1 to 1024 characters"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop_token_ids", [512], "0 to 511"),
    ("stop_token_ids", [-1], "0 to 511"),
    ("logit_bias", {"512": 1.0}, "0 to 511"),
    ("logit_bias", {"x": 1.0}, "token ids from 0 to 511 as keys"),
    ("logit_bias", {"1_0": 1.0}, "token ids from 0 to 511 as keys"),
    ("logit_bias", {"٣": 1.0}, "token ids from 0 to 511 as keys"),
    ("logit_bias", {"9" * 5000: 1.0}, "token ids from 0 to 511 as keys"),
    ("logit_bias", {"5": 101.0}, "at least -100 and at most 100"),
    ("logprobs", 21, "at most 20"),
    ("logprobs", -1, "at least 0"),
    ("prompt_logprobs", 21, "at most 20"),
    ("truncate_prompt_tokens", 0, "at least 1"),
    ("priority", 2**70, "64 bits"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES, ids=[f"{n}={v}" for n, v, _ in BAD_VALUES])
def test_a_bad_value_is_refused_with_name_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(completion(**{name: value}))
    assert caught.value.param == name
    assert str(caught.value).startswith(name)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("suffix", "end"),
        ("guided_json", {}),
        ("chat_template", "{{ x }}"),
    ],
)
def test_what_we_know_and_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="not supported") as caught:
        chat(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"suffix": ""},
        {"audio": None},
        {"modalities": ["text"]},
        {"user": "anna", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": True, "made_up": [1]},
    ],
)
def test_neutral_and_unknown_fields_are_ignored(fields: dict[str, Any]) -> None:
    assert check(chat(**fields)) == check(chat())


def test_null_means_not_given() -> None:
    names = [name for name in CompletionBody.model_fields if name != "prompt"]
    assert check(completion(**dict.fromkeys(names))) == check(completion())


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b"[1]", None, "a JSON object, not an array"),
        (b'{"prompt": "\xff"}', None, "not valid JSON"),
        (b'{"temperature": NaN}', None, "not valid JSON"),
        (b"[" * 100_000, None, "not valid JSON"),
        (b"{}", "messages", "messages: missing"),
        (b'{"messages": "hi"}', "messages", "messages: 'hi' is not allowed"),
        (b'{"messages": ["hi"]}', "messages", "item 0 is 'hi', not an object"),
    ],
)
def test_a_broken_body_is_named(raw: bytes, param: str | None, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse(raw, ChatBody)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", [1, 2, 1.5, "x"], "item 2 is 1.5, not an integer"),
        ("prompt", [1, True], "item 1 is True, not an integer"),
        ("prompt", ["a", None], "item 1 is None, not a string"),
        ("prompt", [[1], "a"], "item 1 is 'a', not a list"),
        ("prompt", [[1], [2, "a"]], "item 1 is 'a', not an integer"),
        ("prompt", 5, "a list of strings is wanted"),
        ("stop", ["a", 5], "item 1 is 5, not a string"),
        ("stop_token_ids", [1, "2"], "item 1 is '2', not an integer"),
    ],
)
def test_a_wrong_item_of_a_list_is_named_with_its_place(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        completion(**{field: value})
    assert caught.value.param == field


def test_an_error_shows_a_few_items_of_a_huge_value_and_looks_at_no_others() -> None:
    looked_at = []

    class Item:
        def __repr__(self) -> str:
            looked_at.append(self)
            return "item"

    assert short([Item()] * 100_000).startswith("[item, item")
    assert len(looked_at) <= 100


def test_any_top_k_beyond_the_vocabulary_means_all_of_it() -> None:
    assert check(completion(top_k=10**20)).top_k == LIMITS.vocab_size


def test_a_wrong_prompt_is_named_without_the_parser_s_inner_words() -> None:
    with pytest.raises(RequestError, match=r"^prompt: \{'a': 1\} is not allowed") as caught:
        completion(prompt={"a": 1})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("ids", [[-1], [512], [0, 511, 2**40]])
def test_a_token_id_outside_the_vocabulary_is_named_with_its_place(ids: list[int]) -> None:
    with pytest.raises(
        RequestError, match=rf"prompt\[{len(ids) - 1}\]: {ids[-1]} is not allowed; .* 0 to 511"
    ):
        check_token_ids("prompt", ids, 512)


def test_values_reach_the_sampling_parameters() -> None:
    body = completion(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, logit_bias={"7": -100, "8": 5}, seed=-3, stop_token_ids=[4, 4, 5], ignore_eos=True,
        min_tokens=2, logprobs=3,
    )  # fmt: skip
    assert check(body) == SamplingParams(
        min_tokens=2, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0,
        repetition_penalty=1.2, logit_bias=((7, -100.0), (8, 5.0)), seed=-3, stop_token_ids=(4, 5), ignore_eos=True,
        num_logprobs=3,
    )  # fmt: skip


def test_the_model_s_own_sampling_defaults_hold_where_the_request_is_silent() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    got = sampling_params(completion(top_k=-1), defaults=defaults, limits=LIMITS)
    assert (got.temperature, got.top_p, got.top_k) == (0.6, 0.95, 0)


def test_chat_logprobs_need_the_switch() -> None:
    assert check(chat(logprobs=True, top_logprobs=4)).num_logprobs == 4
    assert check(chat(logprobs=True)).num_logprobs == 0
    assert check(chat()).num_logprobs is None
    with pytest.raises(RequestError, match="top_logprobs: only allowed with logprobs"):
        check(chat(top_logprobs=4))


def test_echo_with_logprobs_asks_for_the_prompt_s() -> None:
    assert check(completion(echo=True, logprobs=2)).prompt_logprobs == 2
    assert check(completion(echo=True, logprobs=2, prompt_logprobs=5)).prompt_logprobs == 5
    assert check(completion(logprobs=2)).prompt_logprobs is None


def test_default_lengths() -> None:
    assert fit(completion(), [1], LIMITS).max_tokens == 16
    assert fit(completion(), [1] * 95, LIMITS).max_tokens == 5  # a default never refuses
    assert fit(chat(), [1], LIMITS).max_tokens is None
    assert fit(chat(max_tokens=3), [1], LIMITS).max_tokens == 3
    assert fit(chat(max_tokens=3, max_completion_tokens=7), [1], LIMITS).max_tokens == 7
    assert fit(completion(echo=True, max_tokens=0), [1], LIMITS).max_tokens == 0


def test_a_prompt_that_leaves_no_room_is_refused_with_real_numbers() -> None:
    assert fit(chat(), [1] * 99, LIMITS).prompt_token_ids == [1] * 99
    with pytest.raises(RequestTooLarge, match=r"100 tokens .* length is 100 tokens, .* at most 99") as caught:
        fit(chat(), [1] * 100, LIMITS)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_an_explicit_limit_without_room_is_refused_with_real_numbers() -> None:
    with pytest.raises(
        RequestTooLarge, match=r"max_completion_tokens: 41 .* the prompt has 60, so at most 40"
    ):
        fit(chat(max_completion_tokens=41), [1] * 60, LIMITS)


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    ids = list(range(200))
    assert fit(completion(truncate_prompt_tokens=5), ids, LIMITS).prompt_token_ids == ids[-5:]
    assert (
        fit(completion(truncate_prompt_tokens=-1, max_tokens=30), ids, LIMITS).prompt_token_ids == ids[-70:]
    )
    assert fit(completion(truncate_prompt_tokens=500), ids[:9], LIMITS).prompt_token_ids == ids[:9]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(completion(**fields))
    assert caught.value.param == param
