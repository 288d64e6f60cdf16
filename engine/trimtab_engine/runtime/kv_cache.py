"""Sizes and allocates the paged KV pool.

Called by the runner at start. Which block holds what is the scheduler's business (`core`); here are bytes and shapes.
"""

from __future__ import annotations

import torch

from trimtab_engine.config import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.model.spec import ModelSpec

DEFAULT_CPU_BYTES = 1 << 30


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return spec.kv_values_per_token * block_size * dtype.itemsize


def pool_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """How much the pool may take: as configured, else 1 GiB on CPU, else a share of the GPU's memory."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type == "cpu":
        return DEFAULT_CPU_BYTES
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    available = int(total * config.gpu_memory_utilization) - used - activation_bytes(config, spec, dtype)
    if available <= 0:
        raise ConfigError(
            "gpu_memory_utilization",
            config.gpu_memory_utilization,
            f"more: {used} of {total} bytes are in use after loading and a full step needs "
            f"{activation_bytes(config, spec, dtype)}",
        )
    return available


def activation_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """An upper estimate of what one step at the ceilings needs besides weights and KV."""
    q_and_kv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    # Alive at once at the widest point: residual, normalised input, gate and up, their product; or q, k, v and copies.
    values = max(2 * spec.hidden_size + 4 * spec.intermediate_size, 3 * spec.hidden_size + 4 * q_and_kv)
    tokens = config.ceilings.max_num_batched_tokens
    logits = (
        config.ceilings.max_num_seqs * spec.vocab_size * 4 * 4
    )  # raw, processed, probabilities, their sums
    return tokens * values * dtype.itemsize + logits + (256 << 20)


def num_blocks_for(available_bytes: int, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Usable blocks in that much memory, the null block paid for; raises ConfigError when there is none."""
    one = block_bytes(spec, block_size, dtype)
    blocks = available_bytes // one - 1
    if blocks < 1:
        raise ConfigError(
            "kv_cache_bytes",
            available_bytes,
            f"at least {2 * one}: one block of {block_size} tokens takes {one} bytes, and one more is never used",
        )
    return int(blocks)


def fitting_model_len(requested: int | None, spec: ModelSpec, num_blocks: int, block_size: int) -> int:
    """The longest sequence to accept; raises ConfigError, naming the largest that fits, if more was asked for."""
    pool = num_blocks * block_size
    if requested is None:
        return min(spec.max_positions, pool)
    if requested > spec.max_positions:
        raise ConfigError(
            "max_model_len", requested, f"at most {spec.max_positions}: the model has no more positions"
        )
    if requested > pool:
        raise ConfigError(
            "max_model_len",
            requested,
            f"at most {pool}: the KV pool holds {num_blocks} blocks of {block_size} tokens",
        )
    return requested


def allocate(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The pool (layers, 2, num_blocks + 1, block_size, kv_heads, head_dim): keys at index 0, values at 1.

    Block 0 is the null block. The memory is not touched: on CPU a page becomes resident when it is first used, and no
    kernel may read a slot before it was written.
    """
    shape = (spec.num_layers, 2, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
    return torch.empty(shape, dtype=dtype, device=device)
