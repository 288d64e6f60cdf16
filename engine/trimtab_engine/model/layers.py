"""The small operations of a decoder layer: RMSNorm, rotary positions, SwiGLU, matrix products. Plain torch, stateless.

Used by `model.decoder`. Rows are tokens of a ragged batch; no operation here mixes rows, and in batch-invariant mode
(`rows_at_least`) a row's result is bitwise the same in every batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from trimtab_engine.model.spec import RopeSpec

_FEW_ROWS, _MANY_ROWS = 6, 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., n) → x / sqrt(mean(x²) + eps) · weight, computed in float32, in x's dtype.

    Zhang and Sennrich 2019, eq. 4; the cast before the weight is applied is Llama's.
    """
    if x.dtype == torch.float32:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps)) * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))).to(x.dtype) * weight


def rope_table(rope: RopeSpec, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """cos and sin of every position: (max_positions, 2, head_dim / 2) float32 (Su et al. 2021, eq. 15)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = _llama3_frequencies(frequencies, rope)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def _llama3_frequencies(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    # Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended (llama-models, model.py).
    wavelengths = 2 * math.pi / frequencies
    long_wave = rope.original_max_positions / rope.low_freq_factor
    short_wave = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > long_wave, frequencies / rope.factor, frequencies)
    between = (wavelengths <= long_wave) & (wavelengths >= short_wave)
    return torch.where(between, blended, scaled)


def apply_rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads (rows, heads, head_dim) by cos, sin (rows, 1, head_dim / 2); the halves form the pairs."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """(rows, 2·n) → silu(first half) · second half, (rows, n). May overwrite its argument."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, rows_at_least: int = 1
) -> torch.Tensor:
    """x (rows, in) · weight (out, in)ᵀ + bias → (rows, out).

    Libraries take another reduction path for few rows (a vector product for one, small tiles up to three), so the same
    row would differ in its last bits between batches. `rows_at_least` pads with zero rows past that point.
    """
    rows = x.shape[0]
    if rows_at_least == 1 and x.dtype == torch.float32 and x.device.type == "cpu":
        return _linear_cpu(x, weight, bias)
    if rows >= rows_at_least:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, rows_at_least - rows)), weight, bias)[:rows]


def _linear_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same where rows need not be equal in every bit: the way that is fastest for so many rows.

    With few rows MKL copies the weights into tiles before it multiplies, which costs more than the product; with the
    weights on the left it does not. Its tiles hold four rows, and three in the last one cost more than four.
    All products of a 135M model, milliseconds, plain → this: 1 row 32 → 24, 2 54 → 24, 3 69 → 28, 4 51 → 28, 5 53 → 42, 7 61 → 56.
    """
    rows = x.shape[0]
    if rows > _FEW_ROWS:
        padded = F.pad(x, (0, 0, 0, 1)) if rows % 4 == 3 and rows < _MANY_ROWS else x
        return F.linear(padded, weight, bias)[:rows]
    padded = F.pad(x, (0, 0, 0, 1)) if rows in (1, 3) else x
    product = torch.mm(weight, padded.t()).t()[:rows].contiguous()
    return product if bias is None else product.add_(bias)
