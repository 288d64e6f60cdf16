"""The step-time model: its formula, its inverse, its JSON, and learning it from noisy steps."""

import math
from itertools import pairwise
from random import Random
from statistics import median, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.core_builders import Engine, make_live, make_request, make_scheduler
from trimtab_engine.core.nnls import nonnegative_least_squares
from trimtab_engine.core.step_fit import StepTimeFit, is_disturbed
from trimtab_engine.core.step_time import (
    KNOTS,
    TERMS,
    StepFeatures,
    StepTimeModel,
    basis,
    features_of,
)
from trimtab_engine.errors import ConfigError

# A CPU-like engine: a floor, costly first tokens, cheaper ones in a batch; attention over context and over the chunk.
TRUE = StepTimeModel((0.02, 4e-3, 4e-3, 2e-3, 2e-3, 2e-3, 1e-3, 8e-4, 9e-4, 9e-4, 2e-4, 2e-7, 3e-8))


def random_features(random: Random) -> StepFeatures:
    """A step of a mixed load: some decodes, and in half of the steps prompt chunks."""
    decodes = random.randrange(0, 64)
    context = sum(random.randrange(10, 2000) for _ in range(decodes))
    tokens, sequences, attention = decodes, decodes, 0.0
    for _ in range(random.randrange(1, 3) if random.random() < 0.5 or not decodes else 0):
        chunk, before = int(2 ** random.uniform(0, 11)), random.choice([0, random.randrange(8000)])
        tokens, sequences = tokens + chunk, sequences + 1
        attention += chunk * (before + chunk / 2)
    return StepFeatures(tokens, sequences, context, attention)


def learnt(fit: StepTimeFit, random: Random, steps: int, noise: float = 0.02) -> StepTimeModel:
    for _ in range(steps):
        features = random_features(random)
        fit.observe(features, TRUE.predict(features) * random.gauss(1.0, noise), disturbed=False)
    assert fit.model is not None
    return fit.model


def errors(model: StepTimeModel, random: Random, true: StepTimeModel = TRUE) -> list[float]:
    steps = [random_features(random) for _ in range(500)]
    return [abs(model.predict(f) / true.predict(f) - 1) for f in steps]


def test_features_of_a_step_count_decode_context_and_the_quadratic_term_of_each_chunk() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=10)))
    engine.add(make_request(6, 4))
    engine.step()
    engine.add(make_request(20, 4))
    step = engine.step()  # one decode after 6 tokens, and the first 9 of 20
    assert features_of(step) == StepFeatures(10, 2, 6, 9 * 4.5)
    step = engine.step()
    assert features_of(step) == StepFeatures(10, 2, 7, 9 * (9 + 4.5))


@given(
    tokens=st.integers(1, 20_000),
    sequences=st.integers(1, 300),
    context=st.integers(0, 10**6),
    attention=st.floats(0, 1e8),
    coefficients=st.lists(st.floats(0, 1), min_size=len(TERMS), max_size=len(TERMS)),
)
def test_the_prediction_is_the_product_of_basis_and_coefficients(
    tokens: int, sequences: int, context: int, attention: float, coefficients: list[float]
) -> None:
    features = StepFeatures(tokens, sequences, context, attention)
    want = sum(c * x for c, x in zip(coefficients, basis(features), strict=True))
    assert StepTimeModel(tuple(coefficients)).predict(features) == pytest.approx(want)


def test_the_token_term_passes_through_its_knots_and_goes_on_beyond_the_last() -> None:
    model = StepTimeModel((1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.125, 0.0, 2.0, 0.0, 0.0, 0.0))
    at = [model.predict(StepFeatures(n, 1, 0, 0.0)) for n in (*KNOTS, 8192)]
    assert at == [1, 2, 4, 5, 6, 10, 22, 46, 46, 6190, 14382]
    assert all(before <= after for before, after in pairwise(at))


@given(
    need=st.integers(1, 5000),
    context=st.integers(0, 5000),
    limit=st.floats(0.0, 2.0),
    decodes=st.integers(0, 64),
)
def test_the_largest_chunk_fits_and_one_token_more_does_not(
    need: int, context: int, limit: float, decodes: int
) -> None:
    model = StepTimeModel(TRUE.coefficients, error_high=0.1)
    rows = StepFeatures(decodes, decodes, decodes * 300, 0.0)

    def seconds(chunk: int) -> float:
        return 1.1 * TRUE.predict(
            StepFeatures(decodes + chunk, decodes + 1, decodes * 300, chunk * (context + chunk / 2))
        )

    chunk = model.largest_chunk(rows, context, need, limit)
    assert 0 <= chunk <= need
    assert chunk == 0 or seconds(chunk) <= limit * (1 + 1e-9)
    assert chunk == need or seconds(chunk + 1) > limit * (1 - 1e-9)


def test_the_time_of_a_prompt_is_the_sum_of_its_steps() -> None:
    def by_steps(tokens: int, context: int, chunk: int) -> float:
        total = 0.0
        while tokens:
            now = min(chunk, tokens)
            total += TRUE.predict(StepFeatures(now, 1, 0, now * (context + now / 2)))
            context, tokens = context + now, tokens - now
        return total

    for tokens, context, chunk in ((1, 0, 64), (64, 0, 64), (1000, 500, 64), (3000, 0, 4096)):
        assert TRUE.prefill_s(tokens, context, chunk) == pytest.approx(by_steps(tokens, context, chunk))


@given(st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), min_size=5, max_size=9), st.data())
def test_nonnegative_least_squares_meets_its_optimality_conditions(
    rows: list[list[float]], data: st.DataObject
) -> None:
    y = data.draw(st.lists(st.floats(-3, 3), min_size=len(rows), max_size=len(rows)))
    start = data.draw(st.sets(st.integers(0, 3)))
    a = [[sum(r[i] * r[j] for r in rows) for j in range(4)] for i in range(4)]
    b = [sum(r[i] * t for r, t in zip(rows, y, strict=True)) for i in range(4)]
    x = nonnegative_least_squares(a, b, start)
    assert all(value >= 0 for value in x)

    def loss(point: list[float]) -> float:
        return sum((sum(r[i] * point[i] for i in range(4)) - t) ** 2 for r, t in zip(rows, y, strict=True))

    reached = loss(x)
    for i in range(
        4
    ):  # convex: no better neighbour along any axis is what optimality means up to collinearity
        for change in (-1e-3, 1e-3):
            neighbour = [max(0.0, v + change) if k == i else v for k, v in enumerate(x)]
            assert loss(neighbour) >= reached - 1e-5


def test_it_learns_the_formula_from_noisy_steps_quadratic_term_included() -> None:
    random = Random(1)
    model = learnt(StepTimeFit(), random, 3000)
    assert all(c >= 0 for c in model.coefficients)
    wrong = errors(model, random)
    print(f"held-out error: max {max(wrong):.3f}, mean {sum(wrong) / len(wrong):.4f}")
    assert median(wrong) <= 0.01
    assert quantiles(wrong, n=20)[-1] <= 0.03
    assert model.coefficients[-1] == pytest.approx(TRUE.coefficients[-1], rel=0.1)
    # A chunk of 2,048 after 8,000 costs more than one at the start, by the attention alone.
    late, early = (StepFeatures(2048, 1, 0, 2048 * (c + 1024)) for c in (8000, 0))
    assert model.predict(late) - model.predict(early) == pytest.approx(2048 * 8000 * 3e-8, rel=0.15)


def test_nine_of_ten_steps_lie_within_the_interval() -> None:
    random = Random(2)
    model = learnt(StepTimeFit(), random, 2000, noise=0.05)
    inside = 0
    for _ in range(1000):
        features = random_features(random)
        low, high = model.interval(features)
        inside += low <= TRUE.predict(features) * random.gauss(1.0, 0.05) <= high
    assert 850 <= inside <= 950


def test_the_interval_widens_beyond_the_largest_step_that_ran() -> None:
    model = StepTimeModel(TRUE.coefficients, -0.1, 0.1, largest_tokens=256)
    inside, beyond = StepFeatures(256, 1, 0, 0.0), StepFeatures(1024, 1, 0, 0.0)
    assert model.interval(inside)[1] == pytest.approx(TRUE.predict(inside) * 1.1)
    assert model.interval(beyond)[1] == pytest.approx(TRUE.predict(beyond) * 1.1 * 4)
    assert model.interval(beyond)[0] == pytest.approx(TRUE.predict(beyond) * 0.9 / 4)


def test_disturbed_steps_are_left_out_of_fit_and_score_and_counted() -> None:
    clean, disturbed = StepTimeFit(), StepTimeFit()
    random = Random(3)
    for _ in range(400):
        features = random_features(random)
        seconds = TRUE.predict(features)
        clean.observe(features, seconds, disturbed=False)
        disturbed.observe(features, seconds, disturbed=False)
        disturbed.observe(features, 50 * seconds, disturbed=True)
    assert clean.model is not None
    assert disturbed.model == clean.model
    assert (disturbed.score.error_median, disturbed.score.num_steps) == (clean.score.error_median, 400)
    assert (disturbed.score.num_excluded, disturbed.score.excluded_share) == (400, 0.5)
    assert not disturbed.observe(StepFeatures(9, 9, 9, 0.0), 5.0, disturbed=True)


def test_a_step_is_disturbed_by_the_share_of_its_time_that_it_waited() -> None:
    assert not is_disturbed(0.5, 0.0)
    assert not is_disturbed(0.5, 0.009)  # a kernel thread came by
    assert is_disturbed(0.5, 0.011)


def test_where_hardly_a_step_is_undisturbed_a_model_of_all_steps_stands_in_until_there_are_enough() -> None:
    fit, random = StepTimeFit(), Random(10)
    for _ in range(200):
        features = random_features(random)
        fit.observe(features, 2 * TRUE.predict(features), disturbed=True)
    decode = StepFeatures(8, 8, 2000, 0.0)
    assert fit.model is not None
    assert fit.model.predict(decode) == pytest.approx(2 * TRUE.predict(decode), rel=0.05)
    score = fit.score
    assert (score.provisional, score.num_steps, score.excluded_share, score.error_median) == (
        True,
        0,
        1.0,
        None,
    )
    for number in range(64):
        features = random_features(random)
        new = fit.observe(features, TRUE.predict(features), disturbed=False)
        assert fit.score.provisional == (number < 63)
    assert new
    assert fit.model.predict(decode) == pytest.approx(TRUE.predict(decode), rel=0.05)


def test_one_step_in_twenty_ten_times_too_slow_does_not_move_the_model() -> None:
    random = Random(4)
    fit = StepTimeFit()
    learnt(fit, random, 600)
    for _ in range(2000):
        features = random_features(random)
        slow = 10.0 if random.random() < 0.05 else random.gauss(1.0, 0.02)
        fit.observe(features, TRUE.predict(features) * slow, disturbed=False)
    assert fit.model is not None
    assert median(errors(fit.model, random)) <= 0.03


def test_many_steps_of_one_kind_do_not_wash_out_what_another_kind_costs() -> None:
    random = Random(5)
    fit = StepTimeFit()
    learnt(fit, random, 1500)
    for _ in range(5000):
        decodes = StepFeatures(8, 8, 2000, 0.0)
        fit.observe(decodes, TRUE.predict(decodes) * random.gauss(1.0, 0.02), disturbed=False)
    assert fit.model is not None
    long = StepFeatures(2048, 1, 0, 2048 * (4000 + 1024))
    assert fit.model.predict(long) == pytest.approx(TRUE.predict(long), rel=0.05)


def test_one_step_in_ten_a_third_too_slow_moves_the_model_by_less_than_a_percent() -> None:
    """Errors beyond the usual count in proportion only; by their squares these would move it by four percent."""
    random, fit = Random(12), StepTimeFit()
    decodes = StepFeatures(8, 8, 2000, 0.0)
    for number in range(2000):
        slow = 1.4 if number % 10 == 9 else random.gauss(1.0, 0.01)
        fit.observe(decodes, TRUE.predict(decodes) * slow, disturbed=False)
    assert fit.model is not None
    assert fit.model.predict(decodes) == pytest.approx(TRUE.predict(decodes), rel=0.01)


def test_the_first_steps_of_a_kind_do_not_outweigh_those_that_follow() -> None:
    """Nothing is known of prompts, so they seem to take next to no time: by that their weight would be a hundred times too large."""
    random, fit = Random(15), StepTimeFit()
    for _ in range(300):
        decodes = StepFeatures(8, 8, random.randrange(1500, 2500), 0.0)
        fit.observe(decodes, TRUE.predict(decodes) * random.gauss(1.0, 0.02), disturbed=False)
    prompt = StepFeatures(1000, 1, 0, 1000 * 500.0)
    for number in range(120):
        cold = 3.0 if number < 8 else random.gauss(1.0, 0.02)
        fit.observe(prompt, TRUE.predict(prompt) * cold, disturbed=False)
    assert fit.model is not None
    assert fit.model.predict(prompt) == pytest.approx(TRUE.predict(prompt), rel=0.25)


def test_an_hour_of_decodes_leaves_what_was_learnt_of_prompts() -> None:
    """Each kind of step forgets by its own steps: by all steps, 20,000 decodes would leave nothing of the prompts."""
    random, fit = Random(13), StepTimeFit()
    learnt(fit, random, 1500)
    for _ in range(20_000):
        decodes = StepFeatures(8, 8, random.randrange(1500, 2500), 0.0)
        fit.observe(decodes, TRUE.predict(decodes) * random.gauss(1.0, 0.02), disturbed=False)
    assert fit.model is not None
    long = StepFeatures(2048, 1, 0, 2048 * (4000 + 1024))
    assert fit.model.predict(long) == pytest.approx(TRUE.predict(long), rel=0.05)


def test_it_follows_an_engine_that_became_slower() -> None:
    random = Random(6)
    fit = StepTimeFit()
    learnt(fit, random, 1500)
    for _ in range(6000):
        features = random_features(random)
        fit.observe(features, 1.5 * TRUE.predict(features) * random.gauss(1.0, 0.02), disturbed=False)
    assert fit.model is not None
    slower = StepTimeModel(tuple(1.5 * c for c in TRUE.coefficients))
    assert median(errors(fit.model, random, slower)) <= 0.02


def test_where_no_step_has_been_time_goes_on_rising() -> None:
    fit = StepTimeFit()
    random = Random(7)
    for _ in range(300):
        chunk = random.randrange(1, 200)
        features = StepFeatures(chunk, 1, 0, chunk * chunk / 2)
        fit.observe(features, 0.01 + 1e-3 * chunk, disturbed=False)
    assert fit.model is not None
    assert fit.model.predict(StepFeatures(2000, 1, 0, 2e6)) >= 1.5
    assert fit.model.largest_tokens <= 200


def test_a_saved_model_stands_in_until_enough_steps_have_been_learnt_from() -> None:
    saved, random = StepTimeModel(tuple(3 * c for c in TRUE.coefficients)), Random(14)
    fit = StepTimeFit(saved)
    assert fit.model == saved
    for number in range(64):
        features = random_features(random)
        new = fit.observe(features, TRUE.predict(features), disturbed=False)
        assert (fit.model == saved) == (number < 63) == (not new)
    decode = StepFeatures(8, 8, 2000, 0.0)
    assert fit.model is not None
    assert fit.model.predict(decode) == pytest.approx(TRUE.predict(decode), rel=0.05)


def test_a_new_model_comes_at_once_in_the_beginning_and_every_sixteen_steps_later() -> None:
    fit, random = StepTimeFit(), Random(8)
    news = []
    for _ in range(48):
        features = random_features(random)
        news.append(fit.observe(features, TRUE.predict(features), disturbed=False))
    assert [number for number, new in enumerate(news, start=1) if new] == [*range(4, 16), 16, 32, 48]


def test_a_model_survives_json_exactly() -> None:
    model = learnt(StepTimeFit(), Random(9), 100)
    assert StepTimeModel.from_json(model.to_json()) == model
    assert StepTimeModel.from_json(TRUE.to_json()) == TRUE
    assert StepTimeModel.from_json({"model": TRUE.to_json(), "score": {}}) == TRUE
    assert math.isinf(StepTimeModel.from_json(TRUE.to_json()).largest_tokens)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"format": 2}, "step_model.format"),
        ({"knots": [1, 2]}, "step_model.knots"),
        ({"coefficients": 3}, "step_model.coefficients"),
        ({"coefficients": {"base": -1}}, "step_model.coefficients.base"),
        ({"coefficients": {"speed": 1}}, "step_model.coefficients.speed"),
        ({"error_high": float("nan")}, "step_model.error_high"),
        ({"largest_tokens": 0}, "step_model.largest_tokens"),
        ({"coefficients": None}, "step_model.coefficients"),
    ],
)
def test_a_wrong_model_file_is_refused_with_the_path(change: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StepTimeModel.from_json({**TRUE.to_json(), **change})
    assert refused.value.path == path
