"""Matrix products: whatever way is taken for so many rows, the product is the same."""

import pytest
import torch
import torch.nn.functional as F

from trimtab_engine.model.layers import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_a_product_is_that_of_plain_torch_for_any_number_of_rows(biased: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(37, 64, generator=generator).to(dtype)
    bias = torch.randn(37, generator=generator).to(dtype) if biased else None
    for rows in range(1, 41):
        x = torch.randn(rows, 64, generator=generator).to(dtype)
        got = linear(x, weight, bias)
        assert got.shape == (rows, 37)
        assert got.is_contiguous()  # callers take views of it
        torch.testing.assert_close(got, F.linear(x, weight, bias))


def test_nothing_is_left_of_the_rows_that_were_added() -> None:
    weight = torch.randn(5, 8)
    for rows in (1, 3, 7, 11):
        assert linear(torch.zeros(rows, 8), weight, torch.ones(5)).tolist() == [[1.0] * 5] * rows
