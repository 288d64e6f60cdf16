"""Running one request on the engine: its sequences (`Choice`), their deltas, and their end whatever happens.

Used by `completions` and `chat`, which know the wire shapes; `stream` sends. Each choice (prompt × n) is one request of the
engine and one record of the ledger. Whoever starts choices closes them: a choice left alone is aborted in the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab_engine.core.request import SamplingParams
from trimtab_engine.errors import EngineDead, Shed, Unavailable
from trimtab_engine.messages import Add, Token
from trimtab_engine.server.client import EngineClient, TokenStream
from trimtab_engine.server.metrics.ledger import Ledger, RequestRecord
from trimtab_engine.server.openai.errors import GenerationFailed
from trimtab_engine.server.openai.logprobs import PromptLogprob
from trimtab_engine.server.openai.params import INT64
from trimtab_engine.server.text.output import OutputText, Piece
from trimtab_engine.server.text.stop import StopMatcher
from trimtab_engine.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt that fits. `text` is what an echo shows; `max_tokens` None: until the model's length, 0: echo alone."""

    token_ids: list[int]
    text: str
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that has passed every check, ready to be started."""

    id: str  # the client's: cmpl-… or chatcmpl-…
    arrival_s: float
    prompts: list[Prompt]
    n: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    slo_class: str
    tenant: str | None
    priority: int
    cache_salt: str | None
    ttft_s: float | None = None  # its own targets; None: those of its class
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice: text, the tokens that it is made of, and how the choice ended, if it did."""

    text: str
    tokens: list[Token]
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token id; None for EOS and length


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a reply, from the engine's tokens to deltas, with everything the reply says about it."""

    index: int
    prompt: Prompt
    record: RequestRecord
    include_stop: bool
    _stream: TokenStream
    _output: OutputText
    _ledger: Ledger
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    num_cached: int = 0
    prompt_logprobs: list[PromptLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _undescribed: list[Token] = field(default_factory=list)  # their text is held back

    async def deltas(self) -> AsyncIterator[Delta]:
        """All deltas until the finish; raises GenerationFailed, EngineDead or Shed (before the first)."""
        while self.finish_reason is None:
            delta = self._take(await self._stream.next_batch())
            if delta is not None:
                self.text += delta.text
                self.tokens += delta.tokens
                yield delta

    def delivered(self, delta: Delta) -> None:
        """The delta was handed to the socket (a buffered reply: to its buffer); the latencies are stamped now."""
        self._ledger.token_delivered(self.record, len(delta.tokens))
        if delta.finish_reason is not None:
            self._ledger.finished(self.record, delta.finish_reason)

    def close(self, reason: str) -> None:
        """End the choice if it has not ended by itself: abort in the engine, book `reason`. Idempotent."""
        self._stream.abort()
        self._ledger.finished(self.record, reason)

    def _take(self, batch: Sequence[Token]) -> Delta | None:
        assert batch, "the engine's stream ends with a finish reason"
        text = ""
        described: list[Token] = []
        for token in batch:
            self._note(token)
            if token.token_id is None and token.finish_reason is None:
                continue
            if self.prompt.max_tokens == 0:  # asked for the prompt alone; the engine had to make one token
                self._finish("length", None)
                return Delta("", [], "length")
            piece = self._push(token)
            if piece is not None:
                text += piece.text
                described += self._describe()
            stop = None if piece is None else piece.stop
            if stop is None and token.finish_reason is None:
                continue
            # A stop string wins over what the engine says of the same token.
            if stop is None:
                last = self._output.finish()
                text += last.text
                described += self._describe()
                stop = last.stop
            if stop is not None:
                self._finish("stop", stop)
            else:
                self._finish(str(token.finish_reason), token.stop_token)
            return Delta(text, described, self.finish_reason, self.stop_reason)
        return Delta(text, described) if described else None

    def _push(self, token: Token) -> Piece | None:
        if token.token_id is None:
            return None
        self._undescribed.append(token)
        silent = token.finish_reason == "stop" and not self.include_stop
        return self._output.push(token.token_id, silent=silent)

    def _describe(self) -> list[Token]:
        tokens, self._undescribed = self._undescribed, []
        return tokens

    def _note(self, token: Token) -> None:
        if token.num_cached is not None:
            self.num_cached = token.num_cached
        if token.prompt_logprobs is not None:
            self.prompt_logprobs = list(token.prompt_logprobs)
        if token.retry_after_s is not None:
            shed = Shed(token.error or "the request was shed", token.retry_after_s)
            self._ledger.rejected(self.record, shed.reason)
            self._stream.abort()
            raise shed
        if token.finish_reason == "error":
            raise GenerationFailed(token.error or "the engine failed on this request")
        if token.finish_reason == "abort":
            raise GenerationFailed("the request was aborted by the server")

    def _finish(self, reason: str, stop_reason: str | int | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._stream.abort()  # nothing happens when the engine has finished it


def start(client: EngineClient, ledger: Ledger, tokenizer: Tokenizer, plan: Plan) -> list[Choice]:
    """Hand all sequences of a request to the engine, or none; raises what `EngineClient.check_admission` raises.

    A refusal is booked for each sequence: to the ones who are refused it is a missed target.
    """
    records = [_record(ledger, plan, prompt) for prompt in plan.prompts for _ in range(plan.n)]
    try:
        client.check_admission(len(records))
    except Unavailable as error:
        for record in records:
            ledger.rejected(record, error.reason)
        raise
    except EngineDead:
        for record in records:
            ledger.finished(record, "error")
        raise
    choices: list[Choice] = []
    for index, record in enumerate(records):
        prompt = plan.prompts[index // plan.n]
        group = None if plan.n == 1 else f"{records[index - index % plan.n].request_id}-group"
        add = Add(
            id=record.request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=_sampling(plan.sampling, prompt, child=index % plan.n),
            arrival_s=plan.arrival_s,
            priority=plan.priority,
            slo_class=plan.slo_class,
            ttft_s=plan.ttft_s,
            itl_s=plan.itl_s,
            tenant=plan.tenant,
            cache_salt=plan.cache_salt,
            group=group,
        )
        output = OutputText(
            tokenizer.detokenizer(prompt.token_ids, skip_special_tokens=plan.skip_special_tokens),
            StopMatcher(plan.stops, include_in_output=plan.include_stop),
            min_tokens=plan.sampling.min_tokens,
        )
        stream = client.submit(add, record=record)
        choices.append(
            Choice(
                index=index,
                prompt=prompt,
                record=record,
                include_stop=plan.include_stop,
                _stream=stream,
                _output=output,
                _ledger=ledger,
            )
        )
    return choices


def _record(ledger: Ledger, plan: Plan, prompt: Prompt) -> RequestRecord:
    # The id is ours: clients repeat theirs, and two requests must never meet in the engine.
    return ledger.arrived(
        request_id=uuid.uuid4().hex,
        slo_class=plan.slo_class,
        prompt_token_ids=prompt.token_ids,
        arrival_s=plan.arrival_s,
        tenant=plan.tenant,
        max_tokens=prompt.max_tokens,
        ttft_s=plan.ttft_s,
        itl_s=plan.itl_s,
    )


def _sampling(base: SamplingParams, prompt: Prompt, child: int) -> SamplingParams:
    seed = base.seed
    if seed is not None and child:
        seed = (seed + child + INT64) % (2 * INT64) - INT64  # stays in 64 bits
    max_tokens = prompt.max_tokens if prompt.max_tokens is None else max(1, prompt.max_tokens)
    return dataclasses.replace(base, max_tokens=max_tokens, seed=seed)


async def merged(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta], None]:
    """Deltas of all choices as they come. Close it (`aclosing`) when leaving early."""
    if len(choices) == 1:
        async for delta in choices[0].deltas():
            yield choices[0], delta
        return
    queue: asyncio.Queue[tuple[Choice, Delta] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        async for delta in choice.deltas():
            queue.put_nowait((choice, delta))

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    for task in tasks:
        task.add_done_callback(
            queue.put_nowait
        )  # behind its last delta; however it ended, somebody must hear of it
    try:
        open_choices = len(tasks)
        while open_choices:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises what ended it
                open_choices -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Tokens of the whole reply. A prompt counts once however many choices it has, its prefix hit is its first choice's."""
    first = choices[::n]
    prompt_tokens = sum(len(choice.prompt.token_ids) for choice in first)
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached for choice in first)},
    }
