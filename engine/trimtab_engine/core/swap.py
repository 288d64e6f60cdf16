"""Preemption by swap: room for KV blocks in CPU memory, the copies that the next step begins with, and whether it pays.

Owned by `core.lifecycle`; the runner carries out the copies of a step before its forward pass, first all out, then all in.
Knows block ids; nothing of requests or tensors.

Why the order is enough: a block that is copied out holds KV of committed steps, and whoever is given it meanwhile writes it
in the step of the copy or later. Room that a copy into the pool frees is handed out again from the next step on.
"""

from __future__ import annotations

from collections.abc import Sequence

Copy = tuple[int, int]


def pays(num_blocks: int, block_copy_s: float, recompute_s: float | None) -> bool:
    """Whether copying out and in again costs less than computing again; `recompute_s` None: unknown, and a copy is cheap."""
    return recompute_s is None or 2 * num_blocks * block_copy_s < recompute_s


class SwapSpace:
    """Ids 0..num_blocks-1 of blocks in CPU memory."""

    __slots__ = ("_free", "_in", "_leaving", "_out", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._out: list[Copy] = []
        self._in: list[Copy] = []
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be copied out to."""
        return len(self._free)

    def copy_out(self, blocks: Sequence[int]) -> list[int]:
        """Have these blocks of the pool copied here; returns where to, in their order. The caller has checked `num_free`."""
        assert len(blocks) <= len(self._free), f"{len(blocks)} blocks to swap, room for {len(self._free)}"
        places = [self._free.pop() for _ in blocks]
        self._out += zip(blocks, places, strict=True)
        return places

    def copy_in(self, places: Sequence[int], blocks: Sequence[int], first: int) -> None:
        """Have `places[first:]` copied into `blocks[first:]` of the pool (what is before is there already); all are freed."""
        self._in += zip(places[first:], blocks[first : len(places)], strict=True)
        self._leaving += places

    def discard(self, places: Sequence[int]) -> None:
        """Nobody will want these again. A copy out that has not been handed to a step is not made."""
        gone = set(places)
        self._out = [copy for copy in self._out if copy[1] not in gone]
        self._free += places

    def take(self) -> tuple[list[Copy], list[Copy]]:
        """The copies (pool block → place) and (place → pool block) that the step being handed out begins with."""
        out, into = self._out, self._in
        self._free += self._leaving
        self._out, self._in, self._leaving = [], [], []
        return out, into

    def check(self, held: Sequence[int]) -> None:
        """Assert conservation between steps; `held`: places of all swapped requests."""
        everything = sorted([*self._free, *self._leaving, *held])
        assert everything == list(range(self.num_blocks)), "blocks in CPU memory leaked or are held twice"
