"""The block pool: conservation, reuse order, keys."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_engine.core.blocks import BlockPool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check({})


def test_a_pool_without_usable_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 usable block"):
        BlockPool(0)


def test_of_a_released_sequence_the_tail_is_reused_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.tag(block, bytes([index]), index)
    pool.release(blocks)
    assert pool.allocate(3) == [blocks[2], blocks[1], blocks[0]]


def test_blocks_without_a_key_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain = pool.allocate(2), pool.allocate(2)
    for block in cached:
        pool.tag(block, bytes([block]), None)
    pool.release(cached)
    pool.release(plain)
    assert set(pool.allocate(2)) == set(plain)
    assert all(pool.find(bytes([block])) == block for block in cached)


def test_a_freed_block_stays_findable_until_it_is_reallocated() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.tag(block, b"key", "contents")
    pool.release([block])
    assert pool.find(b"key") == block
    assert pool.contents(block) == "contents"
    pool.allocate(2)
    assert pool.find(b"key") is None
    assert pool.contents(block) is None


def test_holding_a_free_block_takes_it_off_the_free_list_from_the_middle() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.tag(block, bytes([block]), None)
    pool.release(blocks)
    pool.hold([blocks[1]])
    assert pool.num_free == 3
    assert blocks[1] not in pool.allocate(3)
    pool.check(Counter([1, 2, 3, 4]))


def test_a_shared_block_is_free_only_after_its_last_holder_released_it() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_releasing_a_free_block_is_caught() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(blocks)


def test_a_key_belongs_to_the_first_block_that_carried_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.tag(first, b"key", None)
    assert not pool.tag(second, b"key", None)
    pool.release([first, second])
    pool.check({})
    assert pool.find(b"key") == first


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_blocks_are_conserved_under_any_use(operations: list[tuple[int, int]]) -> None:
    pool, tables = BlockPool(9), list[list[int]]()
    next_key = 0
    for kind, number in operations:
        if kind == 0:
            tables.append(pool.allocate(min(number, pool.num_free)))
        elif kind == 1 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif kind == 2 and tables:
            table = tables[number % len(tables)]
            for block in table:
                if pool.contents(block) is None:
                    next_key += 1
                    pool.tag(block, next_key.to_bytes(4, "big"), next_key)
        elif kind == 3:
            found = pool.find(number.to_bytes(4, "big"))
            if found is not None:
                pool.hold([found])
                tables.append([found])
        pool.check(Counter(block for table in tables for block in table))
    for table in tables:
        pool.release(table)
    pool.check({})
    assert pool.num_free == 9
