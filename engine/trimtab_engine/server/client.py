"""The HTTP process's side of the engine process: starting it, submitting requests, streams of tokens, its death.

Used by the OpenAI routes (`submit`, `TokenStream`), the admin app (`reconfigure`, `end_lease`) and `main` (start, drain).
One event loop, one thread. Knows nothing of HTTP or text; imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from trimtab_engine.core.step_fit import FitScore
from trimtab_engine.errors import Draining, EngineDead, NotReady, QueueFull
from trimtab_engine.framing import FrameError, FrameReader, frame
from trimtab_engine.messages import (
    Abort,
    Add,
    Applied,
    Drain,
    EndLease,
    Fatal,
    FromEngine,
    Init,
    Loading,
    Ready,
    Reconfigure,
    StepModel,
    StepOutput,
    StepStats,
    Stop,
    Stopped,
    ToEngine,
    Token,
)
from trimtab_engine.server.health import Progress
from trimtab_engine.server.lifecycle import Lifecycle, Phase

if TYPE_CHECKING:
    from trimtab_engine.server.metrics.ledger import RequestRecord

logger = logging.getLogger(__name__)

_EXIT_WAIT_S = 2.0  # between end of file and the exit code


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine has told about itself with `Ready`; None-valued until then is `EngineClient.info` itself."""

    model_name: str
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    dtype: str
    load_s: float
    kv_bytes: int
    model_path: str
    enable_prefix_caching: bool
    prefill_first: bool
    shed_late: bool
    fair_tenants: bool
    num_swap_blocks: int
    swap_block_s: float


class TokenStream:
    """Async iterator over the tokens of one request; ends after the one with a finish_reason.

    Raises EngineDead when the engine process dies first. One consumer. Leaving early: call `abort`.
    """

    def __init__(self, request_id: str, record: RequestRecord, client: EngineClient) -> None:
        self.request_id = request_id
        self.record = record
        self.submitted_s = time.monotonic()
        self._client = client
        self._tokens: deque[Token] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False
        self._error: EngineDead | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        await self._wait()
        if not self._tokens:
            raise StopAsyncIteration
        return self._tokens.popleft()

    async def next_batch(self) -> list[Token]:
        """All tokens that are here, at least one; empty at the end. Lets a slow consumer catch up in one chunk."""
        await self._wait()
        tokens = list(self._tokens)
        self._tokens.clear()
        return tokens

    def abort(self) -> None:
        """Stop generating, if it has not finished by itself."""
        self._client.abort(self.request_id)

    async def _wait(self) -> None:
        while not self._tokens and not self._finished:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _push(self, token: Token) -> None:
        self._tokens.append(token)
        self._finished = token.finish_reason is not None
        self._wake()

    def _fail(self, error: EngineDead) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Owns the engine process and its socket. `lifecycle` is shared with the routes and moved by `main` and here."""

    def __init__(
        self,
        *,
        model_name: str,
        lifecycle: Lifecycle,
        max_queued_requests: int,
        stall_timeout_s: float,
        on_token: Callable[[RequestRecord, Token], None],
        on_step: Callable[[StepStats], None],
    ) -> None:
        self.model_name = model_name
        self.lifecycle = lifecycle
        self.progress = Progress(stall_timeout_s)
        self.ready = asyncio.Event()  # Ready has come
        self.dead = asyncio.Event()  # the process has ended, whoever wanted it
        self.fatal: Fatal | None = None
        self.death: EngineDead | None = None
        self.max_num_seqs = 1  # in force, for the queue limit; set by `live.LiveDoor`
        self.on_readback: Callable[[dict[str, object]], None] = lambda readback: None
        self.on_step_model: Callable[[StepModel], None] = lambda news: None
        self.last_stats: StepStats | None = None
        self.step_model = StepModel(None, FitScore(0, 0, None, None).to_json())
        self._info: EngineInfo | None = None
        self._max_queued_requests = max_queued_requests
        self._on_token = on_token
        self._on_step = on_step
        self._streams: dict[str, TokenStream] = {}
        self._answers: dict[int, asyncio.Future[Applied]] = {}
        self._sequence = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded engine; NotReady before that."""
        if self._info is None:
            raise NotReady("the model is still loading", retry_after_s=2)
        return self._info

    @property
    def pid(self) -> int | None:
        """Process id of the engine process."""
        return None if self._process is None else self._process.pid

    @property
    def num_open(self) -> int:
        """Requests submitted and not finished."""
        return len(self._streams)

    async def start(self, init: Init, log_format: str) -> None:
        """Start the engine process and send it `init`; loading goes on in the background."""
        ours, theirs = socket.socketpair()
        with theirs:
            # The main thread must do this: the child's parent-death signal follows the thread that forked it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trimtab_engine.worker", str(theirs.fileno()), log_format],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the whole group of the terminal; the engine must outlive the drain
            )
        ours.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Connection(self), sock=ours
        )
        self._transport = transport
        self.send(init)

    def send(self, message: ToEngine) -> None:
        """Queue one message to the engine; dropped silently when it is dead, which `dead` says."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(self._encoder.encode(message)))

    def check_admission(self, count: int = 1) -> None:
        """Whether `count` more requests are taken now; raises NotReady, Draining, QueueFull or EngineDead.

        Slots are what the engine runs at once: max_num_seqs, or what runs now when more are known to wait (for memory).
        """
        if not self.lifecycle.loaded:
            raise self.death or NotReady("the model is still loading", retry_after_s=2)
        # Before death: a drain ends the engine, and who comes then shall go elsewhere, not see a failure.
        if not self.lifecycle.takes_requests and self.lifecycle.phase is not Phase.DEAD:
            self.lifecycle.refused()
            raise Draining("the server is shutting down; try another replica", retry_after_s=1)
        if self.death is not None:
            raise self.death
        slots = self.max_num_seqs
        if self.last_stats is not None and self.last_stats.num_waiting > 0:
            slots = min(slots, self.last_stats.num_running)
        queued = self.num_open - slots
        if queued + count > self._max_queued_requests:
            raise QueueFull(
                f"{max(queued, 0)} requests are waiting; --max-queued-requests is {self._max_queued_requests}",
                retry_after_s=1,
            )

    def submit(self, add: Add, *, record: RequestRecord) -> TokenStream:
        """Hand a request to the engine. Raises what `check_admission` raises."""
        self.check_admission()
        stream = TokenStream(add.id, record, self)
        self.send(add)  # first: what cannot be encoded must leave nothing open
        self._streams[add.id] = stream
        self._idle.clear()
        self.progress.owes(stream.submitted_s)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request wherever it stands; its stream ends with finish_reason "abort". Idempotent."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        self.send(Abort([request_id]))
        stream._push(Token(request_id, None, "abort"))
        self._note_idle()

    async def reconfigure(
        self, *, generation: int, source: str, config: dict[str, object], lease_s: float | None
    ) -> Applied:
        """Send a live config and wait for the answer; EngineDead when it never comes."""
        sequence = self._next_sequence()
        return await self._ask(sequence, Reconfigure(sequence, generation, source, config, lease_s))

    async def end_lease(self) -> Applied:
        """End the candidate, if there is one, and wait for the answer."""
        sequence = self._next_sequence()
        return await self._ask(sequence, EndLease(sequence))

    async def wait_idle(self) -> None:
        """Return once no submitted request is open."""
        await self._idle.wait()

    async def stop(self, grace_s: float) -> None:
        """End the engine process: politely when idle, else as aborts; killed after `grace_s`."""
        self._stopping = True
        self.send(Drain() if not self._streams else Stop())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.dead.wait(), grace_s)
        self.kill()

    def kill(self) -> None:
        """End the engine process now, whatever it does."""
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def fail_open(self, reason: str) -> None:
        """End every open stream with EngineDead: the drain limit has passed, or the engine is gone."""
        error = EngineDead(reason)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self.send(Abort([stream.request_id]))
            stream._fail(error)
        self._note_idle()

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    async def _ask(self, sequence: int, message: Reconfigure | EndLease) -> Applied:
        if self.death is not None:
            raise self.death
        answer: asyncio.Future[Applied] = asyncio.get_running_loop().create_future()
        self._answers[sequence] = answer
        if self.lifecycle.loaded:
            self.progress.owes(time.monotonic())
        self.send(message)
        return await answer

    def _owed(self) -> bool:
        """Whether the engine has something to do: requests (its own count knows aborted ones too) or a question."""
        stats = self.last_stats
        busy = stats is not None and stats.num_running + stats.num_waiting > 0
        return busy or bool(self._streams or self._answers)

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    def _receive(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._handle(self._decoder.decode(payload))
        except (FrameError, msgspec.DecodeError, msgspec.ValidationError) as error:
            self.fatal = Fatal("internal", f"the engine process sent what cannot be read: {error}")
            if self._transport is not None:
                self._transport.abort()

    def _handle(self, message: FromEngine) -> None:
        now = time.monotonic()
        match message:
            case StepOutput(tokens=tokens, stats=stats):
                self._step(tokens, stats)
            case StepModel():
                self.step_model = message
                self.on_step_model(message)
            case Applied(sequence=sequence, readback=readback):
                self.on_readback(readback)
                answer = self._answers.pop(sequence, None) if sequence is not None else None
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Loading(stage=stage):
                if stage != self.lifecycle.stage:
                    logger.info("loading", extra={"stage": stage})  # a minute of silence looks like a hang
                self.lifecycle.progress(stage, message.fraction, message.total_bytes, message.waiting_for)
            case Ready():
                self._info = EngineInfo(
                    model_name=self.model_name,
                    **{name: getattr(message, name) for name in message.__struct_fields__},
                )
                self.ready.set()
            case Fatal():
                self.fatal = message
            case Stopped():
                self._stopping = True
        self.progress.heard(now, self.lifecycle.loaded and self._owed())

    def _step(self, tokens: list[Token], stats: StepStats) -> None:
        self.last_stats = stats
        for token in tokens:
            stream = self._streams.get(token.id)
            if stream is None:
                continue  # aborted here; the engine had it in flight
            self._on_token(stream.record, token)
            if token.finish_reason is not None:
                del self._streams[token.id]
            stream._push(token)
        self._on_step(stats)
        self._note_idle()

    def _lost(self) -> None:
        task = asyncio.get_running_loop().create_task(self._note_death())
        self._tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._tasks.discard)

    async def _note_death(self) -> None:
        assert self._process is not None, "a connection exists only after the process"
        deadline_s = time.monotonic() + _EXIT_WAIT_S
        while (code := self._process.poll()) is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        if code is None:
            self._process.kill()  # it closed its socket and hangs: of no use to anyone
            self._process.wait()
        reason = self._reason(code)
        self.death = EngineDead(reason)
        if not self._stopping:
            self.lifecycle.advance(Phase.DEAD, reason)
        self.fail_open(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self.death)
                answer.exception()  # whoever stopped waiting need not fetch it
        self._answers.clear()
        self.dead.set()

    def _reason(self, code: int | None) -> str:
        if self.fatal is not None:
            return self.fatal.reason
        if code is None:
            return "the engine process closed its socket and did not exit"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the engine process was ended by signal {signal.Signals(-code).name}"
            return f"the engine process was ended by signal {-code}"
        return f"the engine process ended with exit code {code}"


class _Connection(asyncio.Protocol):
    """Hands bytes and end of file to the client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client._lost()
