"""Builders for tests of the scheduling core, and a runner that computes real, checkable "KV".

`HistoryRunner` stands where the model stands. Its KV cell of a token is a digest of the whole history up to that token,
read from the cell before through the block table, as attention reads what earlier steps wrote. A token is derived from
the last cell alone. So any wrong block, premature share, lost or doubled token changes what a request says, and
`undisturbed(...)` says what it should have said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count

from trimtab_engine.core.live import LiveConfig, Slo, SloClass
from trimtab_engine.core.request import Request, SamplingParams
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.step import Step, StepResult, TokenEvent
from trimtab_engine.core.step_time import TERMS, StepTimeModel, features_of

VOCABULARY = 50
EOS = 0

_ids = count()


def make_request(
    prompt: int | Sequence[int] = 8,
    max_tokens: int | None = 4,
    *,
    id: str | None = None,
    arrival_s: float = 0.0,
    priority: int = 0,
    slo_class: str = "default",
    ttft_s: float | None = None,
    itl_s: float | None = None,
    tenant: str | None = None,
    group: str | None = None,
    salt: str | None = None,
    ignore_eos: bool = True,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    seed: int | None = 0,
) -> Request:
    """A request; an integer prompt means that many tokens, unlike those of any other request."""
    number = next(_ids)
    token_ids = (
        [1 + (number * 7919 + i) % 997 for i in range(prompt)] if isinstance(prompt, int) else [*prompt]
    )
    return Request(
        id=f"r{number}" if id is None else id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            prompt_logprobs=prompt_logprobs,
            seed=seed,
        ),
        arrival_s=arrival_s,
        priority=priority,
        slo_class=slo_class,
        ttft_s=ttft_s,
        itl_s=itl_s,
        tenant=tenant,
        group=group,
        cache_salt=salt,
    )


def make_live(
    budget: int = 64,
    seqs: int = 8,
    policy: str = "fcfs",
    *,
    long_prefill: int = 0,
    aging_s: float = 0.0,
    classes: tuple[SloClass, ...] = (SloClass("default", ttft_s=1.0, itl_s=0.1),),
) -> LiveConfig:
    """A live config by short names."""
    return LiveConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        scheduling_policy=policy,
        long_prefill_token_threshold=long_prefill,
        priority_aging_s=aging_s,
        slo=Slo(classes[0].name, classes),
    )


def make_step_time(base_s: float = 0.01, token_s: float = 0.001, attention_s: float = 0.0) -> StepTimeModel:
    """A straight line over tokens (one token takes `base_s`), and attention over prompts."""
    slopes = len(TERMS) - 4
    return StepTimeModel((base_s, *[token_s] * slopes, 0.0, 0.0, attention_s))


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 256,
    live: LiveConfig | None = None,
    prefix_caching: bool = True,
    prefill_first: bool = False,
    shed_late: bool = False,
    fair_tenants: bool = False,
    num_swap_blocks: int = 0,
    swap_block_s: float = 0.0,
    seed: int = 0,
) -> Scheduler:
    """A scheduler with small blocks; token 0 is EOS."""
    return Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        live=make_live() if live is None else live,
        generation=1,
        enable_prefix_caching=prefix_caching,
        prefill_first=prefill_first,
        shed_late=shed_late,
        fair_tenants=fair_tenants,
        num_swap_blocks=num_swap_blocks,
        swap_block_s=swap_block_s,
        eos_token_ids=frozenset({EOS}),
        seed=seed,
    )


def _digest(previous: bytes, token: int, position: int) -> bytes:
    return blake2b(previous + token.to_bytes(8, "big") + position.to_bytes(8, "big"), digest_size=16).digest()


def _token(cell: bytes, seed: int) -> int:
    drawn = blake2b(cell + seed.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(drawn, "big") % VOCABULARY


class HistoryRunner:
    """Executes steps over cells addressed by (block, offset). `fail` names requests whose logits are NaN."""

    def __init__(self, block_size: int, fail: Callable[[Request], bool] = lambda request: False) -> None:
        self._block_size = block_size
        self._cells: dict[tuple[int, int], bytes] = {}
        self._swapped: dict[tuple[int, int], bytes] = {}
        self._fail = fail

    def run(self, step: Step) -> StepResult:
        """Read for all rows what earlier steps wrote, then write for all rows: no row sees another's new KV."""
        size = self._block_size
        self._copy(step)
        writes: dict[tuple[int, int], bytes] = {}
        last: list[bytes] = []
        for request, context, chunk in zip(step.requests, step.context, step.chunk, strict=True):
            blocks = request.block_ids
            cell = b"" if context == 0 else self._cells[blocks[(context - 1) // size], (context - 1) % size]
            for position in range(context, context + chunk):
                cell = _digest(cell, request.token_ids[position], position)
                where = (blocks[position // size], position % size)
                assert where[0] != 0, "the null block is never written"
                assert where not in writes, "two rows write one cell"
                writes[where] = cell
            last.append(cell)
        self._cells.update(writes)
        tokens = [_token(last[row], step.requests[row].sampling.seed or 0) for row in step.samples]
        failed = {row: "NaN logits" for row, request in enumerate(step.requests) if self._fail(request)}
        return StepResult(token_ids=tokens, failed=failed)

    def _copy(self, step: Step) -> None:
        """Swap: all out before anything in, whole blocks; cells never written are not there to be copied."""
        places = [place for _, place in step.swap_out]
        assert len(set(places)) == len(places), "two blocks are copied to one place"
        for source, target, copies in (
            (self._cells, self._swapped, step.swap_out),
            (self._swapped, self._cells, step.swap_in),
        ):
            for old, new in copies:
                for offset in range(self._block_size):
                    target.pop((new, offset), None)
                    if (old, offset) in source:
                        target[new, offset] = source[old, offset]


def undisturbed(prompt: Sequence[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    """The outputs of a request that runs alone, computed without any scheduler."""
    cell = b""
    for position, token in enumerate(prompt):
        cell = _digest(cell, token, position)
    outputs: list[int] = []
    while True:
        token = _token(cell, sampling.seed or 0)
        outputs.append(token)
        length = len(prompt) + len(outputs)
        if len(outputs) >= sampling.min_tokens and (
            (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        ):
            return outputs
        if length >= max_model_len or (
            sampling.max_tokens is not None and len(outputs) >= sampling.max_tokens
        ):
            return outputs
        cell = _digest(cell, token, length - 1)


class Engine:
    """A scheduler and a runner in one loop, with every event kept.

    Its clock ticks once a step, or with `step_time` by what that model says of the step; the scheduler then knows the model.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: HistoryRunner | None = None,
        block_size: int = 4,
        step_time: StepTimeModel | None = None,
    ) -> None:
        self.step_time = step_time
        if step_time is not None:
            scheduler.use_step_time(step_time)
        self.scheduler = scheduler
        self.runner = runner if runner is not None else HistoryRunner(block_size)
        self.now = 0.0
        self.steps: list[Step] = []
        self.events: list[TokenEvent] = []

    def add(self, *requests: Request) -> None:
        """Add requests in order."""
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> Step:
        """One whole step."""
        if self.step_time is None:
            self.now += 1.0
        step = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self.steps.append(step)
        result = self.runner.run(step)
        if self.step_time is not None:
            self.now += self.step_time.predict(features_of(step))
        self.events += self.scheduler.commit(step, result, self.now)
        self.events += self.scheduler.drain_events()
        self.scheduler.check_integrity()
        return step

    def until(self, holds: Callable[[], object], limit: int = 200) -> None:
        """Step, at least once, until the condition holds; more than `limit` steps count as a hang."""
        for _ in range(limit):
            self.step()
            if holds():
                return
        raise AssertionError(f"not reached in {limit} steps: {self.scheduler.stats}")

    def until_preempted(self) -> Step:
        """Step until a step preempted somebody; returns it."""
        self.until(lambda: self.steps[-1].preempted)
        return self.steps[-1]

    def finish(self, limit: int = 2000) -> None:
        """Run until nothing is left; more than `limit` steps count as a hang."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                assert self.scheduler.stats.kv_used_fraction == 0.0
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.scheduler.stats}")


def outputs_of(request: Request) -> list[int]:
    """What the request has said so far."""
    return request.token_ids[request.num_prompt_tokens :]


def assert_as_if_alone(*requests: Request, max_model_len: int = 256) -> None:
    """Every request said exactly what it says when it runs alone."""
    for request in requests:
        want = undisturbed(request.token_ids[: request.num_prompt_tokens], request.sampling, max_model_len)
        assert outputs_of(request) == want, f"{request.id} differs from its undisturbed run"
