"""The engine loop with its real scheduler and channel, on an executor that computes checkable tokens and can be broken."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from support.core_builders import HistoryRunner, make_live, make_scheduler, make_step_time, undisturbed
from trimtab_engine.core.live import Ceilings
from trimtab_engine.core.request import Request, SamplingParams
from trimtab_engine.core.step import Step, StepResult, TokenLogprobs
from trimtab_engine.core.step_time import StepTimeModel
from trimtab_engine.engine_state import EngineState
from trimtab_engine.framing import EngineChannel, FrameReader, frame
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_engine.messages import (
    Abort,
    Add,
    Applied,
    Drain,
    EndLease,
    Fatal,
    FromEngine,
    Reconfigure,
    StepModel,
    StepOutput,
    Stop,
    Stopped,
    ToEngine,
    Token,
)
from trimtab_engine.runtime.loop import EngineLoop
from trimtab_engine.step_record import Header, RecordError, StepRecorder, read, replay

SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)


class Executor(HistoryRunner):
    """Real tokens; `before` may raise, and rows of requests named by `fail` come back broken."""

    def __init__(
        self,
        before: Callable[[Step], None] = lambda step: None,
        fail: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        super().__init__(4, fail)
        self._before = before

    def run(self, step: Step) -> StepResult:
        self._before(step)
        return super().run(step)


class Gate:
    """Holds the loop before one step, so that a test can speak to it in the middle of work whatever the machine does."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._open = threading.Event()
        self.open = self._open.set

    def __call__(self, step: Step) -> None:
        if step.step_id == self._step_id:
            assert self._open.wait(30.0), "nobody opened the gate"


class Peer:
    """The HTTP process's end of the socket, in the test's thread."""

    def __init__(self, sock: socket.socket, thread: threading.Thread) -> None:
        sock.settimeout(30.0)
        self._sock = sock
        self._thread = thread
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._inbox: list[FromEngine] = []
        self.seen: list[FromEngine] = []

    def send(self, *messages: ToEngine) -> None:
        self._sock.sendall(b"".join(frame(msgspec.msgpack.encode(m)) for m in messages))

    def next(self) -> FromEngine:
        while not self._inbox:
            data = self._sock.recv(65536)
            if not data:
                raise EOFError
            self._inbox += (self._decoder.decode(p) for p in self._reader.feed(data))
        self.seen.append(self._inbox.pop(0))
        return self.seen[-1]

    def until(self, wanted: Callable[[FromEngine], bool]) -> FromEngine:
        """Read on to the first message that is wanted."""
        while not wanted(message := self.next()):
            pass
        return message

    def tokens(self, request_id: str) -> list[Token]:
        """Everything about one request, read to its finish."""

        def finishes(message: FromEngine) -> bool:
            return any(t.id == request_id and t.finish_reason for t in tokens_of(message))

        if not any(finishes(m) for m in self.seen):
            self.until(finishes)
        return [t for m in self.seen for t in tokens_of(m) if t.id == request_id]

    def end(self) -> None:
        """Wait for the loop's end, reading what it still says."""
        try:
            while True:
                self.next()
        except (EOFError, ConnectionError):
            pass
        self._thread.join(30.0)
        assert not self._thread.is_alive()


def tokens_of(message: FromEngine) -> list[Token]:
    return message.tokens if isinstance(message, StepOutput) else []


class Started:
    """Starts loops and remembers their exit codes."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.peers: list[Peer] = []

    def __call__(self, executor: Executor | None = None, num_blocks: int = 64) -> Peer:
        ours, theirs = socket.socketpair()
        channel = EngineChannel(ours)
        live = make_live()
        state = EngineState(
            make_scheduler(num_blocks=num_blocks, live=live),
            LiveState(Versioned(1, "Spec", live), Ceilings()),
            0.0,
        )
        loop = EngineLoop(channel, state, executor or Executor())

        def run() -> None:
            self.codes.append(loop.run([]))
            channel.close()

        thread = threading.Thread(target=run, daemon=True)
        self.peers.append(Peer(theirs, thread))
        thread.start()
        return self.peers[-1]


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for peer in started.peers:
        peer._sock.close()
        peer._thread.join(30.0)
        assert not peer._thread.is_alive(), "the loop did not notice that its peer is gone"


def add(name: str, prompt: int = 6, sampling: SamplingParams = SAMPLING) -> Add:
    return Add(name, [1 + (ord(name[0]) * 31 + i) % 40 for i in range(prompt)], sampling, arrival_s=0.0)


def said(tokens: list[Token]) -> list[int]:
    return [t.token_id for t in tokens if t.token_id is not None]


def test_requests_run_to_their_end_and_the_last_word_is_idle(start: Started) -> None:
    peer = start()
    a, b = add("a"), add("b", 9)
    peer.send(a, b)
    for message in (a, b):
        tokens = peer.tokens(message.id)
        assert said(tokens) == undisturbed(message.prompt_token_ids, SAMPLING, 256)
        assert tokens[-1].finish_reason == "length"
        assert tokens[0].num_cached == 0
        assert tokens[0].first_scheduled_s is not None
        assert tokens[1].num_cached is None
    idle = peer.until(
        lambda m: isinstance(m, StepOutput) and m.stats.num_tokens == 0 and not m.stats.num_running
    )
    assert isinstance(idle, StepOutput)
    assert (idle.stats.num_waiting, idle.stats.kv_used_fraction) == (0, 0.0)
    peer.send(Drain())
    assert isinstance(peer.until(lambda m: isinstance(m, Stopped)), Stopped)
    peer.end()
    assert start.codes == [0]


def test_step_statistics_are_of_the_step(start: Started) -> None:
    peer = start()
    peer.send(add("a", 70))  # the budget is 64: two chunks, then decodes
    peer.tokens("a")
    steps = [m.stats for m in peer.seen if isinstance(m, StepOutput) and m.stats.num_tokens]
    assert [(s.num_tokens, s.num_decodes, s.num_prefills) for s in steps] == [
        (64, 0, 1),
        (6, 0, 1),
        (1, 1, 0),
        (1, 1, 0),
        (1, 1, 0),
    ]
    assert [s.prefill_attention for s in steps] == [64 * 32.0, 6 * (64 + 3.0), 0.0, 0.0, 0.0]
    assert [s.decode_context for s in steps] == [0, 0, 70, 71, 72]
    assert all(s.budget == 64 and s.generation == 1 for s in steps)
    assert all(0 < s.schedule_s <= s.step_s for s in steps)
    assert all(0 <= s.lost_s <= s.step_s + 0.01 for s in steps)
    assert sum(s.prefix_queries for s in steps) == 70


def test_a_bad_row_fails_its_request_alone(start: Started) -> None:
    peer = start(Executor(fail=lambda request: request.id == "bad"))
    good = add("good")
    peer.send(add("bad"), good)
    (bad,) = peer.tokens("bad")
    assert bad.finish_reason == "error"
    assert bad.error
    assert said(peer.tokens("good")) == undisturbed(good.prompt_token_ids, SAMPLING, 256)


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(start: Started) -> None:
    def break_once(step: Step) -> None:
        if any(r.id == "unlucky" for r in step.requests):
            raise RuntimeError("no memory for this batch")

    peer = start(Executor(before=break_once))
    peer.send(add("unlucky"))
    (token,) = peer.tokens("unlucky")
    assert token.finish_reason == "error"
    assert "no memory for this batch" in str(token.error)
    later = add("later")
    peer.send(later)
    assert said(peer.tokens("later")) == undisturbed(later.prompt_token_ids, SAMPLING, 256)


def test_three_failing_steps_in_a_row_end_the_engine(start: Started) -> None:
    def always(step: Step) -> None:
        raise RuntimeError("broken for good")

    peer = start(Executor(before=always))
    for name in "abc":
        peer.send(add(name))
        assert peer.tokens(name)[-1].finish_reason == "error"
    fatal = peer.until(lambda m: isinstance(m, Fatal))
    assert isinstance(fatal, Fatal)
    assert fatal.kind == "internal"
    assert "broken for good" in fatal.reason
    peer.end()
    assert start.codes == [1]


def test_a_lost_device_ends_the_engine_at_once(start: Started) -> None:
    def lost(step: Step) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    peer = start(Executor(before=lost))
    peer.send(add("a"))
    assert peer.tokens("a")[-1].finish_reason == "error"
    fatal = peer.until(lambda m: isinstance(m, Fatal))
    assert isinstance(fatal, Fatal)
    assert fatal.kind == "device"


def test_aborts_are_idempotent_wherever_they_meet_the_request(start: Started) -> None:
    gate = Gate(step_id=3)
    peer = start(Executor(before=gate))
    endless = replace(SAMPLING, max_tokens=200)
    peer.send(Abort(["unknown"]), add("a", sampling=endless), add("b", sampling=endless), Abort(["b", "b"]))
    assert [t.finish_reason for t in peer.tokens("b")] == ["abort"]  # never scheduled
    peer.until(lambda m: any(t.id == "a" for t in tokens_of(m)))
    peer.send(Abort(["a"]), Abort(["a"]))
    gate.open()
    assert [t.finish_reason for t in peer.tokens("a") if t.finish_reason] == ["abort"]
    peer.send(add("c"))
    assert peer.tokens("c")[-1].finish_reason == "length"


def test_a_request_that_can_never_fit_is_answered(start: Started) -> None:
    peer = start(num_blocks=4)
    peer.send(add("big", 40))
    (token,) = peer.tokens("big")
    assert token.finish_reason == "error"
    assert token.error


def reconfigure(sequence: int, generation: int, budget: int, lease_s: float | None = None) -> Reconfigure:
    return Reconfigure(sequence, generation, "Spec", make_live(budget).to_json(), lease_s)


def test_a_lease_ends_in_the_engine_itself_between_steps_and_at_rest(start: Started) -> None:
    peer = start()
    long = replace(SAMPLING, max_tokens=240)
    for name, work in (("idle", None), ("busy", add("a", sampling=long))):
        if work is not None:
            peer.send(work)
        generation = 2 if name == "idle" else 3
        peer.send(reconfigure(generation, generation, 32, lease_s=0.05))
        taken = peer.until(lambda m: isinstance(m, Applied))
        assert isinstance(taken, Applied)
        assert taken.sequence == generation
        ended = peer.until(lambda m: isinstance(m, Applied))
        assert isinstance(ended, Applied)
        assert ended.sequence is None
        assert ended.readback["candidate"] is None
        in_force = ended.readback["in_force"]
        assert isinstance(in_force, dict)
        assert in_force["generation"] == 1


def test_a_candidate_governs_steps_only_while_it_is_in_force(start: Started) -> None:
    gate = Gate(step_id=5)
    peer = start(Executor(before=gate))
    peer.send(add("a", 70, replace(SAMPLING, max_tokens=120)), reconfigure(1, 2, 16, lease_s=60.0))
    peer.until(lambda m: isinstance(m, StepOutput) and m.stats.generation == 2)
    peer.send(EndLease(2))
    gate.open()
    peer.until(lambda m: isinstance(m, Applied) and m.sequence == 2)
    before = len(peer.seen)
    peer.tokens("a")
    assert {m.stats.generation for m in peer.seen[before:] if isinstance(m, StepOutput)} == {1}
    for message in peer.seen:
        if isinstance(message, StepOutput) and message.stats.num_tokens:
            assert message.stats.budget == {1: 64, 2: 16}[message.stats.generation]
            assert message.stats.num_tokens <= message.stats.budget


@pytest.mark.parametrize(
    ("message", "path", "conflict"),
    [
        (Reconfigure(1, 5, "Spec", {"max_num_seqs": 1}, None), "config.long_prefill_token_threshold", False),
        (reconfigure(1, 5, 8193), "config.max_num_batched_tokens", False),
        (reconfigure(1, 5, 32, lease_s=500.0), "lease_s", False),
        (reconfigure(1, 1, 32), None, True),
    ],
)
def test_a_wrong_live_config_changes_nothing(
    start: Started, message: Reconfigure, path: str | None, conflict: bool
) -> None:
    peer = start()
    peer.send(message)
    answer = peer.until(lambda m: isinstance(m, Applied))
    assert isinstance(answer, Applied)
    assert answer.error
    assert (answer.error_path, answer.conflict) == (path, conflict)
    assert answer.readback["highest_generation"] == 1


def test_requests_that_come_while_draining_are_still_finished(start: Started) -> None:
    peer = start()
    peer.send(add("a", sampling=replace(SAMPLING, max_tokens=100)), Drain(), add("late"))
    assert peer.tokens("a")[-1].finish_reason == "length"
    assert peer.tokens("late")[-1].finish_reason == "length"
    peer.end()
    assert isinstance(peer.seen[-1], Stopped)
    assert start.codes == [0]


def test_stop_ends_the_loop_in_the_middle_of_work(start: Started) -> None:
    peer = start()
    peer.send(add("a", sampling=replace(SAMPLING, max_tokens=240)))
    peer.until(lambda m: bool(tokens_of(m)))
    peer.send(Stop())
    peer.end()
    assert start.codes == [0]


def test_prompt_logprobs_of_all_chunks_come_with_the_first_token(start: Started) -> None:
    class WithLogprobs(Executor):
        def run(self, step: Step) -> StepResult:
            result = super().run(step)
            for row, request in enumerate(step.requests):
                if step.context[row] < request.num_prompt_tokens:
                    first = [None] if step.context[row] == 0 else []
                    stop = min(step.context[row] + step.chunk[row], request.num_prompt_tokens - 1)
                    result.prompt_logprobs[row] = [
                        *first,
                        *(TokenLogprobs(-float(i), 1, []) for i in range(step.context[row], stop)),
                    ]
            return result

    peer = start(WithLogprobs())
    peer.send(add("a", 150, replace(SAMPLING, prompt_logprobs=1)))
    first, *rest = peer.tokens("a")
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry[0] for entry in first.prompt_logprobs[1:] if entry is not None] == [
        -float(i) for i in range(149)
    ]
    assert all(token.prompt_logprobs is None for token in rest)


def run_recorded(
    path: Path,
    lost_s: Callable[[], float],
    step_model: StepTimeModel | None = None,
    *,
    policy: str = "fcfs",
    prompt: int = 6,
) -> list[FromEngine]:
    """One request of 30 tokens through a loop that records; everything it said."""
    live = make_live(policy=policy)
    header = Header(
        num_blocks=64,
        block_size=4,
        max_model_len=256,
        enable_prefix_caching=True,
        prefill_first=False,
        eos_token_ids=[],
        seed=0,
        ceilings={"max_num_batched_tokens": 64, "max_num_seqs": 8},
        live=live.to_json(),
        generation=1,
        source="Spec",
    )
    ours, theirs = socket.socketpair()
    with theirs, StepRecorder(path, header) as recorder:
        loop = EngineLoop(
            EngineChannel(ours),
            header.build(),
            Executor(),
            recorder,
            lost_s=lost_s,
            step_model=step_model,
        )
        request = add("a", prompt, SamplingParams(max_tokens=30, ignore_eos=True, seed=0))
        assert loop.run([request, Drain()]) == 0
        peer = Peer(theirs, threading.current_thread())
        peer.until(lambda message: isinstance(message, Stopped))
    ours.close()
    return peer.seen


def test_the_loop_learns_step_times_tells_them_and_records_what_it_schedules_by(tmp_path: Path) -> None:
    seen = run_recorded(tmp_path / "steps.jsonl", lost_s=lambda: 0.0)
    news = [m for m in seen if isinstance(m, StepModel)]
    assert [m.score["num_steps"] for m in news] == [*range(4, 17)]  # 30 steps: the next would come at 32
    assert all(m.score["num_excluded"] == 0 for m in news)
    models = [StepTimeModel.from_json(m.model) for m in news]
    entries = list(replay(tmp_path / "steps.jsonl"))
    recorded = [entry.step_model for entry in entries if entry.step_model is not None]
    assert [StepTimeModel.from_json(r) for r in recorded] == models
    assert entries[4].step_model == models[0].to_json()  # learnt from steps 0 to 3, in force from step 4


def test_a_saved_model_is_in_force_before_the_first_step_and_until_enough_have_run(tmp_path: Path) -> None:
    saved = make_step_time(0.02, 0.003)
    seen = run_recorded(tmp_path / "steps.jsonl", lost_s=lambda: 0.0, step_model=saved)
    news = [m for m in seen if isinstance(m, StepModel)]
    assert [(m.model, m.score["num_steps"]) for m in news] == [(saved.to_json(), 0)]
    entries = list(replay(tmp_path / "steps.jsonl"))
    assert [entry.step_model for entry in entries] == [saved.to_json()] + [None] * (len(entries) - 1)


def test_a_record_of_a_policy_that_goes_by_step_times_needs_the_models_that_stand_in_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "steps.jsonl"
    saved = make_step_time(0.02, 0.003)  # 24 tokens in 0.09 s; without a model a step may hold 64
    run_recorded(path, lambda: 0.0, saved, policy="sla-aware", prompt=60)
    assert [row[2] for entry in replay(path) for row in entry.rows][:3] == [24, 24, 12]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"step_model": None}) + "\n" for line in lines))
    with pytest.raises(RecordError, match="replays differently"):
        list(replay(path))


def test_steps_that_waited_for_a_cpu_are_counted_and_not_learnt_from(tmp_path: Path) -> None:
    lost = iter(range(1000))
    seen = run_recorded(tmp_path / "steps.jsonl", lost_s=lambda: float(next(lost)))
    news = [m for m in seen if isinstance(m, StepModel)]
    assert [m.score["num_excluded"] for m in news] == [1, *range(4, 17)]
    assert news[0].model is None
    assert all((m.score["num_steps"], m.score["excluded_share"]) == (0, 1.0) for m in news)
    # There is nothing better to schedule by, so a model of all steps stands in, and says so.
    assert all(m.score["provisional"] and m.score["error_median"] is None for m in news)
    assert news[-1].model is not None


def test_a_record_of_a_broken_step_replays(tmp_path: Path) -> None:
    def break_once(step: Step) -> None:
        if step.step_id == 1:
            raise RuntimeError("once")

    live = make_live()
    path = tmp_path / "steps.jsonl"
    header = Header(
        num_blocks=24,
        block_size=4,
        max_model_len=256,
        enable_prefix_caching=True,
        prefill_first=False,
        eos_token_ids=[0],
        seed=0,
        ceilings={"max_num_batched_tokens": 8192, "max_num_seqs": 256},
        live=live.to_json(),
        generation=1,
        source="Spec",
    )
    ours, theirs = socket.socketpair()
    with theirs, StepRecorder(path, header) as recorder:
        loop = EngineLoop(EngineChannel(ours), header.build(), Executor(before=break_once), recorder)
        first = [add("a"), add("b", 30), reconfigure(1, 2, 16)]
        for message in [*first, Abort(["b"]), add("c", 20), reconfigure(2, 3, 24, lease_s=60.0), Drain()]:
            theirs.sendall(frame(msgspec.msgpack.encode(message)))
        assert loop.run([]) == 0
    ours.close()
    entries = list(replay(path))
    assert [e.runner_error is not None for e in entries].count(True) == 1
    assert entries == list(read(path)[1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # killed while writing
    assert list(replay(path)) == entries[:-1]
    path.write_bytes(whole.replace(b'"budget":24', b'"budget":25', 1))
    with pytest.raises(RecordError, match="replays differently"):
        list(replay(path))
