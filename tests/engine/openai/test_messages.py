"""Messages on their way into the template."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from tokenizers import processors

from support.tiny_models import tiny_tokenizer
from trimtab_engine.errors import RequestError
from trimtab_engine.server.openai.chat import encode_chat
from trimtab_engine.server.openai.params import Limits
from trimtab_engine.server.openai.protocol import ChatBody, parse
from trimtab_engine.server.text.chat_template import ChatTemplate
from trimtab_engine.server.text.model_text import ModelText
from trimtab_engine.server.text.tokenizer import Tokenizer

# Shows everything that it gets; asks `is defined` as real templates with tools do.
SHOW = "{% for m in messages %}{% if m.tool_calls is defined %}CALLS {% endif %}{{ m | tojson }}{% endfor %}"
LIMITS = Limits(max_model_len=100, vocab_size=512)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def rendered(*messages: dict[str, Any], template: str | None = SHOW) -> str:
    text = ModelText(tokenizer(), None if template is None else ChatTemplate(template, {}))
    body = parse(json.dumps({"messages": messages}).encode(), ChatBody)
    return tokenizer().decode(
        asyncio.run(encode_chat(body, body.messages, text, LIMITS)), skip_special_tokens=False
    )


def test_empty_and_null_fields_are_as_good_as_absent() -> None:
    got = rendered({"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "name": None})
    assert got == '{"role": "assistant", "content": "x"}'


def test_other_fields_reach_the_template() -> None:
    message = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    assert rendered(message) == json.dumps(message)


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    assert rendered({"role": "user", "content": parts}) == '{"role": "user", "content": "a\\nb\\nc"}'


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, r"messages\[0\]\.content\[1\]\.type: 'image_url'"),
        ({"type": "text"}, r"messages\[0\]\.content\[1\]"),
        ({"type": "text", "text": 5}, r"messages\[0\]\.content\[1\]"),
        (7, r"messages\[0\]\.content\[1\]"),
    ],
)
def test_a_part_that_is_no_text_is_named(part: Any, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        rendered({"role": "user", "content": ["a", part]})


def test_a_model_without_a_template_says_what_to_use_instead() -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        rendered({"role": "user", "content": "a"}, template=None)


def test_a_chat_has_the_beginning_token_once_and_a_plain_prompt_has_it_too() -> None:
    raw = tiny_tokenizer()
    bos = raw.token_to_id("<|im_start|>")
    assert bos is not None
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    text = ModelText(Tokenizer(raw), ChatTemplate("{{ bos_token }}x", {"bos_token": "<|im_start|>"}))
    body = ChatBody(messages=[{"role": "user", "content": "hi"}])
    assert asyncio.run(encode_chat(body, body.messages, text, LIMITS)) == text.tokenizer.encode("x")
    assert text.tokenizer.encode("x").count(bos) == 1
