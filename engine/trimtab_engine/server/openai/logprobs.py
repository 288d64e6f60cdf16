"""Log-probabilities in OpenAI's two shapes, chat and completions, and vLLM's `prompt_logprobs`.

Pure formatting of what the engine measured on the raw logits (before penalties, bias and temperature). Token strings are
those of the token within a text, so no space is lost and nothing accumulates; bytes that are no text are escaped.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from trimtab_engine.messages import Token
from trimtab_engine.server.text.pieces import PieceTable

_FLOOR = -9999.0  # JSON has no infinity; vLLM's stand-in

TopLogprobs = list[tuple[int, float]]
PromptLogprob = tuple[float, int, TopLogprobs] | None


def token_string(pieces: PieceTable, token_id: int) -> str:
    """A token as text; bytes that are not UTF-8 on their own as `\\xf0`."""
    return pieces[token_id].decode("utf-8", "backslashreplace")


def _completion_key(pieces: PieceTable, token_id: int) -> str:
    # OpenAI's completions mark partial characters; without the mark two of them could share one dictionary key.
    piece = pieces[token_id]
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)


def _chat_entry(pieces: PieceTable, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_string(pieces, token_id),
        "logprob": _finite(logprob),
        "bytes": list(pieces[token_id]),
    }


def chat_logprobs(pieces: PieceTable, tokens: Iterable[Token], num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat reply or chunk: one entry per token, with the `num_top` best each."""
    return {
        "content": [
            {
                **_chat_entry(pieces, token.token_id, token.logprob),
                "top_logprobs": [_chat_entry(pieces, i, value) for i, value in (token.top or [])[:num_top]],
            }
            for token in tokens
            if token.token_id is not None and token.logprob is not None
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """`choices[].logprobs` of completions, for one choice across its chunks (offsets go on from chunk to chunk)."""

    def __init__(self, pieces: PieceTable, num_top: int, *, skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._num_top = num_top
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0  # characters of text before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip_text(self, num_characters: int) -> None:
        """Text without logprobs stands before: an echoed prompt."""
        self._offset += num_characters

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[PromptLogprob]) -> dict[str, Any]:
        """The echoed prompt's; its first token has none."""
        rows = [
            (token_id, None if entry is None else (entry[0], entry[2]))
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
        return self._rows(rows)

    def outputs(self, tokens: Iterable[Token]) -> dict[str, Any]:
        """The next chunk's tokens."""
        rows: list[tuple[int, tuple[float, TopLogprobs] | None]] = [
            (token.token_id, (token.logprob, token.top or []))
            for token in tokens
            if token.token_id is not None and token.logprob is not None
        ]
        return self._rows(rows)

    def _rows(self, rows: Iterable[tuple[int, tuple[float, TopLogprobs] | None]]) -> dict[str, Any]:
        shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in rows:
            shape["tokens"].append(_completion_key(self._pieces, token_id))
            shape["text_offset"].append(self._offset)
            self._offset += len(
                self._decoder.decode(self._pieces.visible(token_id, self._skip_special_tokens))
            )
            if entry is None:
                shape["token_logprobs"].append(None)
                shape["top_logprobs"].append(None)
                continue
            logprob, top = entry
            shape["token_logprobs"].append(_finite(logprob))
            best = {_completion_key(self._pieces, i): _finite(value) for i, value in top[: self._num_top]}
            # The chosen token is always there, as OpenAI has it, even when it is not among the best.
            best.setdefault(_completion_key(self._pieces, token_id), _finite(logprob))
            shape["top_logprobs"].append(best)
        return shape


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two chunks of completions' logprobs as one."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(
    pieces: PieceTable, token_ids: Sequence[int], logprobs: Sequence[PromptLogprob], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token null or {token id: {logprob, rank, decoded_token}}."""
    rows: list[dict[str, Any] | None] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        if entry is None:
            rows.append(None)
            continue
        chosen, rank, top = entry
        row = {
            str(i): {"logprob": _finite(value), "rank": place, "decoded_token": token_string(pieces, i)}
            for place, (i, value) in enumerate(top[:num_top], start=1)
        }
        row.setdefault(
            str(token_id),
            {"logprob": _finite(chosen), "rank": rank, "decoded_token": token_string(pieces, token_id)},
        )
        rows.append(row)
    return rows
