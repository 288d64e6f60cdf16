"""POST /v1/completions: prompts as text or token ids, echo, logprobs; and the shape of its replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from trimtab_engine.errors import RequestError
from trimtab_engine.server.openai import logprobs as shapes
from trimtab_engine.server.openai.errors import short
from trimtab_engine.server.openai.generation import Choice, Delta, Prompt
from trimtab_engine.server.openai.logprobs import CompletionLogprobs
from trimtab_engine.server.openai.params import (
    MAX_SEQUENCES,
    Limits,
    check_text,
    check_token_ids,
    fit,
    num_choices,
)
from trimtab_engine.server.openai.protocol import CompletionBody
from trimtab_engine.server.text.tokenizer import Tokenizer


async def prompts(body: CompletionBody, tokenizer: Tokenizer, limits: Limits) -> list[Prompt]:
    """All prompts of the request, encoded, checked, truncated if asked to; raises RequestError."""
    given = body.prompt
    if given is None:
        raise RequestError("prompt: missing; it is required", param="prompt")
    texts, ids = _listed(given)
    count = max(len(texts), len(ids)) * num_choices(body)
    if count > MAX_SEQUENCES:
        raise RequestError(
            f"prompt: {count} sequences (prompts × n) are not allowed; at most {MAX_SEQUENCES}",
            param="prompt",
        )
    for position, text in enumerate(texts):
        check_text(
            "prompt" if len(texts) == 1 else f"prompt[{position}]", text, tokenizer.longest_token, limits
        )
    encoded = [
        await tokenizer.encode_in_thread(text, add_special_tokens=body.add_special_tokens is not False)
        for text in texts
    ]
    for position, token_ids in enumerate(ids):
        check_token_ids("prompt" if len(ids) == 1 else f"prompt[{position}]", token_ids, limits.vocab_size)
    made = []
    for position, token_ids in enumerate(encoded or ids):
        fitted = fit(body, token_ids, limits)
        whole = len(fitted.prompt_token_ids) == len(token_ids)
        text = texts[position] if texts and whole else ""
        if body.echo and not (texts and whole):
            text = tokenizer.decode(fitted.prompt_token_ids)
        made.append(Prompt(fitted.prompt_token_ids, text, fitted.max_tokens))
    return made


def _listed(given: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """The four forms of `prompt` as a list of texts or a list of id lists; the other one is empty."""
    empty = RequestError(
        f"prompt: {short(given)} is not allowed; each prompt needs at least one token", param="prompt"
    )
    if not given:
        raise empty
    if isinstance(given, str):
        return [given], []
    first = given[0]  # `protocol` has seen to it that all are of one kind
    if isinstance(first, int):
        return [], [cast("list[int]", given)]
    if not all(given):
        raise empty
    if isinstance(first, str):
        return cast("list[str]", given), []
    return [], cast("list[list[int]]", given)


def check(body: CompletionBody) -> None:
    """What this endpoint alone refuses."""
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"best_of: {body.best_of} is not supported; leave it out or set it to n ({n})",
            param="best_of",
            code="unsupported_parameter",
        )


class CompletionFormat:
    """Shape `text_completion`, streamed and buffered alike."""

    def __init__(
        self, body: CompletionBody, *, reply_id: str, created: int, model: str, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._head = {"id": reply_id, "object": "text_completion", "created": created, "model": model}
        self._pieces = tokenizer.pieces
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()  # choices whose echo has gone out

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """Nothing: a completion has no chunk without text."""
        return None

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One chunk; the first one of a choice carries its echo."""
        return {**self._head, "choices": [self._choice(choice, delta)]}

    def closing(self) -> dict[str, Any]:
        """For usage."""
        return {**self._head, "choices": []}

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A buffered reply: each choice as one delta."""
        listed = []
        for choice in choices:
            whole = Delta(choice.text, choice.tokens, choice.finish_reason, choice.stop_reason)
            made = self._choice(choice, whole)
            if self._body.prompt_logprobs is not None and choice.prompt_logprobs is not None:
                made["prompt_logprobs"] = shapes.prompt_logprobs(
                    self._pieces, choice.prompt.token_ids, choice.prompt_logprobs, self._body.prompt_logprobs
                )
            listed.append(made)
        return {**self._head, "choices": listed}

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        made: dict[str, Any] = {
            "index": choice.index,
            "text": (choice.prompt.text if first and self._body.echo else "") + delta.text,
            "logprobs": self._logprobs_of(choice, delta, first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            made["token_ids"] = [token.token_id for token in delta.tokens]
            if first:
                made["prompt_token_ids"] = choice.prompt.token_ids
        return made

    def _logprobs_of(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        if first:
            self._logprobs[choice.index] = CompletionLogprobs(
                self._pieces,
                self._body.logprobs,
                skip_special_tokens=self._body.skip_special_tokens is not False,
            )
        builder = self._logprobs[choice.index]
        outputs = (
            builder.prompt(choice.prompt.token_ids, choice.prompt_logprobs)
            if (first and self._body.echo and choice.prompt_logprobs is not None)
            else None
        )
        fresh = builder.outputs(delta.tokens)
        return fresh if outputs is None else shapes.joined(outputs, fresh)
