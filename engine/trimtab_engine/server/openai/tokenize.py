"""POST /tokenize and /detokenize: what a prompt costs before it is sent, and token ids back as text."""

from __future__ import annotations

import asyncio
from typing import Any

from trimtab_engine.errors import RequestError
from trimtab_engine.server.openai.chat import encode_chat
from trimtab_engine.server.openai.params import Limits, check_text, check_token_ids
from trimtab_engine.server.openai.protocol import DetokenizeBody, TokenizeBody
from trimtab_engine.server.text.model_text import ModelText


async def tokenize(body: TokenizeBody, text: ModelText, limits: Limits) -> dict[str, Any]:
    """Token ids of a prompt or of messages as the generation routes would make them; raises RequestError."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: exactly one of prompt and messages is needed", param="prompt")
    if body.messages is not None:
        token_ids = await encode_chat(body, body.messages, text, limits)
    else:
        check_text("prompt", body.prompt or "", text.tokenizer.longest_token, limits)
        token_ids = await text.tokenizer.encode_in_thread(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    made: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": limits.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        made["token_strs"] = [text.tokenizer.token_name(token_id) for token_id in token_ids]
    return made


async def detokenize(body: DetokenizeBody, text: ModelText, limits: Limits) -> dict[str, Any]:
    """Text of token ids, special tokens included; raises RequestError for ids outside the vocabulary."""
    check_token_ids("tokens", body.tokens, limits.vocab_size)
    decoded = await asyncio.to_thread(text.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": decoded}
