"""Finished runs that nobody made by hand do not pile up, and a person's are never touched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.runs import tuning_run
from trimtab_operator.plan import made_runs
from trimtab_operator.plan.runs import FINISHED

RUNS = st.lists(
    st.tuples(
        st.sampled_from(["nightly", "drift", "mine", None]), st.sampled_from(["", "Running", *FINISHED])
    ),
    max_size=12,
)


@given(RUNS, st.integers(1, 4))
def test_the_newest_finished_ones_of_each_origin_stay(
    listed: list[tuple[str | None, str]], limit: int
) -> None:
    runs = [
        tuning_run(f"r-{number}", origin=origin, phase=phase, age_s=60.0 * number)
        for number, (origin, phase) in enumerate(listed)
    ]
    gone = {run.name for run in made_runs.superfluous(runs, limit)}
    for origin in ("nightly", "drift"):
        finished = [r.name for r in runs if made_runs.origin(r) == origin and r.status.phase in FINISHED]
        assert [name for name in finished if name not in gone] == finished[:limit], (
            "the newest come first here"
        )
    others = {r.name for r in runs if made_runs.origin(r) is None or r.status.phase not in FINISHED}
    assert not gone & others
