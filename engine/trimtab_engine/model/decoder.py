"""One decoder for every family we run: tokens and positions in, hidden states and logits out.

Called by the runner, once per step. Differences between families stand in `ModelSpec` and in which weights are None.
Knows nothing of requests, sampling or scheduling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trimtab_engine.kernels.reference import AttentionBatch
from trimtab_engine.model.attention import Rotation, attend
from trimtab_engine.model.layers import linear, rms_norm, rope_table, swiglu
from trimtab_engine.model.spec import ModelSpec
from trimtab_engine.model.weights import DecoderWeights


class Decoder:
    """Weights plus the order in which they are applied. Holds no state between calls but the rotation table."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, max_positions: int, rows_at_least: int = 1
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.rows_at_least = rows_at_least
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._rope = rope_table(spec.rope, spec.head_dim, max_positions, device).to(dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """token_ids, positions (rows,) int64 → final hidden states (rows, hidden), normalised.

        kv_caches (layers, 2, blocks, block_size, kv_heads, head_dim) is written at `batch.slots` and read.
        """
        spec, least = self.spec, self.rows_at_least
        table = self._rope.index_select(0, positions)
        rotation = Rotation(table[:, 0, None], table[:, 1, None])
        residual = F.embedding(token_ids, self.weights.embedding)
        for layer, kv_cache in zip(self.weights.layers, kv_caches, strict=True):
            x = rms_norm(residual, layer.input_norm, spec.rms_norm_eps)
            residual = residual + attend(x, layer, spec, rotation, kv_cache, batch, least)
            x = rms_norm(residual, layer.mlp_norm, spec.rms_norm_eps)
            x = swiglu(linear(x, layer.gate_up, layer.gate_up_bias, least))
            residual = residual + linear(x, layer.down, layer.down_bias, least)
        return rms_norm(residual, self.weights.final_norm, spec.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (rows, hidden) → float32 logits (rows, vocab). Ask for the rows that need them only."""
        return linear(hidden, self.weights.lm_head, None, self.rows_at_least).float()
