"""What is made of an engine's answers on its admin port when they are not what an engine says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from trimtab_tuner.cluster import records
from trimtab_tuner.cluster.pods import Pod
from trimtab_tuner.cluster.records import Records, Told
from trimtab_tuner.errors import ServerError

POD = Pod("chat-engine-x", "u", "http://a", "http://b")


def ask(workload: httpx.Response) -> Told:
    """An engine that gives this for its workload, and nothing else."""

    def answer(request: httpx.Request) -> httpx.Response:
        return workload if request.url.path == "/admin/workload" else httpx.Response(200, json={})

    async def told() -> Told:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await Records(client, {POD.uid: "token"}).ask(POD)

    return asyncio.run(told())


def test_what_is_left_out_is_nothing() -> None:
    found = ask(httpx.Response(200, json={"records": [{"arrival_s": 1}, 5]}))
    assert (found.records, found.block_size, found.dropped, found.model) == (({"arrival_s": 1},), 16, 0, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"records": null}', "records: None is no list"),
        ('{"records": {"a": 1}}', "is no list"),
        ('{"next": null}', "next: None is no count"),
        ('{"next": 1e400}', "next: inf is no count"),
        ('{"next": "x"}', "is no count"),
        ('{"block_size": NaN}', "block_size: nan is no count"),
        ('{"dropped": -1}', "dropped: -1 is no count"),
        ('{"dropped": true}', "is no count"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "HTTP 200"),
        ("", "no JSON"),
    ],
)
def test_an_odd_answer_is_told_with_the_pod_that_gave_it(text: str, said: str) -> None:
    with pytest.raises(ServerError, match=said) as caught:
        ask(httpx.Response(200, text=text))
    assert POD.name in str(caught.value)


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_BYTES", 2**20)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 2**16
            yield b" " * 2**16

    with pytest.raises(ServerError, match="longer than 1 MiB"):
        ask(httpx.Response(200, content=endless()))
    assert sent < 2**21


def test_an_answer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_ANSWER_S", 0.05)

    async def dripping() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    with pytest.raises(ServerError, match="TimeoutError"):
        ask(httpx.Response(200, content=dripping()))
