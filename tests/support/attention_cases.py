"""Attention written down row by row, and ragged cases over paged memory: what every implementation is held to.

A case fills all KV memory with NaN but for the slots that a context covers, and all block-table cells past a
sequence's length with a number that points far outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab_engine.kernels.reference import AttentionBatch

# name → (query rows, context before them) of each sequence; single rows first.
SHAPES: dict[str, list[tuple[int, int]]] = {
    "decodes of unlike lengths": [(1, 522), (1, 36), (1, 2010), (1, 0)],
    "decodes of one length": [(1, 47), (1, 47)],
    "decodes and prompts": [(1, 1327), (5, 13), (129, 334)],
    "context ends around a block": [(1, 15), (1, 16), (1, 17), (2, 14), (2, 15), (17, 15), (16, 16)],
    "context ends around a tile": [(1, 62), (1, 63), (1, 64), (3, 61), (64, 0), (65, 0), (63, 64), (130, 62)],
    "one token": [(1, 0)],
    "one whole prompt": [(70, 0)],
}
HEADS = [(4, 4, 16), (8, 2, 32), (5, 1, 16), (9, 3, 64)]  # query heads, kv heads, head_dim
GARBAGE_BLOCK = 2**30


@dataclass(slots=True)
class Case:
    """Inputs of `write_kv` and `paged_attention`, and the answer."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor  # contexts are in, this step's rows are not
    batch: AttentionBatch
    scale: float
    want: torch.Tensor


def make_case(
    shapes: list[tuple[int, int]],
    heads: tuple[int, int, int],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    invariant: bool = False,
    seed: int = 0,
) -> Case:
    """Random contents; `want` is computed in float64 on the host, one row and one head at a time."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads, head_dim = heads
    query_lens, context_lens = [n for n, _ in shapes], [c for _, c in shapes]
    lengths = [n + c for n, c in shapes]
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(shapes), max(counts) + 2), GARBAGE_BLOCK, dtype=torch.int32)
    kv = torch.full((2, num_blocks + 1, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    flat = kv.view(2, -1, kv_heads, head_dim)
    scale = head_dim**-0.5
    queries, keys, values, slots, wants = [], [], [], [], []
    for i, (num_queries, context) in enumerate(shapes):
        blocks = torch.tensor([1 + order.pop() for _ in range(counts[i])])
        tables[i, : counts[i]] = blocks
        position = torch.arange(lengths[i])
        slot = blocks[position // block_size] * block_size + position % block_size
        query = torch.randn(num_queries, num_heads, head_dim, generator=generator).to(dtype)
        key, value = (
            torch.randn(lengths[i], kv_heads, head_dim, generator=generator).to(dtype) for _ in "kv"
        )
        flat[0, slot[:context]], flat[1, slot[:context]] = key[:context], value[:context]
        queries.append(query)
        keys.append(key[context:])
        values.append(value[context:])
        slots.append(slot[context:])
        wants.append(_by_hand(query, key, value, context, scale))
    cu_seqlens = torch.tensor([0, *query_lens]).cumsum(0)
    batch = AttentionBatch(
        cu_seqlens=cu_seqlens.to(device, torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slots=torch.cat(slots).to(device),
        num_decodes=next((i for i, n in enumerate(query_lens) if n > 1), len(shapes)),
        max_query_len=max(query_lens),
        query_lens=query_lens,
        context_lens=context_lens,
        block_size=block_size,
        invariant=invariant,
    )
    return Case(
        torch.cat(queries).to(device),
        torch.cat(keys).to(device),
        torch.cat(values).to(device),
        kv.to(device),
        batch,
        scale,
        torch.cat(wants),
    )


def _by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: int, scale: float
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    out = torch.empty(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        seen = context + row + 1
        for head in range(query.shape[1]):
            scores = key[:seen, head // group].double() @ query[row, head].double() * scale
            out[row, head] = torch.softmax(scores, 0) @ value[:seen, head // group].double()
    return out
