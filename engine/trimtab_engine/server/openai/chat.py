"""POST /v1/chat/completions: messages through the model's template; and the shape of its replies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_engine.errors import RequestError, RequestTooLarge
from trimtab_engine.server.openai import logprobs as shapes
from trimtab_engine.server.openai.errors import short
from trimtab_engine.server.openai.generation import Choice, Delta, Prompt
from trimtab_engine.server.openai.params import Limits, check_text, fit
from trimtab_engine.server.openai.protocol import ChatBody, TokenizeBody
from trimtab_engine.server.text.model_text import ModelText
from trimtab_engine.server.text.tokenizer import Tokenizer


async def prompt(body: ChatBody, text: ModelText, limits: Limits) -> Prompt:
    """The rendered, encoded conversation; raises RequestError."""
    token_ids = await encode_chat(body, body.messages, text, limits)
    fitted = fit(body, token_ids, limits)
    return Prompt(fitted.prompt_token_ids, "", fitted.max_tokens)


async def encode_chat(
    body: ChatBody | TokenizeBody, messages: Sequence[Mapping[str, Any]], text: ModelText, limits: Limits
) -> list[int]:
    """Token ids of a conversation, rendered and encoded in a thread; also for /tokenize."""
    template = text.chat_template
    if template is None:
        raise RequestError(
            "messages: this model brings no chat template; use /v1/completions", param="messages"
        )
    if len(messages) > limits.max_model_len:
        raise RequestTooLarge(
            f"messages: {len(messages)} are not allowed; the model's length is {limits.max_model_len} tokens, "
            "and each takes at least one",
            param="messages",
            code="context_length_exceeded",
        )
    plain = [_message(index, message) for index, message in enumerate(messages)]

    def work() -> list[int]:
        rendered = template.render(
            plain,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            extra=body.chat_template_kwargs,
        )
        check_text("messages", rendered, text.tokenizer.longest_token, limits)
        # The template writes the special tokens itself; adding them again would double the BOS.
        return text.tokenizer.encode(rendered, add_special_tokens=bool(body.add_special_tokens))

    return await asyncio.to_thread(work)


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """One message for the template: content as one text, empty lists left out (templates ask `is defined`)."""
    name = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{name}.role: {short(role)} is not allowed; a role such as 'user'", param="messages"
        )
    made = {key: value for key, value in message.items() if value not in (None, [])}
    content = message.get("content")
    if isinstance(content, list):
        made["content"] = "\n".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{name}.content: {short(content)} is not allowed; a string or a list of text parts",
            param="messages",
        )
    return made


def _part(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise RequestError(
                f"{name}.type: {short(kind)} is not supported by this server; only text parts",
                param="messages",
            )
        if isinstance(value := part.get(kind), str):
            return value
    raise RequestError(
        f'{name}: {short(part)} is not allowed; an object {{"type": "text", "text": …}}', param="messages"
    )


class ChatFormat:
    """Shape `chat.completion` and `chat.completion.chunk`."""

    def __init__(
        self, body: ChatBody, *, reply_id: str, created: int, model: str, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._head = {"id": reply_id, "object": "chat.completion", "created": created, "model": model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._pieces = tokenizer.pieces

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The role, at once."""
        made: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            made["prompt_token_ids"] = choice.prompt.token_ids
        return {**self._chunk_head, "choices": [made]}

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One chunk."""
        made = {"index": choice.index, "delta": {"content": delta.text}, **self._end(delta)}
        return {**self._chunk_head, "choices": [made]}

    def closing(self) -> dict[str, Any]:
        """For usage."""
        return {**self._chunk_head, "choices": []}

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A buffered reply."""
        listed = []
        for choice in choices:
            whole = Delta(choice.text, choice.tokens, choice.finish_reason, choice.stop_reason)
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            made = {"index": choice.index, "message": message, **self._end(whole)}
            if self._body.return_token_ids:
                made["prompt_token_ids"] = choice.prompt.token_ids
            listed.append(made)
        reply = {**self._head, "choices": listed}
        count = self._body.prompt_logprobs
        if count is not None and (found := choices[0].prompt_logprobs) is not None:
            reply["prompt_logprobs"] = shapes.prompt_logprobs(
                self._pieces, choices[0].prompt.token_ids, found, count
            )
        return reply

    def _end(self, delta: Delta) -> dict[str, Any]:
        made: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.logprobs:
            made["logprobs"] = shapes.chat_logprobs(self._pieces, delta.tokens, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            made["token_ids"] = [token.token_id for token in delta.tokens]
        return made
