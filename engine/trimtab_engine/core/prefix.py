"""Prefix sharing: chained hashes of full blocks, pure look-ups, publication after a step has succeeded.

Used by `core.scheduler` (hits at admission, publication at commit). Knows requests' tokens and salts, and the block pool.

A block's key is H(parent key, its tokens); the first block's parent is H(tagged salt), so the chain stands for the whole
prefix within one salt. A hit also compares tokens, parent and salt, so that a colliding hash is a miss, never a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from trimtab_engine.core.blocks import BlockPool
from trimtab_engine.core.request import Request

KEY_BYTES = 16


def root_key(salt: str | None) -> bytes:
    """Parent key of a first block. The tags keep "no salt" apart from any salt; a further kind gets a further tag."""
    tagged = b"none" if salt is None else b"salt" + salt.encode()
    return blake2b(tagged, digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block that holds `tokens` after the prefix that `parent` stands for."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def prefix_keys(token_ids: Sequence[int], block_size: int, salt: str | None = None) -> list[bytes]:
    """Keys of all full blocks of a prompt, first to last: equal keys mean shareable prefixes."""
    keys: list[bytes] = []
    parent = root_key(salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_key(parent, token_ids[end - block_size : end])
        keys.append(parent)
    return keys


class PrefixCache:
    """Finds and publishes blocks by their key. `request.block_hashes` memoises the chain of one request."""

    __slots__ = ("_pool", "block_size", "enabled")

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._pool = pool
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
        pool, size, salt = self._pool, self.block_size, request.cache_salt
        token_ids = request.token_ids
        hits: list[int] = []
        parent = root_key(salt)
        for index in range((len(token_ids) - 1) // size):
            tokens = token_ids[index * size : (index + 1) * size]
            key = self._key(request, index, parent, tokens)
            block = pool.find(key)
            if block is None or pool.contents(block) != (parent, salt, tokens):
                break
            hits.append(block)
            parent = key
        return hits

    def publish(self, request: Request) -> None:
        """Make the request's full computed blocks findable. Called once the step that wrote them has succeeded."""
        size, salt = self.block_size, request.cache_salt
        hashes = request.block_hashes
        for index in range(request.num_published, request.num_computed // size):
            tokens = request.token_ids[index * size : (index + 1) * size]
            parent = hashes[index - 1] if index else root_key(salt)
            key = self._key(request, index, parent, tokens)
            # An equal block published earlier stays the one that is found; ours goes back to the pool unkeyed.
            self._pool.tag(request.block_ids[index], key, (parent, salt, tokens))
            request.num_published = index + 1

    @staticmethod
    def _key(request: Request, index: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        hashes = request.block_hashes
        if index < len(hashes):
            return hashes[index]
        assert index == len(hashes), "block hashes are computed in order"
        key = block_key(parent, tokens)
        hashes.append(key)
        return key
