"""Shapes of log-probabilities, on made-up numbers."""

from functools import cache

from support.tiny_models import tiny_tokenizer
from trimtab_engine.messages import Token
from trimtab_engine.server.openai.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    joined,
    prompt_logprobs,
    token_string,
)
from trimtab_engine.server.text.pieces import PieceTable
from trimtab_engine.server.text.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def pieces() -> PieceTable:
    return tokenizer().pieces


def token_id(token: str) -> int:
    found = tiny_tokenizer().token_to_id(token)
    assert found is not None
    return found


def token(identity: int, logprob: float, top: list[tuple[int, float]] | None = None) -> Token:
    return Token("r", identity, logprob=logprob, rank=1, top=top)


def test_a_token_keeps_its_space_and_partial_characters_are_escaped() -> None:
    assert token_string(pieces(), token_id("Ġthe")) == " the"
    assert token_string(pieces(), token_id("ð")) == "\\xf0"


def test_chat_entries_carry_bytes_and_exactly_the_best_asked_for() -> None:
    a, b, first = token_id("a"), token_id("b"), token_id("ð")
    got = chat_logprobs(pieces(), [token(first, -0.5, [(a, -0.1), (b, -float("inf"))])], 2)
    assert got == {
        "content": [
            {
                "token": "\\xf0",
                "logprob": -0.5,
                "bytes": [0xF0],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.1, "bytes": [97]},
                    {"token": "b", "logprob": -9999.0, "bytes": [98]},
                ],
            }
        ],
        "refusal": None,
    }
    assert (
        chat_logprobs(pieces(), [token(a, -0.5, [(a, -0.1), (b, -0.2)])], 0)["content"][0]["top_logprobs"]
        == []
    )


def test_completion_offsets_run_through_the_echo_and_all_chunks() -> None:
    text = "the 🙂 ship"
    ids = tokenizer().encode(text)
    cut = len(ids) // 2
    builder = CompletionLogprobs(pieces(), 1, skip_special_tokens=True)
    prompt = builder.prompt(ids[:cut], [None, *[(-1.0, 2, [(5, -0.5)]) for _ in ids[1:cut]]])
    chunks = [builder.outputs([token(i, -0.25, [(i, -0.25)])]) for i in ids[cut:]]
    whole = prompt
    for chunk in chunks:
        whole = joined(whole, chunk)
    assert whole["token_logprobs"] == [None] + [-1.0] * (cut - 1) + [-0.25] * (len(ids) - cut)
    assert whole["top_logprobs"][0] is None
    starts = [len(b"".join(pieces()[i] for i in ids[:k]).decode("utf-8", "ignore")) for k in range(len(ids))]
    assert whole["text_offset"] == starts


def test_the_chosen_token_is_always_among_the_completion_s_best() -> None:
    a, b = token_id("a"), token_id("b")
    got = CompletionLogprobs(pieces(), 1, skip_special_tokens=True).outputs([token(a, -3.0, [(b, -0.1)])])
    assert got["top_logprobs"] == [{"b": -0.1, "a": -3.0}]


def test_partial_characters_do_not_collide_as_keys() -> None:
    first, second = token_id("ð"), token_id("Ł")
    top = [(first, -0.1), (second, -0.2)]
    got = CompletionLogprobs(pieces(), 2, skip_special_tokens=True).outputs([token(first, -0.1, top)])
    assert got["top_logprobs"] == [{"bytes:\\xf0": -0.1, "bytes:\\x9f": -0.2}]


def test_prompt_logprobs_name_each_token_with_rank() -> None:
    a, b = token_id("a"), token_id("b")
    got = prompt_logprobs(pieces(), [a, b], [None, (-2.0, 7, [(a, -0.1)])], 1)
    assert got == [
        None,
        {
            str(a): {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
            str(b): {"logprob": -2.0, "rank": 7, "decoded_token": "b"},
        },
    ]
