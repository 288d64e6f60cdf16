"""The stand-in of the Azure traces: its lengths have the quantiles that it states, its arrivals are Poisson."""

from __future__ import annotations

import math
from pathlib import Path

import azure_traces
import numpy as np
import pytest

from trimtab_tuner.burstiness import interarrival_cv

STATED = {
    (name, what): tuple(zip(azure_traces.AT, table[name], strict=True))
    for what, table in (("prompt", azure_traces.PROMPT), ("output", azure_traces.OUTPUT))
    for name in azure_traces.NAMES
}


@pytest.fixture(autouse=True)
def _no_public_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(azure_traces.VARIABLE, raising=False)


@pytest.mark.parametrize(("name", "what"), STATED)
def test_lengths_have_the_stated_quantiles(name: str, what: str) -> None:
    lengths = azure_traces.load(name)
    assert lengths.source == "stand-in"
    drawn = getattr(lengths, what)
    at, stated = zip(*STATED[name, what], strict=True)
    assert drawn.min() >= stated[0]
    assert drawn.max() <= stated[-1]
    for share in at[1:-1]:
        # Where the quantile of so many draws may lie: four standard errors of its rank.
        slack = 4 * math.sqrt(share * (1 - share) / len(drawn))
        low, high = np.interp((share - slack, share + slack), at, stated)
        assert low - 0.5 <= np.quantile(drawn, share) <= high + 0.5, share


def test_prompt_and_output_are_independent_and_every_load_is_the_same() -> None:
    for name in azure_traces.NAMES:
        lengths = azure_traces.load(name)
        assert abs(np.corrcoef(lengths.prompt, lengths.output)[0, 1]) < 4 / math.sqrt(len(lengths.prompt))
        again = azure_traces.load(name)
        assert (again.prompt == lengths.prompt).all()
        assert (again.output == lengths.output).all()


def test_arrivals_are_poisson_at_the_rate_asked_and_one_seed_means_the_same_requests_at_every_rate() -> None:
    lengths = azure_traces.load("conv")
    slow, fast = (lengths.poisson(4096, rate, seed=1) for rate in (2.0, 8.0))
    # Gaps of an exponential: mean and CV within four standard errors of 1/rate and 1.
    assert interarrival_cv([request.arrival_s for request in slow.requests]) == pytest.approx(1.0, abs=4 / 64)
    assert slow.rate_rps == pytest.approx(2.0, rel=4 / 64)
    assert slow.lengths_hash == fast.lengths_hash
    assert [request.arrival_s for request in slow.requests] == pytest.approx(
        [4 * request.arrival_s for request in fast.requests]
    )
    assert lengths.poisson(4096, 2.0, seed=2).lengths_hash != slow.lengths_hash


def test_the_public_files_are_taken_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        *(f"2023-11-16 18:15:{n:02d}.0000000,{10 + n},{n + 1}" for n in range(9)),
    ]
    (tmp_path / "azure_llm_2023_code.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.setenv(azure_traces.VARIABLE, str(tmp_path))
    lengths = azure_traces.load("code")
    assert (lengths.source, lengths.prompt.tolist(), lengths.output.tolist()) == (
        "public", list(range(10, 19)), list(range(1, 10)))  # fmt: skip
