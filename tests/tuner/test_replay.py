"""The replayer against a real HTTP server with scripted answers. No test waits for a wall-clock bound to hold."""

from __future__ import annotations

import asyncio
import io
import threading

import pytest

from support.scripted_openai import Answer, ScriptedServer
from trimtab_tuner.errors import InputError, ServerError
from trimtab_tuner.progress import Counters, ProgressDisplay
from trimtab_tuner.replay import ReplayOptions, replay
from trimtab_tuner.slo import Slo
from trimtab_tuner.trace import Trace, TraceRequest
from trimtab_tuner.wire import Endpoint

SLO = Slo(1.0, 0.1)


def trace_of(*requests: TraceRequest, block: int | None = None) -> Trace:
    return Trace(requests, "made here", "records", block)


def even(count: int, gap_s: float = 0.01, prompt: int = 12, output: int = 3) -> Trace:
    return trace_of(*(TraceRequest(n * gap_s, prompt, output) for n in range(count)))


async def whole(answer: Answer) -> None:
    await answer.whole()


def test_prompts_and_outputs_are_exactly_as_long_as_the_trace_says() -> None:
    trace = trace_of(
        TraceRequest(0.0, 1, 1), TraceRequest(0.01, 777, 5), TraceRequest(0.02, 20, 40, "interactive")
    )
    with ScriptedServer(whole) as server:
        result = replay(trace, server.url, slo=SLO)
        bodies = sorted(server.bodies, key=lambda body: body["max_tokens"])
    assert [len(body["prompt"]) for body in bodies] == [1, 777, 20]
    assert [body["max_tokens"] for body in bodies] == [1, 5, 40]
    assert all(body["ignore_eos"] and body["stream"] and body["model"] == "scripted" for body in bodies)
    assert all(100 <= each < 500 for body in bodies for each in body["prompt"])
    assert [body.get("slo_class") for body in bodies] == [None, None, "interactive"]
    assert [r.status for r in result.requests] == ["ok"] * 3
    assert [(r.prompt_tokens, r.output_tokens, len(r.token_times_s)) for r in result.requests] == [
        (1, 1, 1),
        (777, 5, 5),
        (20, 40, 40),
    ]
    assert result.meta["trace_hash"] == trace.hash


def test_requests_go_out_when_due_though_none_is_answered() -> None:
    released = asyncio.Event()
    count = 0

    async def hold(answer: Answer) -> None:
        nonlocal count
        count += 1
        if count == 20:
            released.set()
        await released.wait()
        await answer.whole()

    with ScriptedServer(hold) as server:
        result = replay(even(20, 0.02), server.url, slo=SLO)
    # A closed loop would wait for ever; in an open one the last request releases all.
    assert [r.status for r in result.requests] == ["ok"] * 20
    first_answer = min(r.first_token_s or 0.0 for r in result.requests)
    assert all((r.sent_s or 99.0) <= first_answer for r in result.requests)
    assert all((r.sent_s or 0.0) >= r.intended_s for r in result.requests)


def test_gaps_between_tokens_are_seen_as_the_server_makes_them() -> None:
    async def stall(answer: Answer) -> None:
        await answer.start()
        await answer.token()
        await asyncio.sleep(1.0)
        await answer.token(text="")  # a token whose text is held back is still a token
        await answer.token(count=2, reason="length")
        await answer.usage(cached_tokens=16)
        await answer.done()

    with ScriptedServer(stall) as server:
        (request,) = replay(trace_of(TraceRequest(0.0, 20, 4)), server.url, slo=SLO).requests
    assert request.status == "ok"
    # The first may have been read late, and the second not sooner than it was sent.
    assert request.token_times_s[1] - request.token_times_s[0] >= 0.5
    assert (len(request.token_times_s), request.output_tokens, request.cached_tokens) == (3, 4, 16)


def test_servers_that_know_no_continuous_usage_are_read_by_chunks() -> None:
    async def plain(answer: Answer) -> None:
        await answer.start({"x-trimtab-generation": "7"})
        for _ in range(answer.body["max_tokens"]):
            await answer.token(usage=False)
        await answer.usage()
        await answer.done()

    with ScriptedServer(plain, max_model_len=None, vocabulary=None) as server:
        server.strict = True
        result = replay(even(2), server.url, slo=SLO)
    assert all("continuous_usage_stats" not in body["stream_options"] for body in server.bodies)
    assert [(r.status, r.output_tokens, len(r.token_times_s), r.generation) for r in result.requests] == [
        ("ok", 3, 3, 7)
    ] * 2
    assert "assumed range" in result.meta["token_ids_from"]


def test_every_way_to_fail_is_a_failed_request_and_never_an_exception() -> None:
    async def misbehave(answer: Answer) -> None:
        match answer.prompt_tokens:
            case 1:
                await answer.reply(503, {"error": {"message": "the queue is full"}})
            case 2:
                await answer.reply(500, {"error": {"message": "oops"}})
            case 3:
                await answer.start()
                await answer.token()
                return  # the connection breaks in mid-stream
            case 4:
                await answer.start()
                await answer.token()
                await answer.event('{"error": {"message": "engine died"}}')
                await answer.done()
            case 5:
                await answer.start()
                await answer.token(reason="stop")
                await answer.usage()
                await answer.done()
            case 6:
                await answer.raw(b"SMTP 220 hello\r\n\r\n")
            case 7:
                await answer.start()
                await answer.event("{broken")
                await answer.done()
            case 8:
                await answer.reply(200, {"choices": []})
            case 9:
                return

    trace = trace_of(*(TraceRequest(0.01 * n, n, 3) for n in range(1, 10)))
    with ScriptedServer(misbehave) as server:
        result = replay(trace, server.url, slo=SLO)
    want = {
        1: ("rejected", "the queue is full"),
        2: ("failed", "oops"),
        3: ("failed", "closed the connection"),
        4: ("failed", "engine died"),
        5: ("truncated", "1 of 3 tokens (finish reason stop)"),
        6: ("failed", "not an HTTP/1.1 reply"),
        7: ("failed", "not JSON"),
        8: ("failed", "not an event stream"),
        9: ("failed", "closed the connection"),
    }
    for request in result.requests:
        status, text = want[request.asked_prompt_tokens]
        assert request.status == status, request
        assert text in (request.error or ""), request
        assert request.finish_s is not None


def test_stopping_keeps_what_was_measured_and_marks_what_was_cut_off() -> None:
    stop = threading.Event()

    class Stopper:
        """Stops once all is read that is ever sent."""

        def update(self, counters: Counters) -> None:
            if (counters.finished, counters.tokens) == (1, 4):
                stop.set()

    async def answer_first_only(answer: Answer) -> None:
        if answer.prompt_tokens == 1:
            await answer.whole()
            return
        await answer.start()
        await answer.token()
        await asyncio.sleep(60)

    trace = trace_of(TraceRequest(0.0, 1, 3), TraceRequest(0.1, 2, 3), TraceRequest(600.0, 3, 3))
    with ScriptedServer(answer_first_only) as server:
        result = replay(trace, server.url, slo=SLO, stop=stop, observer=Stopper())
    assert result.meta["interrupted"] is True
    assert [(r.status, len(r.token_times_s)) for r in result.requests] == [("ok", 3), ("cancelled", 1)]


def test_a_drain_limit_turns_unanswered_requests_into_timeouts() -> None:
    async def never(answer: Answer) -> None:
        await answer.start()
        await asyncio.sleep(60)

    with ScriptedServer(never) as server:
        result = replay(even(2), server.url, slo=SLO, options=ReplayOptions(drain_timeout_s=0.2))
    assert [r.status for r in result.requests] == ["timeout", "timeout"]
    assert result.meta["interrupted"] is False


def test_equal_prefix_blocks_give_equal_content_and_the_rest_is_each_requests_own() -> None:
    requests = [
        TraceRequest(0.0, 10, 1, prefix_block_ids=("a", "b")),
        TraceRequest(0.01, 10, 1, prefix_block_ids=("a", "c")),
        TraceRequest(0.02, 6, 1, prefix_block_ids=("a", "b")),
        TraceRequest(0.03, 12, 1),
        TraceRequest(0.04, 12, 1),
    ]
    with ScriptedServer(whole) as server:
        replay(trace_of(*requests, block=4), server.url, slo=SLO, options=ReplayOptions(prompt_seed=1))
        first, second, third, *others = (body["prompt"] for body in server.bodies)
        server.forget()
        replay(trace_of(*requests, block=4), server.url, slo=SLO, options=ReplayOptions(prompt_seed=1))
        again = [body["prompt"] for body in server.bodies]
        server.forget()
        replay(trace_of(*requests, block=4), server.url, slo=SLO)
        fresh = [body["prompt"] for body in server.bodies]
    assert first[:4] == second[:4] == third[:4]
    assert first[4:8] != second[4:8]
    assert third[4:6] == first[4:6]
    assert others[0] != others[1]
    assert again == [first, second, third, *others]
    assert all(a != b for a, b in zip(fresh, again, strict=True))


def test_warm_up_requests_are_sent_first_and_not_measured() -> None:
    with ScriptedServer(whole) as server:
        result = replay(even(3), server.url, slo=SLO, options=ReplayOptions(warmup_requests=2))
        assert len(server.bodies) == 5
    assert len(result.requests) == 3


def test_what_is_sent_can_be_words_and_extra_fields() -> None:
    with ScriptedServer(whole) as server:
        options = ReplayOptions(
            prompt_kind="text", extra_body={"priority": 2}, api_key="secret", send_classes=False
        )
        replay(
            trace_of(TraceRequest(0.0, 30, 2, "interactive")), server.url + "/v1/", slo=SLO, options=options
        )
        (body,) = server.bodies
        assert all("Authorization: Bearer secret" in head for head in server.headers)
    assert len(body["prompt"].split()) == 30
    assert body["priority"] == 2
    assert "slo_class" not in body


def test_the_live_config_in_force_is_recorded_before_and_after() -> None:
    with ScriptedServer(whole) as server:
        server.metrics = 'trimtab_live_config_info{generation="3",max_num_batched_tokens="256",scheduling_policy="fcfs"} 1.0\n'
        meta = replay(even(1), server.url, slo=SLO).meta
    assert meta["live_config"] == {
        "generation": "3",
        "max_num_batched_tokens": "256",
        "scheduling_policy": "fcfs",
    }
    assert meta["live_config_after"] == meta["live_config"]


@pytest.mark.parametrize(
    ("options", "trace", "error", "said"),
    [
        (ReplayOptions(model="other"), even(1), InputError, "scripted"),
        (ReplayOptions(), trace_of(TraceRequest(0.0, 9000, 5)), InputError, "--scale-lengths 2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(
    options: ReplayOptions, trace: Trace, error: type[Exception], said: str
) -> None:
    with ScriptedServer(whole) as server:
        with pytest.raises(error, match=said):
            replay(trace, server.url, slo=SLO, options=options)
        assert server.bodies == []
        assert server.probes == 0


def test_an_unreachable_server_is_one_clear_error() -> None:
    with ScriptedServer(whole) as server:
        url = server.url
    with pytest.raises(ServerError, match="cannot connect"):
        replay(even(1), url, slo=SLO)
    with pytest.raises(InputError, match="an http or https address"):
        replay(even(1), "localhost:8000", slo=SLO)


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://llm.example/team/v1/", "https://llm.example:443/team"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses_are_taken_with_and_without_v1(url: str, want: str) -> None:
    assert Endpoint.parse(url).url == want


def test_progress_off_a_terminal_is_plain_lines_with_live_counters() -> None:
    stream = io.StringIO()
    with ProgressDisplay("replay", stream, plain_every_s=10.0) as display:
        for second in range(25):
            display.update(Counters(60, 10 + second, 8, 1, 90, float(second), 60.0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4  # at 0, 10 and 20 s, and the last state
    assert lines[-1] == "replay: 8 of 60 requests, 25 in flight, 1 failed, 90 tokens, 24 of about 60 s"


def test_replay_in_a_thread_leaves_signals_alone_and_works() -> None:
    found: list[str] = []
    with ScriptedServer(whole) as server:
        url = server.url
        thread = threading.Thread(
            target=lambda: found.extend(r.status for r in replay(even(2), url, slo=SLO).requests)
        )
        thread.start()
        thread.join(30)
    assert found == ["ok", "ok"]
