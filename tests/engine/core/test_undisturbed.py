"""Whatever happens between two steps, nobody says anything else: swaps, recomputations, policies, budgets, lapsing leases."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from support.core_builders import (
    HistoryRunner,
    assert_as_if_alone,
    make_live,
    make_request,
    make_scheduler,
)
from support.disturbance import Disturber
from trimtab_engine.core.live import POLICIES, LiveConfig, SloClass
from trimtab_engine.core.request import Request

MAX_MODEL_LEN = 64
SHARED = list(range(1, 30))
# (config, lease in steps or None for a new incumbent, which running request is thrown out or None, to CPU memory or not)
Disturbance = tuple[LiveConfig, float | None, int | None, bool]

lives = st.builds(
    lambda budget, seqs, policy, long_prefill, aging_s, ttft_s: make_live(
        budget,
        min(seqs, budget),
        policy,
        long_prefill=long_prefill,
        aging_s=aging_s,
        classes=(SloClass("default", ttft_s, 0.5), SloClass("b", 30.0, 9.0)),
    ),
    budget=st.integers(1, 24),
    seqs=st.integers(1, 6),
    policy=st.sampled_from(POLICIES),
    long_prefill=st.sampled_from([0, 0, 3]),
    aging_s=st.sampled_from([0.0, 2.0]),
    ttft_s=st.sampled_from([1.0, 6.0]),
)
disturbances = st.lists(
    st.tuples(
        lives,
        st.sampled_from([None, 0.5, 0.5, 1.5, 3.5]),
        st.one_of(st.none(), st.integers(0, 9)),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)
requests = st.builds(
    lambda head, tail, max_tokens, priority, seed, slo_class: make_request(
        [*SHARED[:head], *tail],
        max_tokens,
        priority=priority,
        seed=seed,
        slo_class=slo_class,
        tenant=slo_class,
    ),
    head=st.integers(0, 24),
    tail=st.lists(st.integers(40, 45), min_size=1, max_size=6),
    max_tokens=st.integers(1, 20),
    priority=st.integers(-1, 2),
    seed=st.sampled_from([None, 0, 7]),  # drawn, greedy as good as, and seeded
    slo_class=st.sampled_from(["default", "b"]),
)


def run_disturbed(
    batch: list[Request],
    script: list[Disturbance],
    *,
    num_blocks: int,
    num_swap_blocks: int,
    prefix_caching: bool,
    fair_tenants: bool = False,
) -> Disturber:
    """Run to the end with one disturbance before every step, over and over.

    From the second round on only those are thrown out whose KV finds room in CPU memory, so that everybody gets on.
    """
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        live=script[0][0],
        prefix_caching=prefix_caching,
        fair_tenants=fair_tenants,
        num_swap_blocks=num_swap_blocks,
    )
    runner, disturber = HistoryRunner(4), Disturber(scheduler)
    for request in batch:
        scheduler.add(request)
    for number in range(3000):
        if not scheduler.has_work:
            break
        now = float(number)
        live, lease_s, victim, swap = script[number % len(script)]
        disturber.lapse(now)
        disturber.push(live, lease_s, now)
        if victim is not None and (number < len(script) or number % 3 == 0):
            disturber.throw_out(victim, swap, gently=number >= len(script))
        step = scheduler.schedule(now)
        scheduler.commit(step, runner.run(step), now)
        scheduler.drain_events()
        scheduler.check_integrity()
    assert not scheduler.has_work, f"somebody never finished: {scheduler.stats}"
    return disturber


@given(
    batch=st.lists(requests, min_size=1, max_size=8),
    script=disturbances,
    num_blocks=st.integers(16, 24),
    num_swap_blocks=st.sampled_from([0, 6, 60]),
    prefix_caching=st.booleans(),
    fair_tenants=st.booleans(),
)
@settings(max_examples=120)
def test_a_disturbance_before_every_step_changes_no_output(
    batch: list[Request],
    script: list[Disturbance],
    num_blocks: int,
    num_swap_blocks: int,
    prefix_caching: bool,
    fair_tenants: bool,
) -> None:
    run_disturbed(
        batch,
        script,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        prefix_caching=prefix_caching,
        fair_tenants=fair_tenants,
    )
    assert_as_if_alone(*batch, max_model_len=MAX_MODEL_LEN)


def test_every_kind_of_disturbance_happens_in_one_run() -> None:
    random = Random(3)
    batch = [make_request(6 + 3 * n, 16, seed=n % 3, priority=n % 2) for n in range(8)]
    script: list[Disturbance] = [
        (
            make_live(random.randrange(4, 24), random.randrange(1, 5), random.choice(POLICIES)),
            random.choice([None, 0.5, 1.5]),
            random.randrange(9),
            number % 2 == 0,
        )
        for number in range(40)
    ]
    disturber = run_disturbed(batch, script, num_blocks=20, num_swap_blocks=40, prefix_caching=True)
    assert_as_if_alone(*batch, max_model_len=MAX_MODEL_LEN)
    assert disturber.num_lapsed >= 10
    assert disturber.num_swapped >= 10
    assert disturber.num_recomputed >= 10
