"""The plain torch attention against attention written down row by row, over memory that is NaN wherever nobody looks."""

import pytest
import torch

from support.attention_cases import HEADS, SHAPES, make_case
from trimtab_engine.kernels.reference import paged_attention, write_kv

CPU = torch.device("cpu")


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
def test_attention_is_what_the_formula_says(
    shapes: str, heads: tuple[int, int, int], invariant: bool
) -> None:
    case = make_case(SHAPES[shapes], heads, device=CPU, invariant=invariant)
    write_kv(case.key, case.value, case.kv_cache, case.batch)
    got = paged_attention(case.query, case.kv_cache, case.batch, case.scale)
    difference = (got.double() - case.want).abs()
    assert difference.max() < 1e-5, f"max {difference.max():.2e}, mean {difference.mean():.2e}"


def test_a_write_touches_its_slots_and_no_other() -> None:
    case = make_case(SHAPES["decodes and prompts"], (4, 2, 16), device=CPU)
    before = case.kv_cache.clone()
    write_kv(case.key, case.value, case.kv_cache, case.batch)
    flat, old = case.kv_cache.view(2, -1, 2, 16), before.view(2, -1, 2, 16)
    assert torch.equal(flat[0, case.batch.slots], case.key)
    assert torch.equal(flat[1, case.batch.slots], case.value)
    others = torch.ones(flat.shape[1], dtype=torch.bool)
    others[case.batch.slots] = False
    assert torch.equal(flat[:, others].nan_to_num(7.0), old[:, others].nan_to_num(7.0))


def test_a_plan_is_made_once_for_all_layers() -> None:
    case = make_case(SHAPES["decodes and prompts"], (4, 2, 16), device=CPU)
    write_kv(case.key, case.value, case.kv_cache, case.batch)
    first = paged_attention(case.query, case.kv_cache, case.batch, case.scale)
    plan = case.batch.plan
    second = paged_attention(case.query, case.kv_cache, case.batch, case.scale)
    assert case.batch.plan is plan
    assert torch.equal(first, second)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_invariant_attention_gives_a_row_the_same_bits_in_every_batch(heads: tuple[int, int, int]) -> None:
    # One sequence of 200 positions: its last 70 rows at once, and cut into chunks, in other company.
    whole = make_case([(70, 130)], heads, device=CPU, invariant=True)
    write_kv(whole.key, whole.value, whole.kv_cache, whole.batch)
    want = paged_attention(whole.query, whole.kv_cache, whole.batch, whole.scale)
    flat = whole.kv_cache
    for cuts in ([1] * 70, [1, 69], [33, 37], [61, 9]):
        done, context = [], 130
        for chunk in cuts:
            part = make_case([(chunk, context)], heads, device=CPU, invariant=True).batch
            part.block_tables = whole.batch.block_tables
            rows = whole.query[context - 130 : context - 130 + chunk]
            done.append(paged_attention(rows, flat, part, whole.scale))
            context += chunk
        assert torch.equal(torch.cat(done), want), cuts
