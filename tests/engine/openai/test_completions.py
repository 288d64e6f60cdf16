"""POST /v1/completions through the real client, the real server and the real engine."""

from __future__ import annotations

import httpx
import openai
import pytest

from trimtab_engine.server.text.tokenizer import Tokenizer

PROMPT = "Tell me about the weather in Paris"
MODEL = "tiny"


def greedy(client: openai.OpenAI, max_tokens: int = 24, prompt: str = PROMPT) -> str:
    made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0)
    return made.choices[0].text


def test_a_completion_has_openai_s_shape(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    assert made.id.startswith("cmpl-")
    assert (made.object, made.model) == ("text_completion", MODEL)
    choice = made.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert made.usage is not None
    assert made.usage.completion_tokens == 16  # OpenAI's default
    assert made.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert made.usage.total_tokens == made.usage.prompt_tokens + 16


def test_a_prompt_of_token_ids_says_what_its_text_says(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    made = client.completions.create(model=MODEL, prompt=ids, max_tokens=24, temperature=0)
    assert made.choices[0].text == greedy(client)


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "ids"])
def test_several_prompts_with_n_are_indexed_prompt_first(
    client: openai.OpenAI, tokenizer: Tokenizer, as_ids: bool
) -> None:
    prompts = [PROMPT, "one two three", "the ship"]
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    made = client.completions.create(
        model=MODEL, prompt=encoded if as_ids else prompts, n=2, max_tokens=8, temperature=0
    )
    want = [greedy(client, 8, prompt) for prompt in prompts for _ in range(2)]
    assert [choice.index for choice in made.choices] == list(range(6))
    assert [choice.text for choice in made.choices] == want
    assert made.usage is not None
    assert made.usage.completion_tokens == 6 * 8
    assert made.usage.prompt_tokens == sum(len(ids) for ids in encoded)


def test_child_i_of_a_seeded_request_has_seed_plus_i(client: openai.OpenAI) -> None:
    many = client.completions.create(model=MODEL, prompt=PROMPT, n=3, seed=41, max_tokens=12)
    single = [
        client.completions.create(model=MODEL, prompt=PROMPT, seed=41 + i, max_tokens=12).choices[0].text
        for i in range(3)
    ]
    assert [choice.text for choice in many.choices] == single
    assert len(set(single)) == 3


def test_the_same_seed_says_the_same_among_other_batch_mates(client: openai.OpenAI) -> None:
    def seeded(seed: int, n: int = 1) -> list[str]:
        made = client.completions.create(
            model=MODEL, prompt=PROMPT, seed=seed, n=n, max_tokens=20, temperature=0.9
        )
        return [choice.text for choice in made.choices]

    alone = seeded(7)[0]
    assert seeded(7)[0] == alone
    # The batch: six siblings with the seeds 4 to 9, so seed 7 runs as the fourth of them.
    assert seeded(4, n=6)[3] == alone
    assert seeded(8)[0] != alone


def test_requests_without_a_seed_differ(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, n=4, max_tokens=20, temperature=1.5)
    assert len({choice.text for choice in made.choices}) == 4


@pytest.mark.parametrize("start", [0, 1, 3, 6, 9])
def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI, start: int) -> None:
    text = greedy(client)
    stop = text[start : start + 3]  # cut without regard to tokens
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop, "never said"]
    )
    choice = made.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.model_extra == {"stop_reason": stop}
    assert made.usage is not None
    assert made.usage.completion_tokens < 24


def test_a_stop_string_can_be_kept(client: openai.OpenAI) -> None:
    text = greedy(client)
    stop = text[4:7]
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop,
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    assert made.choices[0].text == text[: text.index(stop) + len(stop)]


def test_a_stop_before_min_tokens_does_not_end_it(client: openai.OpenAI) -> None:
    stop = greedy(client, 1)
    assert stop
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop, extra_body={"min_tokens": 10}
    )
    assert made.usage is not None
    assert made.usage.completion_tokens >= 10
    assert made.choices[0].text.startswith(stop)


def test_a_stop_token_ends_it_and_is_named(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
    )
    assert whole.choices[0].model_extra is not None
    ids = whole.choices[0].model_extra["token_ids"]
    stop = ids[5]
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0,
        extra_body={"stop_token_ids": [stop], "return_token_ids": True},
    )  # fmt: skip
    choice = made.choices[0]
    assert choice.model_extra is not None
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
    assert choice.model_extra["token_ids"] == ids[: ids.index(stop) + 1]


def test_the_end_token_ends_it_unless_ignored_or_too_early(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    end = tokenizer.encode("<|im_end|>")[0]
    options = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 8,
        "logit_bias": {str(end): 100},
    }

    def run(**extra: object) -> tuple[str, str, int]:
        made = client.completions.create(**options, extra_body=extra)  # type: ignore[call-overload]
        choice = made.choices[0]
        assert choice.model_extra["stop_reason"] is None
        return choice.text, choice.finish_reason, made.usage.completion_tokens

    assert run() == ("", "stop", 1)
    assert run(ignore_eos=True) == ("", "length", 8)
    assert run(ignore_eos=True, skip_special_tokens=False) == ("<|im_end|>" * 8, "length", 8)
    text, reason, count = run(min_tokens=4)
    assert (reason, count) == ("stop", 5)
    assert "<|im_end|>" not in text


def test_echo_puts_the_prompt_before(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, echo=True)
    assert made.choices[0].text == PROMPT + greedy(client)
    of_ids = client.completions.create(
        model=MODEL, prompt=tokenizer.encode(PROMPT), max_tokens=24, temperature=0, echo=True
    )
    assert of_ids.choices[0].text == made.choices[0].text


def test_logprobs_describe_the_text_and_are_raw(client: openai.OpenAI) -> None:
    cool, hot = (
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=10,
            temperature=t,
            logprobs=3,
            seed=1,
            extra_body={"top_k": 1},
        ).choices[0]
        for t in (0.01, 5.0)
    )
    assert cool.logprobs is not None
    assert hot.logprobs is not None
    # Of the raw logits: neither temperature nor top_k changes them.
    assert cool.logprobs.token_logprobs == pytest.approx(hot.logprobs.token_logprobs, abs=1e-3)
    assert cool.logprobs.tokens is not None
    assert cool.logprobs.text_offset is not None
    assert cool.logprobs.top_logprobs is not None
    assert cool.logprobs.token_logprobs is not None
    assert len(cool.logprobs.tokens) == 10
    for token, chosen, best in zip(
        cool.logprobs.tokens, cool.logprobs.token_logprobs, cool.logprobs.top_logprobs, strict=True
    ):
        assert len(best) == 3  # top_k 1 chose the best one
        assert best[token] == chosen == max(best.values())
    for token, offset in zip(cool.logprobs.tokens, cool.logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert cool.text[offset:].startswith(token)


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    scored = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=1
    ).choices[0]
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.tokens is not None
    assert scored.logprobs.token_logprobs[:1] == [None]
    assert len(scored.logprobs.token_logprobs) == len(ids) + 4
    assert "".join(scored.logprobs.tokens[: len(ids)]) == PROMPT
    # What the model would say after each prefix must agree with what it says of the whole.
    after = client.completions.create(
        model=MODEL, prompt=ids[:4], max_tokens=1, temperature=0, logprobs=20
    ).choices[0]
    assert after.logprobs is not None
    assert after.logprobs.top_logprobs is not None
    assert scored.logprobs.top_logprobs is not None
    best_after = max(after.logprobs.top_logprobs[0].items(), key=lambda item: item[1])
    best_scored = max(scored.logprobs.top_logprobs[4].items(), key=lambda item: item[1])
    assert best_scored[0] == best_after[0]
    assert best_scored[1] == pytest.approx(best_after[1], abs=1e-3)


def test_the_prompt_alone_can_be_scored(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert made.usage is not None
    assert made.usage.completion_tokens == 0
    choice = made.choices[0]
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(tokenizer.encode(PROMPT))


def test_prompt_logprobs_are_vllm_s(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2}
    got = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert got[0] is None
    for token_id, row in zip(ids[1:], got[1:], strict=True):
        assert row[str(token_id)]["decoded_token"] == tokenizer.pieces[token_id].decode()
        assert {entry["rank"] for entry in row.values()} >= {1, 2}


def test_a_prefix_hit_is_told_in_usage(client: openai.OpenAI) -> None:
    prompt = "This prompt is long enough to fill some blocks of the cache. " * 4
    first, second = (
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0) for _ in range(2)
    )
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert second.usage.prompt_tokens - 16 <= cached < second.usage.prompt_tokens
    assert second.choices[0].text == first.choices[0].text


def test_truncation_keeps_the_end(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    cut, short = (
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra)
        for prompt, extra in ((ids, {"truncate_prompt_tokens": 5}), (ids[-5:], {}))
    )
    assert cut.usage is not None
    assert cut.usage.prompt_tokens == 5
    assert cut.choices[0].text == short.choices[0].text


def test_the_client_s_request_id_names_the_reply_and_may_repeat(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "request_id": "mine"}
    for _ in range(2):
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-1"})
        assert answer.json()["id"] == "cmpl-mine"
        assert answer.headers["x-request-id"] == "trace-1"
        assert answer.headers["x-trimtab-generation"] == "0"


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        user="anna",
        extra_body={"made_up": {"a": [1]}},
    )
    assert made.choices[0].text == greedy(client)
