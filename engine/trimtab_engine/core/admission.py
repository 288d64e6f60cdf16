"""Whether a request fits: ever (asked when it is added) and now (asked when it is next). Pure.

Called by `core.scheduler`. A plan says what admission would take; nothing is held, moved or counted until the plan is
carried out, so a request that does not fit leaves everything as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_engine.core.blocks import BlockPool
from trimtab_engine.core.prefix import PrefixCache
from trimtab_engine.core.request import Request
from trimtab_engine.errors import RequestError, RequestTooLarge

# While something runs, this part of the pool stays free of newcomers: room for the running ones to grow.
WATERMARK = 0.01


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def check_fits(request: Request, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raise RequestTooLarge when the request could never run to its end, RequestError when it asks for nothing.

    Too large is judged by the prompt and one output, or by an explicit `max_tokens`; without one, a request simply ends
    at the model length. The last output needs no KV, hence the one token less against the pool.
    """
    prompt, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
    if prompt < 1 or len(request.token_ids) != prompt:
        raise RequestError(f"prompt has {prompt} tokens; at least 1 is needed", "prompt")
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}; at least 1 is needed", "max_tokens")
    outputs = 1 if max_tokens is None else max_tokens
    wanted = f"{prompt} prompt tokens + {outputs} output {'token' if outputs == 1 else 'tokens'}"
    param = "prompt" if prompt >= max_model_len or max_tokens is None else "max_tokens"
    if prompt + outputs > max_model_len:
        raise RequestTooLarge(
            f"{wanted} are more than max_model_len, {max_model_len} tokens", param, "context_length_exceeded"
        )
    if num_blocks_for(prompt + outputs - 1, block_size) > num_blocks:
        raise RequestTooLarge(
            f"{wanted} are more than the KV pool holds, {num_blocks * block_size} tokens",
            param,
            "context_length_exceeded",
        )


@dataclass(frozen=True, slots=True)
class Need:
    """What admitting a request's whole current sequence (prompt and outputs so far) would take."""

    hits: list[int]  # cached leading blocks, to be held
    num_hit_tokens: int
    num_new_blocks: int  # for the rest of the sequence
    num_free_needed: int  # new blocks, and hits that stand in the free list


def whole_sequence_need(request: Request, pool: BlockPool, cache: PrefixCache) -> Need:
    """Blocks for the WHOLE sequence, not its first chunk: a prompt that fits only in part would be preempted again."""
    hits = cache.lookup(request)
    new = num_blocks_for(len(request.token_ids), cache.block_size) - len(hits)
    return Need(hits, len(hits) * cache.block_size, new, new + pool.num_unreferenced(hits))


def outstanding_blocks(prefills: list[Request], block_size: int) -> int:
    """Blocks that admitted, half-computed sequences have been promised and do not hold yet."""
    return sum(
        max(0, num_blocks_for(len(request.token_ids), block_size) - len(request.block_ids))
        for request in prefills
    )
