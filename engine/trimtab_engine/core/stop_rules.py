"""When a request is finished: EOS, stop tokens and length caps. Called by `core.scheduler` for each new token.

Pure. Stop strings are not here: text exists only in the HTTP process, which aborts the request when one is found.
"""

from __future__ import annotations

from trimtab_engine.core.request import FinishReason, Request


def finish_reason(
    request: Request, token_id: int, eos_token_ids: frozenset[int], max_model_len: int
) -> tuple[FinishReason, int | None] | None:
    """Why the request ends with `token_id`, its newest output, and the stop token behind it; None: it goes on.

    `min_tokens` holds back EOS and stop tokens, never a length cap: a request whose `min_tokens` exceeds what the model
    length leaves would otherwise wait for room that cannot come.
    """
    sampling = request.sampling
    num_outputs = len(request.token_ids) - request.num_prompt_tokens
    if num_outputs >= sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
    if sampling.max_tokens is not None and num_outputs >= sampling.max_tokens:
        return FinishReason.LENGTH, None
    if len(request.token_ids) >= max_model_len:
        return FinishReason.LENGTH, None
    return None
