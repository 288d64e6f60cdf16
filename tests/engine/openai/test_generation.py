"""Choices and streams, driven step by step: the engine's messages are made by hand, everything else is the real thing.

What the tiny model cannot be made to do on demand happens here: failing requests, late tokens, a dying engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

import pytest

from support.tiny_models import tiny_tokenizer
from trimtab_engine.core.live import LiveConfig, Slo
from trimtab_engine.core.request import SamplingParams
from trimtab_engine.errors import Draining, EngineDead
from trimtab_engine.messages import StepOutput, StepStats, Token
from trimtab_engine.server.client import EngineClient
from trimtab_engine.server.lifecycle import Lifecycle, Phase
from trimtab_engine.server.metrics.ledger import Ledger
from trimtab_engine.server.openai.chat import ChatFormat
from trimtab_engine.server.openai.errors import GenerationFailed
from trimtab_engine.server.openai.generation import (
    Choice,
    Delta,
    Plan,
    Prompt,
    merged,
    start,
    usage,
)
from trimtab_engine.server.openai.protocol import ChatBody
from trimtab_engine.server.openai.stream import EventStream, buffered
from trimtab_engine.server.text.tokenizer import Tokenizer

STATS = StepStats(*[0] * len(StepStats.__struct_fields__))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text)


class Bench:
    """A client without a process: what it would send goes nowhere, what it would receive is `tell`'s argument."""

    def __init__(self) -> None:
        self.ledger = Ledger(Slo())
        self.client = EngineClient(
            model_name="m",
            lifecycle=Lifecycle(),
            max_queued_requests=100,
            stall_timeout_s=60.0,
            on_token=self.ledger.engine_token,
            on_step=lambda stats: None,
        )
        self.client.on_readback = lambda readback: None
        self.client.max_num_seqs = LiveConfig().max_num_seqs
        self.client.lifecycle.advance(Phase.READY)

    def start(self, *, n: int = 1, max_tokens: int | None = 50, **fields: Any) -> list[Choice]:
        plan: dict[str, Any] = {
            "id": "chatcmpl-1",
            "arrival_s": 0.0,
            "prompts": [Prompt(ids_of("hi"), "hi", max_tokens)],
            "n": n,
            "sampling": SamplingParams(),
            "stops": (),
            "include_stop": False,
            "skip_special_tokens": True,
            "slo_class": "default",
            "tenant": None,
            "priority": 0,
            "cache_salt": None,
        }
        return start(self.client, self.ledger, tokenizer(), Plan(**{**plan, **fields}))

    def tell(self, *tokens: Token) -> None:
        self.client._handle(StepOutput(list(tokens), STATS))


def token(choice: Choice, token_id: int | None, finish: str | None = None, **facts: Any) -> Token:
    return Token(choice.record.request_id, token_id, finish, **facts)


async def all_deltas(choices: list[Choice]) -> list[Delta]:
    return [delta async for _, delta in merged(choices)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def run(scene: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scene(Bench())

    asyncio.run(asyncio.wait_for(main(), 20.0))


def test_tokens_that_wait_together_come_as_one_delta() -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start()
        first, second = ids_of("hello world")[:2]
        bench.tell(token(choice, first))
        bench.tell(token(choice, second, "length"))
        deltas = await all_deltas([choice])
        assert [(d.text, len(d.tokens), d.finish_reason) for d in deltas] == [
            (tokenizer().decode([first, second]), 2, "length")
        ]

    run(scene)


def test_a_stop_string_wins_over_the_length_limit_on_the_same_token() -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start(stops=("!",))
        bench.tell(token(choice, ids_of("!")[0], "length"))
        (delta,) = await all_deltas([choice])
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "!")

    run(scene)


def test_what_follows_a_stop_string_in_flight_is_dropped() -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start(stops=("!",))
        bench.tell(token(choice, ids_of("!")[0]))
        bench.tell(token(choice, ids_of("?")[0]))
        (delta,) = await all_deltas([choice])
        assert (delta.text, len(delta.tokens)) == ("", 1)
        assert bench.client.num_open == 0
        bench.tell(token(choice, ids_of("?")[0]))  # the step that was running when the abort was sent
        assert usage([choice], 1)["completion_tokens"] == 1

    run(scene)


def test_held_back_text_comes_out_at_the_end() -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start(stops=("a never",))
        a = ids_of("a")[0]
        bench.tell(token(choice, a))
        bench.tell(token(choice, a, "length"))
        assert "".join(d.text for d in await all_deltas([choice])) == "aa"

    run(scene)


def test_an_end_without_a_token_ends_it() -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start()
        bench.tell(token(choice, ids_of("a")[0]))
        bench.tell(token(choice, None, "length"))
        deltas = await all_deltas([choice])
        assert (deltas[-1].finish_reason, choice.text) == ("length", "a")

    run(scene)


def test_a_failed_sibling_fails_the_reply_and_frees_the_others() -> None:
    async def scene(bench: Bench) -> None:
        choices = bench.start(n=3)
        task = asyncio.create_task(buffered(choices, shape(), 3, never, {}))
        await asyncio.sleep(0)
        bench.tell(token(choices[1], None, "error", error="logits are not numbers"))
        with pytest.raises(GenerationFailed, match="logits are not numbers"):
            await task
        assert bench.client.num_open == 0
        assert bench.ledger.num_open == 0
        assert bench.ledger.finished_total["default", "error"] == 3

    run(scene)


def test_the_death_of_the_engine_reaches_who_waits() -> None:
    async def scene(bench: Bench) -> None:
        choices = bench.start(n=2)
        task = asyncio.create_task(buffered(choices, shape(), 2, never, {}))
        await asyncio.sleep(0)
        bench.client.fail_open("the engine process was ended by signal SIGKILL")
        with pytest.raises(EngineDead, match="SIGKILL"):
            await task
        assert bench.ledger.finished_total["default", "error"] == 2

    run(scene)


# -- the stream as an ASGI app -----------------------------------------------------------------------------------------


def shape() -> ChatFormat:
    body = ChatBody(messages=[{"role": "user", "content": "hi"}])
    return ChatFormat(body, reply_id="chatcmpl-1", created=1, model="m", tokenizer=tokenizer())


async def never() -> Any:
    await asyncio.Event().wait()


class Wire:
    """The socket's side of one streamed reply."""

    def __init__(self, choices: list[Choice], *, stall_timeout_s: float = 30.0) -> None:
        self.sent: list[Any] = []
        self.room = asyncio.Event()  # the client reads, so sends go through
        self.room.set()
        self.gone = asyncio.Event()
        app = EventStream(
            choices,
            shape(),
            1,
            include_usage=False,
            continuous_usage=False,
            headers={},
            stall_timeout_s=stall_timeout_s,
        )

        async def receive() -> Any:
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)
            await self.room.wait()

        self.task = asyncio.create_task(app({"type": "http"}, receive, send))

    @property
    def frames(self) -> list[str]:
        raw = b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body").decode()
        return [frame.removeprefix("data: ") for frame in raw.split("\n\n") if frame]


def test_the_first_byte_does_not_wait_for_the_first_token() -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start()
        wire = Wire([choice])
        await until(lambda: len(wire.sent) >= 2)
        assert wire.sent[0]["status"] == 200
        assert json.loads(wire.frames[0])["choices"][0]["delta"]["role"] == "assistant"
        bench.tell(token(choice, ids_of("a")[0], "length"))
        await wire.task
        assert wire.sent[-1]["more_body"] is False

    run(scene)


@pytest.mark.parametrize("how", ["request", "engine"])
def test_an_error_in_mid_stream_is_a_frame_before_done(how: str) -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start()
        wire = Wire([choice])
        bench.tell(token(choice, ids_of("a")[0]))
        await until(lambda: len(wire.frames) == 2)
        if how == "request":
            bench.tell(token(choice, None, "error", error="logits are not numbers"))
        else:
            bench.client.fail_open("the engine process ended with exit code 1")
        await wire.task
        error = json.loads(wire.frames[-2])["error"]
        assert error["type"] == "InternalServerError"
        assert error["message"] in ("logits are not numbers", "the engine process ended with exit code 1")
        assert error["code"] == (None if how == "request" else "engine_dead")
        assert wire.frames[-1] == "[DONE]"
        assert bench.ledger.finished_total["default", "error"] == 1
        assert bench.client.num_open == 0

    run(scene)


def test_a_token_counts_as_delivered_when_it_is_sent() -> None:
    async def scene(bench: Bench) -> None:
        (choice,) = bench.start()
        partial = tiny_tokenizer().token_to_id("ð")
        assert partial is not None
        wire = Wire([choice])
        bench.tell(token(choice, ids_of("a")[0]))
        await until(lambda: len(wire.frames) == 2)
        assert choice.record.num_output_tokens == 1
        bench.tell(token(choice, partial))
        for _ in range(20):
            await asyncio.sleep(0)
        assert choice.record.num_output_tokens == 1  # half a character is nothing that can be sent
        bench.tell(token(choice, ids_of("b")[0], "length"))
        await wire.task
        assert choice.record.num_output_tokens == 3
        assert choice.record.finished_reason == "length"

    run(scene)


def test_a_client_that_leaves_in_mid_stream_ends_all_choices() -> None:
    async def scene(bench: Bench) -> None:
        choices = bench.start(n=2)
        wire = Wire(choices)
        bench.tell(token(choices[0], ids_of("a")[0]))
        await until(lambda: len(wire.frames) == 3)
        wire.gone.set()
        await wire.task
        assert bench.client.num_open == 0
        assert bench.ledger.finished_total["default", "client_abort"] == 2

    run(scene)


def test_a_client_that_stops_reading_ends_all_choices_in_time() -> None:
    async def scene(bench: Bench) -> None:
        choices = bench.start(n=2)
        wire = Wire(choices, stall_timeout_s=0.05)
        bench.tell(token(choices[0], ids_of("a")[0]))
        await until(lambda: len(wire.frames) == 3)
        await asyncio.sleep(0.1)  # nothing to send is no stall
        assert not wire.task.done()
        wire.room.clear()
        bench.tell(token(choices[1], ids_of("b")[0]))
        await wire.task
        assert bench.client.num_open == 0
        assert bench.ledger.num_open == 0
        assert bench.ledger.longest_token_gap_s() == 0.0
        assert bench.ledger.finished_total["default", "client_abort"] == 2

    run(scene)


@pytest.mark.parametrize("n", [1, 2])
def test_a_fault_of_ours_in_one_choice_ends_the_reply_and_never_hangs(n: int) -> None:
    async def scene(bench: Bench) -> None:
        choices = bench.start(n=n)
        wire = Wire(choices)
        bench.tell(Token(choices[-1].record.request_id, -1))  # no such token: the detokenizer trips over it
        with pytest.raises(OverflowError):
            await wire.task
        assert bench.client.num_open == 0
        assert bench.ledger.finished_total["default", "server_abort"] == n

    run(scene)


def test_who_comes_after_a_drain_has_ended_the_engine_is_sent_elsewhere() -> None:
    async def scene(bench: Bench) -> None:
        bench.client.lifecycle.advance(Phase.REFUSING)
        bench.client.death = EngineDead("the engine process ended with exit code 0")
        with pytest.raises(Draining):
            bench.start()
        assert bench.ledger.rejections_total["draining"] == 1
        assert bench.ledger.num_open == 0

    run(scene)


def test_a_stream_that_the_server_cancels_ends_its_choices_as_the_server_s_fault() -> None:
    async def scene(bench: Bench) -> None:
        choices = bench.start(n=2)
        wire = Wire(choices)
        await until(lambda: len(wire.sent) >= 2)
        wire.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wire.task
        assert bench.client.num_open == 0
        assert bench.ledger.finished_total["default", "server_abort"] == 2

    run(scene)
