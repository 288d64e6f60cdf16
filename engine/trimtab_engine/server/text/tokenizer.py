"""Tokenizer of the HTTP process: a tokenizer.json through the `tokenizers` library (no transformers, no torch).

Loaded once by the server when the engine is ready; used by the OpenAI routes. Encoding of requests runs in a thread and
without the interpreter lock, so a long prompt does not hold up other streams.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from trimtab_engine.errors import ModelLoadError
from trimtab_engine.server.text.detokenizer import Detokenizer
from trimtab_engine.server.text.pieces import PieceTable


class Tokenizer:
    """Text ↔ token ids of one model. Safe to share: nothing in it changes after construction but caches."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self._raw = raw
        # A tokenizer.json may carry the padding and truncation of its training; neither belongs to serving.
        raw.no_padding()
        raw.no_truncation()
        added: dict[int, Any] = raw.get_added_tokens_decoder()
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = json.loads(raw.to_str()).get("decoder")
        self.pieces = PieceTable(raw.id_to_token, decoder, special)
        self.vocab_size: int = raw.get_vocab_size()
        self.longest_token: int = max(
            map(len, raw.get_vocab()), default=1
        )  # characters, as the vocabulary spells it

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json; raises ModelLoadError naming the file."""
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise ModelLoadError(f"{path}: not a usable tokenizer.json: {error}") from error
        return cls(raw)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those that the model puts around a plain text (BOS)."""
        # The batch form, for one text: `encode` keeps the interpreter lock all the while (a second for a megabyte).
        (encoded,) = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    async def encode_in_thread(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode` without blocking the event loop."""
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence that stands at the start of a text."""
        text: str = self._raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_name(self, token_id: int) -> str:
        """The vocabulary's own name of a token (`Ġhello`), empty for an id without one."""
        return self._raw.id_to_token(token_id) or ""

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental decoder that goes on after the prompt."""
        return Detokenizer(self.pieces, prompt_token_ids, skip_special_tokens=skip_special_tokens)
