"""The tokenizer as a neighbour: what it costs the streams beside it."""

from __future__ import annotations

import asyncio
import time

from support.tiny_models import tiny_tokenizer
from trimtab_engine.server.text.tokenizer import Tokenizer


def test_streams_go_on_while_a_long_prompt_is_encoded() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    text = "the ship and the sea " * 40_000

    async def ticks_meanwhile() -> tuple[int, int]:
        encoding = asyncio.create_task(tokenizer.encode_in_thread(text))
        await asyncio.sleep(0)
        ticks = 0
        while not encoding.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks, len(await encoding)

    started = time.process_time()
    ticks, tokens = asyncio.run(ticks_meanwhile())
    assert tokens > 100_000
    # Some hundreds when the lock is free, two or three when it is held to the end, however slow the machine is.
    assert ticks > 20, f"{ticks} ticks in {time.process_time() - started:.2f} s"


def test_the_longest_token_bounds_what_a_text_may_hold() -> None:
    raw = tiny_tokenizer()
    assert Tokenizer(raw).longest_token == max(len(token) for token in raw.get_vocab())
