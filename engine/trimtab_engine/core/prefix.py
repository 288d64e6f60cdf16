"""Prefix sharing: chained hashes of full blocks, pure look-ups, publication after a step has succeeded.

Used by `core.scheduler` (hits at admission, publication at commit). Knows requests' tokens and salts, and the block pool.

A block's key is H(parent key, its tokens); the first block's parent is H(tagged salt), so the chain stands for the whole
prefix within one salt. A hit also compares tokens, parent and salt, so that a colliding hash is a miss, never a wrong block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

from trimtab_engine.core.blocks import BlockPool
from trimtab_engine.core.request import Request

KEY_BYTES = 16


@lru_cache(maxsize=1024)
def root_key(salt: str | None) -> bytes:
    """Parent key of a first block. The tags keep "no salt" apart from any salt; a further kind gets a further tag."""
    tagged = b"none" if salt is None else b"salt" + salt.encode()
    return blake2b(tagged, digest_size=KEY_BYTES).digest()


@lru_cache(
    maxsize=16_384
)  # shared prefixes are looked up again and again, by requests that know nothing of each other
def block_key(parent: bytes, packed: bytes) -> bytes:
    """Key of a full block with these tokens, packed as 32-bit integers, after the prefix that `parent` stands for."""
    return blake2b(parent + packed, digest_size=KEY_BYTES).digest()


def prefix_keys(token_ids: Sequence[int], block_size: int, salt: str | None = None) -> list[bytes]:
    """Keys of all full blocks of a prompt, first to last: equal keys mean shareable prefixes."""
    keys: list[bytes] = []
    pack = Struct(f"{block_size}i").pack
    parent = root_key(salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_key(parent, pack(*token_ids[end - block_size : end]))
        keys.append(parent)
    return keys


class PrefixCache:
    """Finds and publishes blocks by their key. `request.block_hashes` memoises the chain of one request."""

    __slots__ = ("_pack", "_pool", "block_size", "enabled")

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._pool = pool
        # Packed tokens are hashed and compared several times faster than lists of integers.
        self._pack = Struct(f"{block_size}i").pack
        self.block_size = block_size
        self.enabled = enabled

    def readable(self, request: Request) -> bool:
        """Whether the request may reuse blocks. Prompt logprobs need every prompt position to be computed once."""
        return self.enabled and not (
            request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0
        )

    def lookup(self, request: Request) -> list[int]:
        """Leading blocks that are cached, at most (num_tokens - 1) // block_size: one token is always computed.

        Pure but for the memoised hashes: no reference, no order and no counter changes.
        """
        if not self.readable(request):
            return []
        pool, size, salt, pack = self._pool, self.block_size, request.cache_salt, self._pack
        token_ids, hashes = request.token_ids, request.block_hashes
        hits: list[int] = []
        parent = root_key(salt)
        for index in range((len(token_ids) - 1) // size):
            packed = pack(*token_ids[index * size : (index + 1) * size])
            if index == len(hashes):
                hashes.append(block_key(parent, packed))
            key = hashes[index]
            block = pool.find(key)
            if block is None or pool.contents(block) != (parent, salt, packed):
                break
            hits.append(block)
            parent = key
        return hits

    def publish(self, request: Request) -> None:
        """Make the request's full computed blocks findable. Called once the step that wrote them has succeeded."""
        size, salt, pack = self.block_size, request.cache_salt, self._pack
        token_ids, hashes = request.token_ids, request.block_hashes
        for index in range(request.num_published, request.num_computed // size):
            packed = pack(*token_ids[index * size : (index + 1) * size])
            parent = hashes[index - 1] if index else root_key(salt)
            if index == len(hashes):
                hashes.append(block_key(parent, packed))
            # An equal block published earlier stays the one that is found; ours goes back to the pool unkeyed.
            self._pool.tag(request.block_ids[index], hashes[index], (parent, salt, packed))
        request.num_published = max(request.num_published, request.num_computed // size)
