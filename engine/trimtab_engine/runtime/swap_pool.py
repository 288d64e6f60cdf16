"""CPU memory for KV blocks of preempted requests, and copying them there and back.

Owned by the runner. Which block goes where is the scheduler's business (`core.swap`); a step brings the copies along.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trimtab_engine.config import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.model.spec import ModelSpec
from trimtab_engine.runtime.kv_cache import block_bytes

_MEASURED_BLOCKS = 8
_MEASUREMENTS = 3


class SwapPool:
    """The pool's layout (layers, 2, num_blocks, block_size, kv_heads, head_dim) in CPU memory; without a null block."""

    def __init__(
        self, spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`config.swap_bytes` of memory; ConfigError when that is something and less than one block."""
        one = block_bytes(spec, config.block_size, dtype)
        self.num_blocks = config.swap_bytes // one
        if config.swap_bytes and not self.num_blocks:
            raise ConfigError(
                "swap_bytes", config.swap_bytes, f"0, or at least {one}: the bytes of one block of KV"
            )
        shape = (spec.num_layers, 2, self.num_blocks, config.block_size, spec.num_kv_heads, spec.head_dim)
        # Pinned memory is what a GPU copies at full speed from and to. Not touched before use, as the KV pool.
        pinned = device.type == "cuda" and self.num_blocks > 0
        self._memory = torch.empty(shape, dtype=dtype, pin_memory=pinned)

    def copy(self, kv: torch.Tensor, out: Sequence[tuple[int, int]], into: Sequence[tuple[int, int]]) -> None:
        """First pool → here for each (block, place) of `out`, then here → pool for each (place, block) of `into`."""
        if out:
            blocks, places = _columns(out)
            self._memory[:, :, places] = kv[:, :, blocks.to(kv.device)].to("cpu")
        if into:
            places, blocks = _columns(into)
            kv[:, :, blocks.to(kv.device)] = self._memory[:, :, places].to(kv.device)

    def measure(self, kv: torch.Tensor) -> float:
        """Seconds to copy one block, as several together take it; 0 without a pool. What the blocks hold is not changed."""
        count = min(_MEASURED_BLOCKS, self.num_blocks, kv.shape[2] - 1)
        if count <= 0:
            return 0.0
        copies = [(block + 1, block) for block in range(count)]
        fastest = float("inf")
        for _ in range(_MEASUREMENTS):  # the first touches the memory, and others may be using the machine
            started = time.perf_counter()
            self.copy(kv, copies, [])
            fastest = min(fastest, time.perf_counter() - started)
        return fastest / count


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.tensor(list(pairs), dtype=torch.long)
    return table[:, 0], table[:, 1]
