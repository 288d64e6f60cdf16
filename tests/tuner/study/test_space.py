"""Grids, bounds and first points."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.study import SLO, make_config, make_reading
from trimtab_engine.core.live import Ceilings
from trimtab_tuner import score as scores
from trimtab_tuner import space, steptime
from trimtab_tuner.errors import InputError
from trimtab_tuner.study import Study


@given(st.integers(1, 300), st.integers(1, 20000), st.sampled_from([1, 16, 64]))
def test_a_grid_stays_in_bounds_on_multiples_and_has_no_wide_hole(low: int, span: int, multiple: int) -> None:
    assume(low + span >= 2 * multiple)
    grid = space.log_grid(max(low, multiple), max(low, multiple) + span, multiple=multiple)
    assert all(low <= value <= max(low, multiple) + span for value in grid)
    assert all(value % multiple == 0 for value in grid) or len(grid) == 1
    assert list(grid) == sorted(set(grid))


def test_the_default_space_is_the_budget_and_the_policy() -> None:
    knobs = space.build(make_config(), Ceilings(8192, 256))
    assert [k.name for k in knobs] == ["max_num_batched_tokens", "scheduling_policy"]
    budget = knobs[0]
    assert budget.choices[0] == 64  # every decode of max_num_seqs must fit
    assert budget.choices[-1] == 8192
    assert 2048 in budget.choices
    assert all(isinstance(b, int) and b % 16 == 0 for b in budget.choices)
    assert knobs[1].choices == ("fcfs", "priority", "sla-aware")


def test_a_start_value_off_the_grid_is_still_a_choice() -> None:
    knobs = space.build(make_config(max_num_batched_tokens=1000), Ceilings(8192, 256))
    assert 1000 in knobs[0].choices


def test_bounds_of_a_person_and_ceilings_are_never_left() -> None:
    knobs = space.build(
        make_config(), Ceilings(4096, 256), bounds={"max_num_batched_tokens": (256, 2048)}, tile=64
    )
    assert min(v for v in knobs[0].choices if isinstance(v, int)) >= 256
    assert max(v for v in knobs[0].choices if isinstance(v, int)) <= 2048
    with pytest.raises(InputError, match="within 0:4096"):
        space.build(make_config(), Ceilings(4096, 256), bounds={"max_num_batched_tokens": (256, 8192)})


def test_optional_knobs_have_choices_that_the_engine_takes() -> None:
    start = make_config()
    knobs = space.build(start, Ceilings(8192, 256), knobs=("max_num_seqs", "long_prefill_token_threshold"))
    for knob in knobs:
        for value in knob.choices:
            config = space.apply(start, {knob.name: value, "max_num_batched_tokens": 8192})
            assert space.valid(config, Ceilings(8192, 256))
    assert knobs[1].choices[-1] == 0  # off is the loosest limit


@pytest.mark.parametrize(
    ("knobs", "bounds", "message"),
    [
        (("temperature",), {}, "temperature"),
        (("scheduling_policy",), {"max_num_seqs": (1, 2)}, "max_num_seqs"),
        ((), {}, "at least one knob"),
    ],
)
def test_a_wrong_space_is_refused_by_name(
    knobs: tuple[str, ...], bounds: dict[str, tuple[int, int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        space.build(make_config(), Ceilings(), knobs=knobs, bounds=bounds)


def test_the_budget_is_never_proposed_below_the_number_of_sequences() -> None:
    assert not space.valid(make_config(max_num_seqs=64, max_num_batched_tokens=32), Ceilings())
    assert not space.valid(make_config(max_num_batched_tokens=9000), Ceilings())


@given(
    st.floats(0.005, 0.2),
    st.floats(1e-5, 5e-3),
    st.integers(20, 500),
    st.integers(3, 200),
    st.integers(100, 9000),
)
def test_the_step_time_estimate_recovers_a_linear_engine(
    decode_s: float, per_token_s: float, decodes: int, mixed: int, tokens: int
) -> None:
    reading = make_reading(
        steps={
            "decode": (float(decodes), decodes * decode_s),
            "mixed": (float(mixed), mixed * decode_s + tokens * per_token_s),
        },
        prompt_tokens_computed=float(tokens),
    )
    found = steptime.estimate(reading)
    assert found is not None
    assert found.at(512) == pytest.approx(decode_s + 512 * per_token_s, rel=1e-6)


def test_too_few_steps_give_no_estimate() -> None:
    few = make_reading(steps={"decode": (5.0, 0.1), "mixed": (50.0, 9.0)}, prompt_tokens_computed=900.0)
    assert steptime.estimate(few) is None
    assert steptime.estimate(make_reading()) is None


def test_first_points_stand_just_below_the_cliff_and_at_half_of_it() -> None:
    model = steptime.StepTime(decode_s=0.03, per_token_s=0.001, decode_steps=99, mixed_steps=99)
    grid = (64, 96, 128, 192, 256, 512)
    assert steptime.first_points(model, limit_s=0.23, grid=grid) == (192, 96)
    # No budget keeps it: nothing to propose.
    assert steptime.first_points(model, limit_s=0.01, grid=grid) == ()


def test_a_score_counts_violated_verdicts_and_tells_each_target_apart() -> None:
    found = scores.score(make_reading(n=100, violated_ttft=0, violated_itl=7), SLO)
    assert found.objective == pytest.approx(0.07)
    assert found.constraints["itl:default"] == pytest.approx(0.06)
    assert found.constraints["ttft:default"] == pytest.approx(-0.01)
    assert not found.feasible
    assert scores.score(make_reading(n=200, violated_itl=1), SLO).feasible
    assert not scores.score(make_reading(n=200), SLO, step_time_ratio=1.3).feasible
    assert scores.broken("stopped").objective > 2.0


def test_a_start_outside_its_own_bounds_is_searched_from_the_nearest_point() -> None:
    start = make_config(max_num_batched_tokens=4096, max_num_seqs=200)
    knobs = space.build(
        start,
        Ceilings(),
        knobs=("max_num_batched_tokens", "scheduling_policy", "max_num_seqs"),
        bounds={"max_num_batched_tokens": (256, 1024), "max_num_seqs": (1, 64)},
    )
    assert space.nearest(start, knobs) == {
        "max_num_batched_tokens": 1024,
        "scheduling_policy": start.scheduling_policy,
        "max_num_seqs": 64,
    }
    assert (
        space.nearest(make_config(max_num_batched_tokens=256, max_num_seqs=16), knobs)[
            "max_num_batched_tokens"
        ]
        == 256
    )
    study = Study(knobs, seed=0)
    study.tell_start(space.values_of(start, knobs), scores.Score(0.5, {}))  # no point of this space
    assert study.measured == 0
    study.enqueue([space.nearest(start, knobs)], "test")
    proposal = study.ask(lambda _: {})
    assert proposal is not None
    assert proposal.values == space.nearest(start, knobs)
