"""Skipping over steady decodes: the scheduler afterwards is the one that single steps would have made, block for block."""

from hypothesis import given
from hypothesis import strategies as st

from support.core_builders import make_live, make_request, make_scheduler
from trimtab_engine.core.request import FinishReason, Request
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.step import StepResult

MAX_MODEL_LEN = 64


def said(request: Request) -> int:
    return 1000 + request.num_prompt_tokens


def one_step(scheduler: Scheduler, now: float) -> None:
    step = scheduler.schedule(now)
    scheduler.commit(step, StepResult([said(step.requests[row]) for row in step.samples]), now)


def picture(scheduler: Scheduler) -> object:
    """Everything that could tell two schedulers apart later: requests with their blocks, the free list, the index."""
    state = scheduler._state
    pool = state.pool
    free = pool.allocate(pool.num_free)  # in the order in which they would be handed out
    return (
        [
            (
                r.id,
                r.token_ids,
                r.num_computed,
                r.block_ids,
                r.block_hashes,
                r.num_published,
                r.num_in_flight,
                r.last_token_s,
            )
            for r in state.running.decodes
        ],
        free,
        scheduler._next_step_id,
        scheduler.stats,
    )


def make(prompts: list[int], outputs: list[int], blocks: int, caching: bool) -> Scheduler:
    """All requests decoding, added in order."""
    scheduler = make_scheduler(
        num_blocks=blocks,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=caching,
        live=make_live(budget=64, seqs=8),
    )
    for number, (prompt, max_tokens) in enumerate(zip(prompts, outputs, strict=False)):
        ids = [7 * number + 1] * prompt
        scheduler.add(make_request(ids, max_tokens, id=f"r{number}"))
    for now in range(1, 4):
        one_step(scheduler, float(now))
    return scheduler


@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    outputs=st.lists(st.integers(3, 40), min_size=5, max_size=5),
    blocks=st.integers(30, 80),
    caching=st.booleans(),
    limit=st.integers(1, 50),
)
def test_a_skip_leaves_what_single_steps_leave(
    prompts: list[int], outputs: list[int], blocks: int, caching: bool, limit: int
) -> None:
    skipped, stepped = (make(prompts, outputs, blocks, caching) for _ in range(2))
    steady = skipped.steady_steps
    ends = [10.0 + n for n in range(min(steady, limit))]
    done = skipped.skip_decodes(said, ends)
    assert done <= len(ends)
    preempted = stepped.stats.preemptions_recompute
    finished: list[FinishReason | None] = []
    for end in ends[:done]:
        step = stepped.schedule(end)
        assert step.num_tokens == step.num_decodes
        events = stepped.commit(step, StepResult([said(r) for r in step.requests]), end)
        finished += [e.request.finish_reason for e in events if e.finished]
    assert finished == []
    assert stepped.stats.preemptions_recompute == preempted
    skipped.check_integrity()
    assert picture(skipped) == picture(stepped)


def test_the_step_in_which_somebody_ends_is_left_to_the_scheduler() -> None:
    scheduler = make([5, 5], [10, 20], 60, True)
    # Three steps are done, so the first request has three of its ten outputs; the tenth must not be skipped over.
    assert scheduler.steady_steps == 6
    scheduler.skip_decodes(said, [10.0] * 6)
    assert scheduler.steady_steps == 0


def test_the_model_length_ends_a_skip_as_max_tokens_does() -> None:
    scheduler = make([20], [44], 60, True)
    assert scheduler.steady_steps == 40
    scheduler = make_scheduler(num_blocks=60, max_model_len=32, live=make_live(budget=64, seqs=8))
    scheduler.add(make_request([1] * 20, None))
    one_step(scheduler, 1.0)
    assert scheduler.steady_steps == 32 - 21 - 1


def test_nothing_is_steady_while_somebody_waits_or_computes_a_prompt() -> None:
    scheduler = make([5], [30], 60, True)
    assert scheduler.steady_steps > 0
    scheduler.add(make_request([2] * 60, 2))
    assert scheduler.steady_steps == 0


def test_a_request_that_a_token_can_end_is_never_skipped_over() -> None:
    scheduler = make_scheduler(num_blocks=60, max_model_len=64, live=make_live(budget=64, seqs=8))
    scheduler.add(make_request([1] * 4, 30, ignore_eos=False))
    one_step(scheduler, 1.0)
    assert scheduler.steady_steps == 0


def test_a_skip_stops_before_the_step_that_lacks_memory() -> None:
    scheduler = make([8, 8], [40, 40], 12, True)
    done = scheduler.skip_decodes(said, [float(n) for n in range(30)])
    assert 0 < done < 30
    before = scheduler.stats.preemptions_recompute
    one_step(scheduler, 100.0)
    assert scheduler.stats.preemptions_recompute == before + 1


def test_decodes_that_must_take_turns_are_not_steady() -> None:
    scheduler = make([5, 5, 5], [30, 30, 30], 60, True)
    assert scheduler.steady_steps > 0
    scheduler.reconfigure(make_live(budget=2, seqs=2), 2)
    assert scheduler.steady_steps == 0


def test_nothing_is_steady_while_a_step_is_in_flight() -> None:
    scheduler = make([5], [30], 60, True)
    scheduler.schedule(10.0)
    assert scheduler.steady_steps == 0


def test_nothing_is_skipped_where_tenants_are_charged_by_token() -> None:
    scheduler = Scheduler(
        num_blocks=60,
        block_size=4,
        max_model_len=MAX_MODEL_LEN,
        live=make_live(budget=64, seqs=8),
        generation=1,
        fair_tenants=True,
    )
    scheduler.add(make_request([1] * 4, 30))
    one_step(scheduler, 1.0)
    assert scheduler.steady_steps == 0
