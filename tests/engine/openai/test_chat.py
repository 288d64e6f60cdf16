"""POST /v1/chat/completions, models, tokenize: through the real client where it has a method."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from trimtab_engine.server.text.tokenizer import Tokenizer

MODEL = "tiny"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a tab?"},
]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is a tab?<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_reply_has_openai_s_shape(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0)
    assert made.id.startswith("chatcmpl-")
    assert made.object == "chat.completion"
    choice = made.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert made.usage is not None
    assert made.usage.completion_tokens == 6


def test_a_chat_is_its_rendered_prompt(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    plain = client.completions.create(model=MODEL, prompt=RENDERED, max_tokens=12, temperature=0)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage is not None
    assert plain.usage is not None
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens


def test_text_parts_are_joined(http: httpx.Client) -> None:
    def tokens(content: Any) -> list[int]:
        answer = http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})
        listed: list[int] = answer.json()["tokens"]
        return listed

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokens(parts) == tokens("one\ntwo")


def test_max_completion_tokens_wins_over_its_old_name(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=3, max_tokens=7, temperature=0
    )
    assert made.usage is not None
    assert made.usage.completion_tokens == 3


def test_without_a_limit_a_chat_runs_to_the_model_s_length(client: openai.OpenAI) -> None:
    length = client.models.retrieve(MODEL).model_extra
    assert length is not None
    long = "word " * 600
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": long}], temperature=0
    )
    assert made.usage is not None
    assert made.usage.total_tokens == length["max_model_len"]
    assert made.choices[0].finish_reason == "length"


def test_chat_logprobs_carry_bytes_of_the_content(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, seed=3, logprobs=True, top_logprobs=5
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert raw.decode("utf-8", "replace") == made.choices[0].message.content
    for entry in logprobs.content:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 5
        assert best == sorted(best, reverse=True)
        assert entry.logprob <= best[0] <= 0


def test_a_final_message_can_be_continued(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "A tab is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == RENDERED + "A tab is"


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL) == listed[0]
    assert listed[0].model_extra is not None
    assert 0 < listed[0].model_extra["max_model_len"] <= 2048


@pytest.mark.parametrize("text", ["hello world", "Grüße 你好 🙂", ""])
def test_tokenize_and_detokenize_are_inverse(http: httpx.Client, tokenizer: Tokenizer, text: str) -> None:
    made = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert made["tokens"] == tokenizer.encode(text)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text}


def test_messages_tokenize_to_what_a_chat_costs(client: openai.OpenAI, http: httpx.Client) -> None:
    count = http.post("/tokenize", json={"messages": MESSAGES}).json()["count"]
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert made.usage is not None
    assert made.usage.prompt_tokens == count
