"""Token ids → text, one at a time, without ever sending half a character.

One `Detokenizer` per output sequence, made by `Tokenizer.detokenizer`. Works on bytes (`pieces`), so its cost per token
is constant, exactly the unfinished UTF-8 character at the end is held back, and the pieces sum up to the text that
decoding all tokens at once gives. Knows nothing of stop strings or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from trimtab_engine.server.text.pieces import PieceTable

# A character has at most four bytes and a token at least one, so these many tokens hold all of a split character;
# twice that leaves room for special tokens, which have none.
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Incremental decoder of one sequence. Invalid bytes become U+FFFD, as in one-shot decoding."""

    def __init__(
        self, pieces: PieceTable, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._pieces = pieces
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt of token ids may end inside a character, which the first outputs then complete.
        tail = prompt_token_ids[-_CONTEXT_TOKENS:]
        self._decoder.decode(b"".join(pieces.visible(t, skip_special_tokens) for t in tail))

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is unfinished."""
        return self._decoder.decode(self._pieces.visible(token_id, self._skip_special_tokens))

    @property
    def holds_back(self) -> bool:
        """Whether an unfinished character waits for its next byte."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that never became complete, else nothing."""
        return self._decoder.decode(b"", final=True)
