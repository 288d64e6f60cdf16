"""CPU memory for KV blocks: copies are exact, ordered and bounded."""

import pytest
import torch

from trimtab_engine.config import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.model.spec import spec_from_config
from trimtab_engine.runtime import kv_cache
from trimtab_engine.runtime.swap_pool import SwapPool

CPU = torch.device("cpu")
SPEC = spec_from_config(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
    }
)


def config(blocks: float) -> EngineConfig:
    one = kv_cache.block_bytes(SPEC, 8, torch.float32)
    return EngineConfig(model="x", block_size=8, swap_bytes=int(blocks * one))


def filled(num_blocks: int) -> torch.Tensor:
    kv = kv_cache.allocate(SPEC, num_blocks, 8, torch.float32, CPU)
    return kv.copy_(torch.arange(kv.numel(), dtype=torch.float32).reshape(kv.shape))


def test_a_block_comes_back_as_it_was_wherever_it_is_put() -> None:
    kv = filled(6)
    before = kv.clone()
    pool = SwapPool(SPEC, config(3), torch.float32, CPU)
    assert pool.num_blocks == 3
    pool.copy(kv, [(2, 0), (5, 2)], [])
    assert torch.equal(kv, before)
    kv.zero_()
    pool.copy(kv, [], [(2, 1), (0, 4)])
    assert torch.equal(kv[:, :, 1], before[:, :, 5])
    assert torch.equal(kv[:, :, 4], before[:, :, 2])
    assert not kv[:, :, [0, 2, 3, 5, 6]].any()


def test_all_copies_out_come_before_any_copy_in() -> None:
    kv = filled(4)
    before = kv.clone()
    pool = SwapPool(SPEC, config(2), torch.float32, CPU)
    pool.copy(kv, [(1, 0)], [])
    pool.copy(kv, [(2, 1)], [(0, 2)])  # block 2 is left by one request and taken by another in the same step
    assert torch.equal(kv[:, :, 2], before[:, :, 1])
    pool.copy(kv, [], [(1, 3)])
    assert torch.equal(kv[:, :, 3], before[:, :, 2])


def test_measuring_changes_no_block_and_without_a_pool_costs_nothing() -> None:
    kv = filled(4)
    before = kv.clone()
    assert SwapPool(SPEC, config(3), torch.float32, CPU).measure(kv) > 0
    assert torch.equal(kv, before)
    assert SwapPool(SPEC, config(0), torch.float32, CPU).measure(kv) == 0.0


def test_less_than_a_block_is_refused_with_the_bytes_of_one() -> None:
    with pytest.raises(ConfigError, match=r"swap_bytes: \d+ is not allowed; 0, or at least \d+") as refused:
        SwapPool(SPEC, config(0.5), torch.float32, CPU)
    assert refused.value.path == "swap_bytes"
