"""A reading is exact or Unknown; everything that makes a window unusable is named."""

import dataclasses

import pytest

from support.study import make_snapshot
from trimtab_tuner.metrics import reading as readings
from trimtab_tuner.metrics.names import TRIMTAB, VLLM, Names
from trimtab_tuner.metrics.reading import Block, Reading, Unknown
from trimtab_tuner.metrics.snapshot import Snapshot, Window


def body(met: int, violated: int, *, generation: int = 7, in_force: int = 7) -> str:
    return "\n".join(
        [
            f'trimtab_slo_requests_total{{slo_class="default",slo="{slo}",outcome="{outcome}",generation="{generation}"}} {value}'
            for slo in ("ttft", "itl")
            for outcome, value in (("met", met), ("violated", violated if slo == "itl" else 0))
        ]
        + [f"trimtab_live_config_generation {in_force}"]
    )


def read(*snapshots: Snapshot, min_requests: int = 1, names: Names = TRIMTAB) -> Reading | Unknown:
    return readings.read(
        Window(snapshots), names=names, generation=7, min_requests=min_requests, max_age_s=5.0
    )


def why(*snapshots: Snapshot, min_requests: int = 1, names: Names = TRIMTAB) -> str:
    found = read(*snapshots, min_requests=min_requests, names=names)
    assert isinstance(found, Unknown)
    return found.reason


START, END = make_snapshot(0.0, body(10, 2)), make_snapshot(4.0, body(40, 5))


def test_counts_are_the_difference_of_totals() -> None:
    found = read(START, END)
    assert isinstance(found, Reading)
    assert (found.slo("itl").met, found.slo("itl").violated, found.slo("ttft").violated) == (30, 3, 0)
    assert (found.n, found.violated) == (33, 3)


def test_two_replicas_are_added_up() -> None:
    found = read(
        make_snapshot(0.0, {"x": body(0, 0), "y": body(5, 0)}),
        make_snapshot(4.0, {"x": body(10, 1), "y": body(25, 4)}),
    )
    assert isinstance(found, Reading)
    assert (found.slo("itl").met, found.slo("itl").violated) == (30, 5)


def test_another_generation_is_not_counted() -> None:
    other = body(100, 50, generation=6)
    found = read(
        make_snapshot(0.0, body(10, 2) + "\n" + other), make_snapshot(4.0, body(40, 5) + "\n" + other)
    )
    assert isinstance(found, Reading)
    assert found.n == 33


@pytest.mark.parametrize(
    ("name", "snapshots", "reason"),
    [
        ("one sample", (START,), "fewer than two"),
        ("no target", (Snapshot(0.0, (), (("x", "refused"),)),) * 2, "refused"),
        ("target gone", (START, make_snapshot(4.0, {}, failures=(("engine", "refused"),))), "refused"),
        ("stale", (START, make_snapshot(60.0, body(40, 5), age_s=30.0)), "stale"),
        (
            "hole",
            (START, make_snapshot(30.0, body(20, 3)), make_snapshot(31.0, body(40, 5))),
            "no sample for",
        ),
        ("restart", (START, make_snapshot(4.0, body(40, 5), process_start_s=2000.0)), "restarted"),
        ("lease ended", (START, make_snapshot(4.0, body(40, 5, in_force=3))), "ran generation 3"),
        (
            "no counters",
            (make_snapshot(0.0, "a 1"), make_snapshot(4.0, "a 1")),
            "no trimtab_slo_requests_total",
        ),
        ("NaN", (START, make_snapshot(4.0, body(40, 5).replace(" 40", " NaN"))), "NaN"),
    ],
)
def test_an_unusable_window_is_unknown(name: str, snapshots: tuple[Snapshot, ...], reason: str) -> None:
    assert reason in why(*snapshots)


def test_too_few_requests_are_unknown() -> None:
    assert "only 33 requests" in why(START, END, min_requests=34)


def test_a_nan_gauge_is_unknown() -> None:
    assert "NaN" in why(START, make_snapshot(4.0, body(40, 5) + "\ntrimtab_oldest_waiting_seconds NaN"))


def test_a_runtime_without_exact_counters_is_unknown() -> None:
    assert "does not count" in why(START, END, names=VLLM)


def test_blocks_lose_no_verdict_and_match_the_whole() -> None:
    snapshots = [make_snapshot(float(t), body(2 * t, t // 3)) for t in range(31)]
    window = Window(snapshots)
    found = readings.blocks(window, TRIMTAB, 7, [0.0, 10.0, 20.0, 25.0])
    assert len(found) == 3
    whole = read(*snapshots)
    assert isinstance(whole, Reading)
    assert sum(b.violated for b in found) == whole.violated == 10
    assert sum(b.n for b in found) == 60
    assert found[0] == Block(3, 20)


def test_every_name_of_a_runtime_is_given_or_none() -> None:
    for names in (TRIMTAB, VLLM):
        assert all(value is None or value for value in dataclasses.asdict(names).values())
        assert len(set(names.all())) == len(names.all())
