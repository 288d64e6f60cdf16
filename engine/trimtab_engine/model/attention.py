"""The attention part of a decoder layer: project, normalise, rotate, store KV, attend, project back.

Called by `model.decoder`. Which implementation attends is decided here, by device; `kernels.reference` runs everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab_engine.kernels.reference import AttentionBatch, paged_attention, write_kv
from trimtab_engine.model.layers import apply_rope, linear, rms_norm
from trimtab_engine.model.spec import ModelSpec
from trimtab_engine.model.weights import LayerWeights


@dataclass(slots=True)
class Rotation:
    """cos and sin of each row's position, each (rows, 1, head_dim / 2) in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


def attend(
    x: torch.Tensor,
    weights: LayerWeights,
    spec: ModelSpec,
    rotation: Rotation,
    kv_cache: torch.Tensor,
    batch: AttentionBatch,
    rows_at_least: int,
) -> torch.Tensor:
    """x (rows, hidden), normalised → (rows, hidden); kv_cache is this layer's view, written before it is read."""
    rows = x.shape[0]
    num_q, num_kv, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = linear(x, weights.qkv, weights.qkv_bias, rows_at_least).view(rows, num_q + 2 * num_kv, head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        query = rms_norm(qkv[:, :num_q], weights.q_norm, spec.rms_norm_eps)
        key = rms_norm(qkv[:, num_q : num_q + num_kv], weights.k_norm, spec.rms_norm_eps)
        query = apply_rope(query, rotation.cos, rotation.sin)
        key = apply_rope(key, rotation.cos, rotation.sin)
    else:
        rotated = apply_rope(qkv[:, : num_q + num_kv], rotation.cos, rotation.sin)
        query, key = rotated[:, :num_q], rotated[:, num_q:]
    write_kv(key, qkv[:, num_q + num_kv :], kv_cache, batch)
    attended = paged_attention(query, kv_cache, batch, head_dim**-0.5)
    return linear(attended.reshape(rows, -1), weights.output, weights.output_bias, rows_at_least)
