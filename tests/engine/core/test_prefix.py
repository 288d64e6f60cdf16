"""Keys, look-ups and publication of shared prefixes, without a scheduler."""

import pytest

from support.core_builders import make_request
from trimtab_engine.core import prefix
from trimtab_engine.core.blocks import BlockPool
from trimtab_engine.core.prefix import PrefixCache, prefix_keys
from trimtab_engine.core.request import Request

SIZE = 4


def published(pool: BlockPool, cache: PrefixCache, tokens: list[int], salt: str | None = None) -> Request:
    request = make_request(tokens, salt=salt)
    request.block_ids = pool.allocate(-(-len(tokens) // SIZE))
    request.num_computed = len(tokens)
    cache.publish(request)
    return request


def test_keys_of_equal_prefixes_are_equal_and_chain_on_what_stands_before() -> None:
    tokens = list(range(12))
    assert prefix_keys(tokens, SIZE) == prefix_keys([*tokens, 99], SIZE)
    other = prefix_keys([7, *tokens[1:]], SIZE)
    assert set(other).isdisjoint(prefix_keys(tokens, SIZE))


def test_no_salt_an_empty_salt_and_a_salt_named_none_are_three_different_things() -> None:
    roots = {prefix.root_key(None), prefix.root_key(""), prefix.root_key("none")}
    assert len(roots) == 3


def test_a_lookup_finds_the_longest_published_prefix() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE, enabled=True)
    owner = published(pool, cache, list(range(1, 13)))
    assert cache.lookup(make_request([*range(1, 9), 90, 91, 92, 93, 94])) == owner.block_ids[:2]


def test_a_lookup_never_covers_the_last_token() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE, enabled=True)
    owner = published(pool, cache, list(range(1, 9)))
    assert cache.lookup(make_request(list(range(1, 9)))) == owner.block_ids[:1]
    assert cache.lookup(make_request(list(range(1, 10)))) == owner.block_ids[:2]
    assert cache.lookup(make_request(list(range(1, 5)))) == []


def test_a_lookup_changes_nothing_in_the_pool() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE, enabled=True)
    owner = published(pool, cache, list(range(1, 13)))
    pool.release(owner.block_ids)
    free = pool.num_free
    for _ in range(3):
        assert len(cache.lookup(make_request(list(range(1, 20))))) == 3
    assert pool.num_free == free
    assert all(pool.references(block) == 0 for block in owner.block_ids)


def test_a_partial_block_is_not_published() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE, enabled=True)
    owner = published(pool, cache, list(range(1, 8)))
    assert owner.num_published == 1
    assert len(cache.lookup(make_request(list(range(1, 20))))) == 1


def test_salts_keep_tenants_apart() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE, enabled=True)
    published(pool, cache, list(range(1, 9)), salt="a")
    assert cache.lookup(make_request(list(range(1, 12)), salt="b")) == []
    assert cache.lookup(make_request(list(range(1, 12)))) == []
    assert len(cache.lookup(make_request(list(range(1, 12)), salt="a"))) == 2


def test_a_colliding_hash_is_a_miss_because_tokens_and_salt_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix, "block_key", lambda parent, packed: b"always the same key")
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE, enabled=True)
    published(pool, cache, [1, 2, 3, 4])
    assert cache.lookup(make_request([1, 2, 3, 5, 6])) == []
    assert cache.lookup(make_request([1, 2, 3, 4, 6], salt="other")) == []
    assert len(cache.lookup(make_request([1, 2, 3, 4, 6]))) == 1


def test_prompt_logprobs_skip_reading_but_not_writing() -> None:
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE, enabled=True)
    published(pool, cache, list(range(1, 9)))
    assert cache.lookup(make_request(list(range(1, 9)), prompt_logprobs=1)) == []
    writer = make_request(list(range(20, 28)), prompt_logprobs=1)
    writer.block_ids, writer.num_computed = pool.allocate(2), 8
    cache.publish(writer)
    assert len(cache.lookup(make_request(list(range(20, 30))))) == 2


def test_a_disabled_cache_finds_nothing() -> None:
    pool = BlockPool(16)
    published(pool, PrefixCache(pool, SIZE, enabled=True), list(range(1, 9)))
    assert PrefixCache(pool, SIZE, enabled=False).lookup(make_request(list(range(1, 12)))) == []
