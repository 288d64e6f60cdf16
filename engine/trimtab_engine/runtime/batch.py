"""Turns the rows of a `Step` into the tensors of one forward pass.

Called by the runner once per step. Reads requests, never changes them. Index arithmetic is numpy on the host; each
array goes to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trimtab_engine.core.request import Request
from trimtab_engine.core.step import Step
from trimtab_engine.kernels.reference import AttentionBatch

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Batch:
    """Inputs of one forward pass; rows are the step's tokens, request after request."""

    token_ids: torch.Tensor  # (rows,) int64
    positions: torch.Tensor  # (rows,) int64
    attention: AttentionBatch
    starts: list[int]  # first row of each of the step's requests; one more entry at the end


def build_batch(step: Step, block_size: int, device: torch.device, invariant: bool) -> Batch:
    """The batch of a step whose requests hold blocks for all their scheduled tokens."""
    context = np.array(step.context, dtype=np.int64)
    chunk = np.array(step.chunk, dtype=np.int64)
    starts = np.zeros(len(chunk) + 1, dtype=np.int64)
    np.cumsum(chunk, out=starts[1:])
    owner = np.repeat(np.arange(len(chunk)), chunk)
    positions = np.arange(starts[-1]) - starts[owner] + context[owner]
    tables = _block_tables(step.requests, context + chunk, block_size)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    # Rows of one token come first in a step; only those may share a padded decode batch.
    many = np.flatnonzero(chunk > 1)
    num_decodes = int(many[0]) if many.size else len(chunk)
    attention = AttentionBatch(
        cu_seqlens=_to(starts.astype(np.int32), device),
        seq_lens=_to((context + chunk).astype(np.int32), device),
        block_tables=_to(tables.astype(np.int32), device),
        slots=_to(slots, device),
        num_decodes=num_decodes,
        max_query_len=int(chunk.max()),
        query_lens=step.chunk,
        context_lens=step.context,
        block_size=block_size,
        invariant=invariant,
    )
    return Batch(_to(_token_ids(step), device), _to(positions, device), attention, starts.tolist())


def _token_ids(step: Step) -> IntArray:
    flat: list[int] = []
    for request, context, chunk in zip(step.requests, step.context, step.chunk, strict=True):
        if chunk == 1:
            flat.append(request.token_ids[context])
        else:
            flat += request.token_ids[context : context + chunk]
    return np.array(flat, dtype=np.int64)


def _block_tables(requests: list[Request], lengths: IntArray, block_size: int) -> IntArray:
    counts = -(-lengths // block_size)
    tables = np.zeros((len(requests), int(counts.max())), dtype=np.int64)
    for row, (request, count) in enumerate(zip(requests, counts.tolist(), strict=True)):
        tables[row, :count] = request.block_ids[:count]
    return tables


def _to(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
