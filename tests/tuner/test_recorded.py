"""Workload records of several engines as one trace: order, placement, what is left out, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab_tuner.errors import ServerError, TraceError
from trimtab_tuner.recorded import EngineRecords, merge


def record(arrival_s: float, **changes: Any) -> dict[str, Any]:
    """As `/admin/workload` gives one."""
    base = {
        "arrival_s": arrival_s,
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "output_tokens": 8,
        "slo_class": "default",
        "tenant": None,
        "outcome": "length",
        "prefix_block_ids": [11, 12],
    }
    return base | changes


def engine(name: str, *records: dict[str, Any], **other: Any) -> EngineRecords:
    return EngineRecords(name, records, **other)


def test_records_of_several_engines_are_one_trace_in_order_that_knows_who_had_which_request() -> None:
    found = merge(
        "chat",
        [
            engine("a", record(1003.0), record(1000.5)),
            engine("b", record(1001.0, slo_class="fast", tenant="t")),
        ],
    )
    assert found is not None
    assert [request.arrival_s for request in found.trace.requests] == [0.0, 0.5, 2.5]
    assert (found.placement, found.engines) == ((0, 1, 0), ("a", "b"))
    middle = found.trace.requests[1]
    assert (middle.slo_class, middle.tenant, middle.prefix_block_ids) == ("fast", "t", (11, 12))
    assert found.trace.prefix_block_tokens == 16
    assert found.trace.source == "recorded by 2 engines of chat"
    assert found.trace.changes == ()


def test_only_the_newest_are_taken_and_it_is_said() -> None:
    found = merge("chat", [engine("a", *(record(1000.0 + n) for n in range(9)))], max_requests=4)
    assert found is not None
    assert (len(found.trace), found.trace.span_s) == (4, 3.0)
    assert found.trace.changes == ("the newest 4 of 9 requests",)


def test_where_one_engine_has_lost_older_records_none_of_that_time_are_taken_from_any() -> None:
    old = engine("old", *(record(1000.0 + n) for n in range(9)))
    lost = engine("lost", record(1006.0), record(1007.5), dropped=3)
    found = merge("chat", [old, lost])
    assert found is not None
    assert [request.arrival_s for request in found.trace.requests] == [0.0, 0.0, 1.0, 1.5, 2.0]
    whole = merge("chat", [old, engine("young", record(1006.0), record(1007.5))])
    assert whole is not None
    assert len(whole.trace) == 11  # it simply had no request before


def test_requests_without_a_token_are_left_out_and_counted_and_none_at_all_is_none() -> None:
    rejected = record(1000.0, output_tokens=0, outcome="rejected_queue_full")
    found = merge("chat", [engine("a", rejected, record(1001.0)), engine("b", record(1002.0))])
    assert found is not None
    assert found.trace.changes == ("left out 1 requests that got no token",)
    assert found.placement == (0, 1)
    assert merge("chat", [engine("a", rejected), engine("b")]) is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"arrival_s": float("nan")}, "arrival_s"),
        ({"prefix_block_ids": "abc"}, "prefix_block_ids"),
        ({"slo_class": 3}, "slo_class"),
    ],
)
def test_a_record_that_cannot_be_meant_is_named_with_its_engine(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=rf"b:2.*{said}"):
        merge("chat", [engine("a", record(1.0)), engine("b", record(1.0), record(2.0) | wrong)])


def test_engines_with_different_block_sizes_are_refused() -> None:
    with pytest.raises(ServerError, match="a: 16, b: 32"):
        merge("chat", [engine("a", record(1.0)), engine("b", record(2.0), block_size=32)])
