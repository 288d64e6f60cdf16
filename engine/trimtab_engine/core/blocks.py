"""The pool of KV blocks: reference counts, a least-recently-used free list, and the keys of cached contents.

Used by `core.prefix` and `core.scheduler`. Knows block ids and opaque keys; nothing of requests, tokens or tensors.

A block is *held* (references > 0) or *free* (in the free list). A freed block keeps its key and so its contents until it
is handed out again; so a free block may still be a prefix hit. Ids run from 1 to `num_blocks`. Block 0 is the null
block: it is never handed out, and serves here as the sentinel of the circular free list.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """All operations are O(1) a block. Not thread-safe: the scheduler's thread owns it."""

    __slots__ = (
        "_by_key",
        "_contents",
        "_keys",
        "_next",
        "_previous",
        "_references",
        "num_blocks",
        "num_free",
    )

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least 1 usable block")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        # Circular doubly linked list through the ids: next[0] is handed out first, previous[0] last.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._references = [0] * (num_blocks + 1)
        self._keys: list[bytes | None] = [None] * (num_blocks + 1)
        self._contents: list[object] = [None] * (num_blocks + 1)
        self._by_key: dict[bytes, int] = {}

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, least recently used first; what they cached is forgotten.

        The caller has checked `num_free`; asking for more is a bug of ours.
        """
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        following, previous, references, keys = self._next, self._previous, self._references, self._keys
        taken: list[int] = []
        block = following[0]
        for _ in range(count):
            taken.append(block)
            references[block] = 1
            key = keys[block]
            if key is not None:
                del self._by_key[key]
                keys[block] = None
                self._contents[block] = None
            block = following[block]
        following[0] = block
        previous[block] = 0
        self.num_free -= count
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block (a prefix hit), taking free ones off the free list."""
        for block in blocks:
            if self._references[block] == 0:
                before, after = self._previous[block], self._next[block]
                self._next[before] = after
                self._previous[after] = before
                self.num_free -= 1
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a sequence, given in sequence order.

        Walks from the tail, so that of one sequence the tail is reused first and its head, which more requests can
        share, last. Blocks without a key can never be hit; they are reused before any cached one.
        """
        following, previous = self._next, self._previous
        for block in reversed(blocks):
            left = self._references[block] - 1
            assert left >= 0, f"block {block} released more often than held"
            self._references[block] = left
            if left:
                continue
            if self._keys[block] is None:
                before, after = 0, following[0]
            else:
                before, after = previous[0], 0
            following[before] = block
            previous[block] = before
            following[block] = after
            previous[after] = block
            self.num_free += 1

    def find(self, key: bytes) -> int | None:
        """The block that carries `key`, held or free, or None. Changes nothing."""
        return self._by_key.get(key)

    def contents(self, block: int) -> object:
        """What `tag` stored with the block's key, None for an untagged block."""
        return self._contents[block]

    def tag(self, block: int, key: bytes, contents: object) -> bool:
        """Give a held block its key. False, and nothing changed, when another block carries that key already."""
        if key in self._by_key:
            return False
        assert self._references[block] > 0, f"block {block} is tagged while free"
        assert self._keys[block] is None, f"block {block} is tagged twice"
        self._by_key[key] = block
        self._keys[block] = key
        self._contents[block] = contents
        return True

    def references(self, block: int) -> int:
        """How many block tables hold the block."""
        return self._references[block]

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` stand in the free list; holding them would take them off it."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def check(self, held: dict[int, int]) -> None:
        """Assert conservation; `held` maps block id → number of block-table entries over all requests."""
        seen = 0
        block, before = self._next[0], 0
        while block:
            assert self._references[block] == 0, f"held block {block} stands in the free list"
            assert self._previous[block] == before, f"free list is torn at block {block}"
            seen += 1
            assert seen <= self.num_blocks, "the free list does not end"
            before, block = block, self._next[block]
        assert self._previous[0] == before, "free list is torn at its tail"
        assert seen == self.num_free, f"{seen} blocks in the free list, {self.num_free} counted"
        assert seen + len(held) == self.num_blocks, (
            f"{seen} free + {len(held)} held is not {self.num_blocks}: blocks leaked"
        )
        for block, count in held.items():
            assert block, "a request holds the null block"
            assert self._references[block] == count, (
                f"block {block} counts {self._references[block]} references, block tables hold {count}"
            )
        for key, block in self._by_key.items():
            assert self._keys[block] == key, f"the index points to block {block}, which carries another key"
        tagged = sum(1 for key in self._keys if key is not None)
        assert tagged == len(self._by_key), f"{tagged} blocks carry keys, the index has {len(self._by_key)}"
