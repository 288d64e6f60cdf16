"""Builders for the tuner's study tests: readings, snapshots, blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trimtab_engine.core.live import LiveConfig, Slo, SloClass
from trimtab_tuner.metrics.exposition import parse
from trimtab_tuner.metrics.reading import Reading, SloCount
from trimtab_tuner.metrics.snapshot import Snapshot, TargetSample

SLO = Slo("default", (SloClass("default", ttft_s=1.0, itl_s=0.1),))


def make_config(**changes: Any) -> LiveConfig:
    """A live config with `SLO`; `changes` replaces fields."""
    return dataclasses.replace(LiveConfig(slo=SLO), **changes)


def make_reading(*, n: int = 100, violated_ttft: int = 0, violated_itl: int = 0, **changes: Any) -> Reading:
    """A minute of one target with `n` requests judged; `changes` replaces fields."""
    reading = Reading(
        generation=1,
        start_s=0.0,
        end_s=60.0,
        counts={
            ("default", "ttft"): SloCount(n - violated_ttft, violated_ttft),
            ("default", "itl"): SloCount(n - violated_itl, violated_itl),
        },
        finished=float(n),
    )
    return dataclasses.replace(reading, **changes)


def make_snapshot(
    taken_s: float,
    text: str | Mapping[str, str],
    *,
    process_start_s: float = 1000.0,
    age_s: float = 0.0,
    failures: tuple[tuple[str, str], ...] = (),
) -> Snapshot:
    """A snapshot from exposition text, of one target or of several by name."""
    by_target = {"engine": text} if isinstance(text, str) else text
    return Snapshot(
        taken_s,
        tuple(
            TargetSample(name, taken_s - age_s, process_start_s, parse(body))
            for name, body in by_target.items()
        ),
        failures,
    )
