"""Prompts of an exact length: token ids drawn by seed, with shared prefixes where the trace has them.

Called by `replay.py`. Token ids (not text) make a prompt exactly as long as the trace says, on every server that takes them at
`/v1/completions`. Ids come from a sample text that the server itself tokenises, so they are ordinary tokens of its vocabulary.

The seed of the *contents* is fresh for every replay unless given: repeating the same contents would let a prefix cache answer
the second replay from the first, and lengths and arrivals alone are what comparisons share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .trace import Trace, TraceRequest

PromptKind = Literal["tokens", "text"]
# Used when the server has no /tokenize: above the special and byte tokens, below the end of common vocabularies.
ASSUMED_IDS = (1000, 20000)
MIN_POOL = 16

SAMPLE = (
    "time year people way day man thing woman life child world school state family student group country problem hand part"
    " place case week company system program question work government number night point home water room mother area money"
    " story fact month lot right study book eye job word business issue side kind head house service friend father power hour"
    " game line end member law car city community name president team minute idea body information back parent face others"
    " level office door health person art war history party result change morning reason research girl guy moment air teacher"
    " force education foot boy age policy music market sense nation plan college interest death experience effect class control"
    " field development role effort rate heart drug show leader light voice wife whole police mind price report decision son"
    " view relationship town road arm difference value building action season society tax director position player record paper"
)
WORDS = SAMPLE.split()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompt of each request. `ids` is the pool of token ids (int64), sorted and distinct."""

    kind: PromptKind
    ids: NDArray[np.int64]
    seed: int
    block_tokens: int | None

    @staticmethod
    def for_trace(trace: Trace, kind: PromptKind, pool: Sequence[int], seed: int) -> PromptMaker:
        """`pool`: usable token ids; ignored for text."""
        return PromptMaker(kind, np.unique(np.asarray(pool, dtype=np.int64)), seed, trace.prefix_block_tokens)

    def make(self, index: int, request: TraceRequest) -> list[int] | str:
        """The prompt of request `index`: exactly `prompt_tokens` ids, or about as many words.

        Equal leading prefix blocks give equal leading content; the rest is the request's own.
        """
        size = len(WORDS) if self.kind == "text" else len(self.ids)
        picks = self._picks(index, request, size)
        if self.kind == "text":
            return " ".join(WORDS[pick] for pick in picks.tolist())
        ids: list[int] = self.ids[picks].tolist()
        return ids

    def _picks(self, index: int, request: TraceRequest, size: int) -> NDArray[np.int64]:
        length = request.prompt_tokens
        parts: list[NDArray[np.int64]] = []
        made = 0
        if request.prefix_block_ids is not None and self.block_tokens is not None:
            for block_id in request.prefix_block_ids:
                if made >= length:
                    break
                parts.append(self._draw(f"block|{block_id}", self.block_tokens, size))
                made += self.block_tokens
        if made < length:
            parts.append(self._draw(f"request|{index}", length - made, size))
        return np.concatenate(parts)[:length]

    def _draw(self, name: str, count: int, size: int) -> NDArray[np.int64]:
        key = hashlib.blake2b(f"{self.seed}|{name}".encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(key, "big")).integers(0, size, count)
