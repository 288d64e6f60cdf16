"""Whatever a body holds, the door answers with parameters or a RequestError, and with nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_engine.errors import RequestError
from trimtab_engine.server.openai import completions
from trimtab_engine.server.openai.params import (
    Limits,
    check_stream,
    fit,
    num_choices,
    sampling_params,
    stop_strings,
)
from trimtab_engine.server.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)

LIMITS = Limits(max_model_len=50, vocab_size=512)
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 1, 2**63, -(2**63), 2**64, 1e308]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def bodies(model: type[CompletionBody] | type[ChatBody]) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly plausible values, so that examples get past the first check; some of any kind."""
    plausible = {
        "prompt": st.sampled_from(["hi", ["a", "b"], [1, 2], [[1], [2]]]),
        "messages": st.just([{"role": "user", "content": "hi"}]),
    }
    fields: dict[str, st.SearchStrategy[Any]] = {
        name: st.one_of(plausible.get(name, NUMBERS), NUMBERS, JSON) for name in model.model_fields
    }
    required = {name: strategy for name, strategy in plausible.items() if name in model.model_fields}
    optional = {name: strategy for name, strategy in fields.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


def enter(body: CompletionBody | ChatBody) -> None:
    check_stream(body)
    num_choices(body)
    got = sampling_params(body, defaults={}, limits=LIMITS)
    assert 0 <= got.temperature <= 100
    assert 0 < got.top_p <= 1
    stop_strings(body)
    fitted = fit(body, [1, 2, 3], LIMITS)
    assert 1 <= len(fitted.prompt_token_ids) <= 3
    assert fitted.max_tokens is None or 0 <= fitted.max_tokens <= LIMITS.max_model_len - len(
        fitted.prompt_token_ids
    )
    if isinstance(body, CompletionBody):
        completions.check(body)


def refusal(call: Callable[[], object]) -> str:
    """The message of the RequestError; empty when all is well. Anything else gets through and fails the test."""
    try:
        call()
    except RequestError as error:
        return str(error)
    return ""


@given(bodies(CompletionBody))
def test_any_completion_body_is_taken_or_refused(data: dict[str, Any]) -> None:
    assert len(refusal(lambda: enter(parse(json.dumps(data).encode(), CompletionBody)))) < 500


@given(bodies(ChatBody))
def test_any_chat_body_is_taken_or_refused(data: dict[str, Any]) -> None:
    assert len(refusal(lambda: enter(parse(json.dumps(data).encode(), ChatBody)))) < 500


@given(JSON, st.sampled_from([CompletionBody, ChatBody, TokenizeBody, DetokenizeBody]))
def test_any_json_is_taken_or_refused(
    data: Any, model: type[CompletionBody | ChatBody | TokenizeBody | DetokenizeBody]
) -> None:
    assert len(refusal(lambda: parse(json.dumps(data).encode(), model))) < 500


@given(st.binary(max_size=40))
def test_any_bytes_are_taken_or_refused(raw: bytes) -> None:
    assert len(refusal(lambda: parse(raw, TokenizeBody))) < 500


def test_a_huge_wrong_value_is_not_sent_back_whole() -> None:
    raw = json.dumps({"prompt": "hi", "stop": [5] * 100_000}).encode()
    with pytest.raises(RequestError) as caught:
        parse(raw, CompletionBody)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text", [rb"\ud83d", rb"\ud83d and more text", rb"\udc00 and more text", rb"\ud83d\ud83d"]
)
def test_half_a_surrogate_pair_is_no_text(text: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse(b'{"prompt": "' + text + b'"}', CompletionBody)
