"""The recent workload by its shape: a ring of request records for `GET /admin/workload`, never any text or token id.

Filled by `metrics.ledger` when a request ends (rejected and aborted ones included), read by the admin app and from
there by the tuner, which replays it. Each record is one line of the product's own trace format.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import deque
from collections.abc import Sequence

CAPACITY = 20_000


class WorkloadLog:
    """Ring of the last CAPACITY records with a monotone cursor.

    `block_size` must be the engine's, so that a simulator can reproduce prefix hits. Ids are keyed with a random key per
    process: equal prefixes give equal ids, and nobody can test a guess of the text against them.
    """

    def __init__(self, block_size: int = 16, capacity: int = CAPACITY) -> None:
        self.block_size = block_size
        self._key = os.urandom(16)
        self._ring: deque[dict[str, object]] = deque(maxlen=capacity)
        self._next = 0  # cursor of the next record

    def prefix_block_ids(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """Ids of the prompt's full blocks, chained: an id stands for its block and all before it."""
        ids = array("Q")
        parent = b""
        size = self.block_size
        flat = array("q", prompt_token_ids)
        for start in range(0, len(flat) - size + 1, size):
            block = flat[start : start + size].tobytes()
            parent = hashlib.blake2b(parent + block, digest_size=8, key=self._key).digest()
            ids.append(int.from_bytes(parent, "big") >> 11)  # 53 bits: exact in every JSON reader
        return ids

    def append(
        self,
        *,
        arrival_unix_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        slo_class: str,
        tenant: str | None,
        outcome: str,
        prefix_block_ids: Sequence[int],
    ) -> None:
        """Add one ended request; the oldest falls out when the ring is full."""
        self._ring.append(
            {
                "arrival_s": arrival_unix_s,
                "prompt_tokens": prompt_tokens,
                "cached_tokens": cached_tokens,
                "output_tokens": output_tokens,
                "slo_class": slo_class,
                "tenant": tenant,
                "outcome": outcome,
                "prefix_block_ids": prefix_block_ids,
            }
        )
        self._next += 1

    def read(self, since: int = 0, limit: int = 5_000) -> dict[str, object]:
        """Records from cursor `since` on, at most `limit`; `next` is the cursor to go on with, `dropped` what fell out."""
        first = self._next - len(self._ring)
        start = min(max(since, first), self._next)
        stop = min(start + limit, self._next)
        records = [
            {**record, "prefix_block_ids": list(_ids(record))}
            for record in (self._ring[i - first] for i in range(start, stop))
        ]
        return {
            "records": records,
            "next": stop,
            "dropped": max(0, first - max(since, 0)),
            "block_size": self.block_size,
        }


def _ids(record: dict[str, object]) -> Sequence[int]:
    ids = record["prefix_block_ids"]
    assert isinstance(ids, Sequence)
    return ids
