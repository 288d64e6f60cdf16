"""Which leaving pods are asked to serve on: only while nobody else is ready, and the next one has a place already."""

from __future__ import annotations

from typing import Any

import pytest

from support.pods import T0, pod
from trimtab_operator.plan.handover import LEASE_S, to_hold

Json = dict[str, Any]
FAREWELL_S = 80.0
NOW = T0 + 1.0


def leaving(name: str = "old", gone_s: float = 400.0, **state: Any) -> Json:
    made = pod(name, ready_since=0.0, deleting=True, **state)
    made["metadata"]["deletionTimestamp"] = pod("x", created=gone_s)["metadata"]["creationTimestamp"]
    return made


NEXT = pod("next")  # has a node, is not ready


def test_the_only_pod_is_held_while_the_next_one_starts() -> None:
    assert to_hold([leaving(), NEXT], 1, FAREWELL_S, NOW) == {"old": LEASE_S}


def test_all_leaving_pods_are_held_when_all_leave() -> None:
    assert set(to_hold([leaving("a"), leaving("b"), NEXT], 2, FAREWELL_S, NOW)) == {"a", "b"}


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        pytest.param([leaving(), pod("next", unschedulable_since=0.0)], 1, id="the next one waits for its place"),
        pytest.param([leaving(), pod("next", scheduled=False)], 1, id="nobody knows yet"),
        pytest.param([leaving()], 1, id="there is no next one"),
        pytest.param([leaving(), NEXT, pod("other", ready_since=0.0)], 2, id="somebody else is ready"),
        pytest.param([leaving(), NEXT], 0, id="none is wanted"),
        pytest.param([NEXT], 1, id="none is leaving"),
        pytest.param([leaving(state={"terminated": {"exitCode": 0}}), NEXT], 1, id="its engine has ended"),
        pytest.param([leaving(), pod("next", phase="Failed")], 1, id="the next one was evicted"),
    ],
)  # fmt: skip
def test_otherwise_none_is_held(listed: list[Json], wanted: int) -> None:
    assert to_hold(listed, wanted, FAREWELL_S, NOW) == {}


@pytest.mark.parametrize(("gone_s", "held_s"), [(91.0, 10.0), (81.5, None), (40.0, None)])
def test_the_end_of_the_grace_period_belongs_to_what_the_pod_took(
    gone_s: float, held_s: float | None
) -> None:
    found = to_hold([leaving(gone_s=gone_s), NEXT], 1, FAREWELL_S, NOW)
    assert found.get("old") == held_s
