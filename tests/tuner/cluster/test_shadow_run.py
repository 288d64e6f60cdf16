"""What a Shadow run replays: the newest recorded requests, as many as there is time for."""

from __future__ import annotations

import pytest

from support.services import run_resource
from trimtab_tuner.cluster import evaluators
from trimtab_tuner.cluster.objects import run_of
from trimtab_tuner.cluster.shadow import LEAST_REQUESTS, newest
from trimtab_tuner.commands import work
from trimtab_tuner.errors import InputError
from trimtab_tuner.trace import Trace, TraceRequest

HOUR_S = 3600.0


def every(seconds: float, for_s: float = HOUR_S) -> Trace:
    """A request each so many seconds; the last ones have long prompts."""
    count = int(for_s / seconds)
    return Trace(tuple(TraceRequest(i * seconds, 10 + i, 5) for i in range(count)), "test", "records")


def test_it_is_the_last_window_of_the_recording() -> None:
    trace = every(1.0)
    part = newest(trace, 300.0, 10 * HOUR_S)
    assert part.span_s == pytest.approx(300.0, abs=1.0)
    assert part.requests[-1].prompt_tokens == trace.requests[-1].prompt_tokens
    assert part.requests[0].arrival_s == 0.0


def test_it_is_shorter_where_the_time_limit_is_short() -> None:
    # Incumbent, candidate, confirmation and one to spare, each with a quarter of its length for what is between.
    assert newest(every(1.0), 300.0, 600.0).span_s == pytest.approx(120.0, abs=1.0)


def test_it_is_longer_where_the_window_holds_too_few_requests() -> None:
    part = newest(every(30.0), 300.0, 10 * HOUR_S)
    assert len(part) >= LEAST_REQUESTS
    assert part.span_s > 300.0


def test_a_short_recording_is_taken_whole() -> None:
    trace = every(1.0, for_s=50.0)
    assert newest(trace, 300.0, 10 * HOUR_S) == trace


def test_its_candidates_may_be_in_force_in_every_mode_but_off() -> None:
    def modes(evaluator: str) -> tuple[str, ...]:
        built = run_resource(evaluator=evaluator)
        built["metadata"]["uid"] = "u"
        return evaluators.modes(run_of(built))

    assert modes("Shadow") == ("Recommend", "Canary", "Apply")
    assert modes("Live") == ("Canary", "Apply")


@pytest.mark.parametrize("text", ["", "2", "@http://a", "0@http://a", "two@http://a", "2@"])
def test_engines_are_named_by_number_and_address(text: str) -> None:
    assert work._engines("2@http://[fd00::9]:8000").url == "http://[fd00::9]:8000"
    with pytest.raises(InputError, match=r"--engines.*N@URL"):
        work._engines(text)
