"""The sampler: distributions, filters, penalties, seeds, log-probabilities, broken rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab_engine.core.request import Request, SamplingParams
from trimtab_engine.runtime import sampler
from trimtab_engine.runtime.sampler import SampleRow, sample, token_logprobs, uniform

NO_EOS: frozenset[int] = frozenset()
# Six tokens with probabilities that fall apart cleanly: no two alike, sums far from the thresholds used below.
PROBABILITIES = np.array([0.05, 0.40, 0.02, 0.25, 0.18, 0.10])
LOGITS = torch.from_numpy(np.log(PROBABILITIES)).float()
DRAWS = 4000


def row(
    sampling: SamplingParams, *, prompt: list[int] | None = None, outputs: int | list[int] = 0
) -> SampleRow:
    prompt = [0] if prompt is None else prompt
    said = outputs if isinstance(outputs, list) else [0] * outputs
    return SampleRow(sampling, prompt + said, len(prompt), sampling.seed or 0)


def draw_many(logits: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    """Frequencies over `DRAWS` output positions of one request; drawn in batches, as an engine would."""
    counts = np.zeros(logits.shape[0])
    for start in range(0, DRAWS, 500):
        rows = [row(sampling, outputs=position) for position in range(start, start + 500)]
        for token in sample(logits.expand(len(rows), -1), rows, NO_EOS).token_ids:
            counts[token] += 1
    return counts


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    assert counts[expected == 0].sum() == 0, "a token that was filtered out was drawn"
    kept = expected > 0
    want = expected[kept] / expected[kept].sum() * counts.sum()
    return float(((counts[kept] - want) ** 2 / want).sum())


# Right side: what may be drawn, in proportion. 99.9 % quantiles of chi-square with 1 … 5 degrees of freedom.
CHI_SQUARE_LIMITS = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
CASES = {
    "as it is": (SamplingParams(), PROBABILITIES),
    "temperature 0.5 squares": (SamplingParams(temperature=0.5), PROBABILITIES**2),
    "temperature 2 takes roots": (SamplingParams(temperature=2.0), PROBABILITIES**0.5),
    "top-k keeps the three best": (
        SamplingParams(top_k=3),
        np.where(PROBABILITIES >= 0.18, PROBABILITIES, 0),
    ),
    # 0.40 + 0.25 + 0.18 = 0.83 reaches 0.80; the token that crosses the line is kept.
    "top-p keeps until the mass is reached": (
        SamplingParams(top_p=0.8),
        np.where(PROBABILITIES >= 0.18, PROBABILITIES, 0),
    ),
    # Within the two best, 0.40 of 0.65 is 0.62 of the mass: top-p counts after top-k.
    "top-p counts within top-k": (
        SamplingParams(top_k=2, top_p=0.6),
        np.where(PROBABILITIES >= 0.40, PROBABILITIES, 0),
    ),
    # 0.3 · 0.40 = 0.12
    "min-p cuts relative to the best": (
        SamplingParams(min_p=0.3),
        np.where(PROBABILITIES >= 0.12, PROBABILITIES, 0),
    ),
    "bias adds to a logit": (
        SamplingParams(logit_bias=((2, float(np.log(20.0))),)),
        PROBABILITIES * np.array([1, 1, 20, 1, 1, 1]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name: str) -> None:
    sampling, expected = CASES[name]
    counts = draw_many(LOGITS, replace(sampling, seed=17))
    kept = int((expected > 0).sum())
    if kept == 1:
        assert counts[expected > 0] == DRAWS
    else:
        assert chi_square(counts, expected) < CHI_SQUARE_LIMITS[kept - 1], counts


@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_p=0.999), SamplingParams(top_p=0.5), SamplingParams(top_k=1500)]
)
def test_a_flat_distribution_goes_past_the_candidates(sampling: SamplingParams) -> None:
    # 4,000 nearly equal tokens: no 1,024 candidates hold half of the mass, so the whole row is sorted.
    logits = torch.linspace(0, 0.01, 4000)
    allowed = 1500 if sampling.top_k else int(4000 * sampling.top_p) + 20
    rows = [row(replace(sampling, seed=3), outputs=n) for n in range(300)]
    tokens = np.array(sample(logits.expand(300, -1), rows, NO_EOS).token_ids)
    ranks = 3999 - tokens  # the best token is the last
    assert ranks.max() < allowed
    assert ranks.max() > 0.9 * allowed
    assert ranks.max() > sampler.CANDIDATES


def test_greedy_takes_the_best_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 2.0]])
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, [row(greedy), row(greedy)], NO_EOS).token_ids == [1, 0]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(0, 7))
def test_what_a_seed_says_does_not_depend_on_batch_mates(seed: int, position: int, mates: int) -> None:
    generator = torch.Generator().manual_seed(seed % 1000)
    logits = torch.randn(mates + 1, 2000, generator=generator) * 3
    mine = SamplingParams(seed=seed, temperature=0.8, top_p=0.9, min_p=0.01)
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=seed),
        SamplingParams(seed=1, top_k=5),
        SamplingParams(seed=2, repetition_penalty=1.3),
    ]
    alone = sample(logits[:1], [row(mine, outputs=position)], NO_EOS).token_ids[0]
    rows = [row(mine, outputs=position), *(row(others[m % 4], outputs=m) for m in range(mates))]
    assert sample(logits, rows, NO_EOS).token_ids[0] == alone
    order = list(range(mates, -1, -1))
    assert sample(logits[order], [rows[i] for i in order], NO_EOS).token_ids[-1] == alone


def test_a_request_without_a_seed_gets_one_from_its_id_and_keeps_it() -> None:
    def seed_of(name: str, engine_seed: int) -> int:
        return SampleRow.of(Request(name, [1, 2], 1, SamplingParams(), 0.0), engine_seed).seed

    assert seed_of("a", 0) == seed_of("a", 0)
    assert len({seed_of("a", 0), seed_of("b", 0), seed_of("a", 1)}) == 3


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(5, n) for n in range(4000)], [uniform(n - 2000, 7) for n in range(4000)]):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert ((counts - 200) ** 2 / 200).sum() < 43.82  # 99.9 % of chi-square with 19 degrees of freedom
        assert 0.0 <= min(numbers) <= max(numbers) < 1.0


def test_presence_and_frequency_penalties_count_outputs_only() -> None:
    logits = torch.zeros(1, 4)
    seen = row(
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, num_logprobs=4),
        prompt=[3, 3],
        outputs=[0, 0, 1],
    )
    changed = logits[0].clone()
    sampler._change(changed, seen, NO_EOS)
    assert changed.tolist() == [-1.0, -0.75, 0.0, 0.0]


def test_repetition_penalty_covers_the_prompt_and_always_makes_less_likely() -> None:
    changed = torch.tensor([2.0, -2.0, 1.0, -1.0])
    sampler._change(changed, row(SamplingParams(repetition_penalty=2.0), prompt=[0], outputs=[1]), NO_EOS)
    assert changed.tolist() == [1.0, -4.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("outputs", "ignore_eos", "want"),
    [(0, False, 0), (2, False, 0), (3, False, 2), (0, True, 2)],
    ids=[
        "held back",
        "still held back",
        "allowed when enough was said",
        "with ignore_eos only stop tokens are held",
    ],
)
def test_min_tokens_masks_end_and_stop_tokens(outputs: int, ignore_eos: bool, want: int) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    sampling = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(1,), ignore_eos=ignore_eos)
    assert sample(logits, [row(sampling, outputs=outputs)], frozenset({2})).token_ids == [want]


def test_logprobs_are_of_the_raw_logits_with_rank_and_best_first() -> None:
    sampling = SamplingParams(temperature=0.0, num_logprobs=2, logit_bias=((2, 100.0),))
    result = sample(LOGITS[None], [row(sampling)], NO_EOS)
    assert result.token_ids == [2]
    entry = result.logprobs[0]
    assert entry is not None
    assert entry.rank == 6
    assert entry.logprob == pytest.approx(np.log(0.02), abs=1e-5)
    assert [token for token, _ in entry.top] == [1, 3]
    assert entry.top[0][1] == pytest.approx(np.log(0.40), abs=1e-5)


def test_logprobs_are_there_for_those_who_asked() -> None:
    greedy = SamplingParams(temperature=0.0)
    asked = replace(greedy, num_logprobs=0)
    assert sample(LOGITS.expand(2, -1), [row(greedy), row(greedy)], NO_EOS).logprobs == []
    first, second = sample(LOGITS.expand(2, -1), [row(greedy), row(asked)], NO_EOS).logprobs
    assert first is None
    assert second is not None
    assert (second.top, second.rank) == ([], 1)


def test_ties_share_the_better_rank() -> None:
    (entry,) = token_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], [0])
    assert entry.rank == 1


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(seed=1, top_p=0.9)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_finite_logits_fails_alone(bad: float, sampling: SamplingParams) -> None:
    logits = LOGITS.repeat(3, 1)
    if bad == float("-inf"):
        logits[1] = bad
    else:
        logits[1, 4] = bad
    asked = replace(sampling, num_logprobs=1)
    rows = [row(asked), row(asked), row(asked)]
    whole = sample(LOGITS.repeat(3, 1), rows, NO_EOS)
    broken = sample(logits, rows, NO_EOS)
    assert list(broken.failed) == [1]
    assert "not finite" in broken.failed[1]
    for j in (0, 2):
        assert broken.token_ids[j] == whole.token_ids[j]
        assert broken.logprobs[j] == whole.logprobs[j]


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS.repeat(2, 1)
    sample(
        logits,
        [
            row(SamplingParams(seed=1, repetition_penalty=2.0)),
            row(SamplingParams(temperature=0.0, min_tokens=2)),
        ],
        frozenset({1}),
    )
    assert torch.equal(logits, LOGITS.repeat(2, 1))


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert sample(LOGITS[None] * 1e4, [row(SamplingParams(seed=1, temperature=1e-5))], NO_EOS).token_ids == [
        1
    ]
