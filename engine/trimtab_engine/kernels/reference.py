"""Plain torch attention over paged KV: the path on CPU, and the oracle that every other kernel is tested against.

Called by `model.attention`, layer by layer. Rule for all implementations: the signatures of `write_kv` and
`paged_attention` below, the same meaning of each argument, no other input. A kernel may ignore host-side hints
(`AttentionBatch.plan`); it may never read KV slots that no row's context covers (they may hold NaN), nor cells of the
block table beyond a row's length (they may hold anything).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass(slots=True)
class AttentionBatch:
    """Who attends to what in one step. Sequences with one query row come first (`num_decodes` of them).

    Query rows are flat: sequence i owns rows [cu_seqlens[i], cu_seqlens[i + 1]). Its last row is at position
    seq_lens[i] - 1, the others right before it; each row attends to all positions up to its own.
    """

    cu_seqlens: torch.Tensor  # (num_seqs + 1,) int32
    seq_lens: torch.Tensor  # (num_seqs,) int32: KV length including this step's rows
    block_tables: torch.Tensor  # (num_seqs, max_blocks) int32; cells past a sequence's length are undefined
    slots: torch.Tensor  # (total_q,) int64: block · block_size + offset, where each row's KV goes
    num_decodes: int
    max_query_len: int
    # The same on the host, so that plain torch needs no copy back from a device.
    query_lens: list[int]
    context_lens: list[int]  # KV before this step's rows
    block_size: int
    invariant: bool = False  # one reduction path: a row's result is bitwise independent of its batch
    plan: list[DecodeGroup | PrefillRow] = field(
        default_factory=list
    )  # filled on first use, shared by layers


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch) -> None:
    """Store key and value (total_q, kv_heads, head_dim) into kv_cache (2, blocks, block_size, kv_heads, head_dim)."""
    kv_heads, head_dim = key.shape[1:]
    flat = kv_cache.view(2, -1, kv_heads, head_dim)
    flat[0].index_copy_(0, batch.slots, key)
    flat[1].index_copy_(0, batch.slots, value)


def paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """query (total_q, heads, head_dim), kv_cache as in `write_kv` → (total_q, heads, head_dim).

    softmax(query · keyᵀ · scale) · value over each row's positions; heads share kv heads in groups of consecutive
    ones. All rows' KV must have been written before.
    """
    if not batch.plan:
        batch.plan = _make_plan(batch, query)
    flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
    out = torch.empty_like(query)
    for item in batch.plan:
        if isinstance(item, DecodeGroup):
            _decode(query, flat, item, scale, out)
        elif batch.invariant:
            _prefill_in_tiles(query, flat, item, scale, out)
        else:
            _prefill(query, flat, item, scale, out)
    return out


# --- how the rows are split, computed once per step ---


@dataclass(slots=True)
class DecodeGroup:
    """Sequences of similar length with one row each, attended to in one padded batch."""

    rows: torch.Tensor  # (n,) int64, into query
    slots: torch.Tensor  # (n · length,) int64; padding repeats a valid slot of the same sequence
    mask: torch.Tensor | None  # (n, 1, 1, length) 0 or -inf; None: all equally long
    length: int


@dataclass(slots=True)
class PrefillRow:
    """One sequence with several query rows (or one, in invariant mode)."""

    start: int  # first row in query
    num_queries: int
    context: int
    slots: torch.Tensor  # (context + num_queries,) int64, position → slot
    mask: torch.Tensor | None  # (num_queries, length) 0 or -inf; None: plain causal, no context


# Gathered KV of a decode group on CPU. Larger buffers leave the cache and are mapped and unmapped at every call:
# 8 decodes of 1,500 tokens of the 135M demo model took 327 ms in one group and 122 ms in groups of this size.
DECODE_GROUP_TOKENS = 2048
INVARIANT_TILE = 64  # positions; see _prefill_in_tiles
# Rows from which a matrix product takes the same reduction path for every larger count: 4 for MKL on AVX-512
# (measured); 8 leaves room. The runner checks it on the machine it runs on.
INVARIANT_ROWS = 8


def _make_plan(batch: AttentionBatch, query: torch.Tensor) -> list[DecodeGroup | PrefillRow]:
    device = query.device
    tables = batch.block_tables.to(device=device, dtype=torch.int64)
    plan: list[DecodeGroup | PrefillRow] = []
    batched = 0 if batch.invariant else batch.num_decodes
    # Longest first; a group ends where padding would more than double a sequence.
    order = sorted(range(batched), key=lambda i: -batch.context_lens[i])
    while order:
        length = batch.context_lens[order[0]] + 1
        members = [i for i in order if 2 * (batch.context_lens[i] + 1) > length]
        if device.type == "cpu":
            members = members[: max(1, DECODE_GROUP_TOKENS // length)]
        order = order[len(members) :]
        plan.append(_decode_group(batch, tables, members, length, query))
    start = batched
    for i in range(batched, len(batch.query_lens)):
        num_queries, context = batch.query_lens[i], batch.context_lens[i]
        positions = torch.arange(context + num_queries, device=device)
        slots = tables[i, positions // batch.block_size] * batch.block_size + positions % batch.block_size
        mask = None
        if context and not batch.invariant:
            # Bottom-right aligned: query j stands at position context + j.
            seen = positions <= torch.arange(context, context + num_queries, device=device)[:, None]
            mask = _additive(seen, query)
        plan.append(PrefillRow(start, num_queries, context, slots, mask))
        start += num_queries
    return plan


def _decode_group(
    batch: AttentionBatch, tables: torch.Tensor, members: list[int], length: int, query: torch.Tensor
) -> DecodeGroup:
    device = query.device
    rows = torch.tensor(members, device=device)
    on_host = [batch.context_lens[i] + 1 for i in members]
    lengths = torch.tensor(on_host, device=device)
    positions = torch.arange(length, device=device).expand(len(members), length)
    valid = positions < lengths[:, None]
    positions = torch.minimum(positions, lengths[:, None] - 1)
    blocks = tables[rows].gather(1, positions // batch.block_size)
    slots = (blocks * batch.block_size + positions % batch.block_size).reshape(-1)
    mask = None if min(on_host) == length else _additive(valid, query)[:, None, None]
    return DecodeGroup(rows, slots, mask, length)


def _additive(seen: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """bool → 0 where true, -inf elsewhere; made once, where torch would do it again in every layer."""
    return torch.zeros(seen.shape, dtype=query.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


# --- attention of one item of the plan ---


def _decode(
    query: torch.Tensor, flat: torch.Tensor, group: DecodeGroup, scale: float, out: torch.Tensor
) -> None:
    n = group.rows.shape[0]
    kv_heads, head_dim = flat.shape[2:]
    key = flat[0].index_select(0, group.slots).view(n, group.length, kv_heads, head_dim)
    value = flat[1].index_select(0, group.slots).view(n, group.length, kv_heads, head_dim)
    # The heads of a group stand as rows against their kv head, (n, kv_heads, group, head_dim): nothing is copied.
    grouped = query.index_select(0, group.rows).view(n, kv_heads, -1, head_dim)
    result = F.scaled_dot_product_attention(
        grouped, key.transpose(1, 2), value.transpose(1, 2), attn_mask=group.mask, scale=scale
    )
    out.index_copy_(0, group.rows, result.reshape(n, -1, head_dim))


def _prefill(
    query: torch.Tensor, flat: torch.Tensor, row: PrefillRow, scale: float, out: torch.Tensor
) -> None:
    rows = slice(row.start, row.start + row.num_queries)
    key = flat[0].index_select(0, row.slots).transpose(0, 1)[None]
    value = flat[1].index_select(0, row.slots).transpose(0, 1)[None]
    attended = F.scaled_dot_product_attention(
        query[rows].transpose(0, 1)[None],
        key,
        value,
        attn_mask=row.mask,
        is_causal=row.mask is None and row.num_queries > 1,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    out[rows] = attended[0].transpose(0, 1)


def _prefill_in_tiles(
    query: torch.Tensor, flat: torch.Tensor, row: PrefillRow, scale: float, out: torch.Tensor
) -> None:
    """Like `_prefill`, but what a row reduces over depends on its position alone.

    Queries are cut at multiples of `INVARIANT_TILE` positions, and each tile reduces over all keys up to the tile's
    end, with the masked ones as exact zeros: however a prompt is chunked, the same sums are formed in the same order.
    """
    kv_heads, head_dim = flat.shape[2:]
    group = query.shape[1] // kv_heads
    key = flat[0].index_select(0, row.slots)
    value = flat[1].index_select(0, row.slots)
    end = row.context + row.num_queries
    padding = -end % INVARIANT_TILE
    key = F.pad(key, (0, 0, 0, 0, 0, padding)).permute(1, 2, 0)  # (kv_heads, head_dim, length)
    value = F.pad(value, (0, 0, 0, 0, 0, padding)).transpose(0, 1)  # (kv_heads, length, head_dim)
    position = row.context
    while position < end:
        stop = min(end, (position // INVARIANT_TILE + 1) * INVARIANT_TILE)
        length = (position // INVARIANT_TILE + 1) * INVARIANT_TILE
        first = row.start + position - row.context
        tile = query[first : first + stop - position]
        # All heads of a group are rows of one product, and never fewer rows than the products' own limit.
        count = max(tile.shape[0], -(-INVARIANT_ROWS // group))
        tile = F.pad(tile, (0, 0, 0, 0, 0, count - tile.shape[0]))
        rows = tile.view(count, kv_heads, group, head_dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(rows, key[:, :, :length]).mul_(scale).view(kv_heads, count, group, length)
        positions = torch.arange(length, device=query.device)
        hidden = positions > torch.arange(position, position + count, device=query.device)[:, None]
        scores.masked_fill_(hidden[None, :, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        result = torch.matmul(weights.view(kv_heads, count * group, length), value[:, :length])
        result = result.view(kv_heads, count, group, head_dim).permute(1, 0, 2, 3)
        out[first : first + stop - position] = result.reshape(count, -1, head_dim)[: stop - position]
        position = stop
