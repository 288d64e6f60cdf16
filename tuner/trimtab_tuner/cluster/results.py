"""What a run leaves in its status: verdict, diagnosis, and the numbers of incumbent and winner with n and intervals. Pure.

Called by `worker`. Intervals are 95 % by resampling time blocks as a whole, never single gaps or requests; None where there are
fewer than five blocks. A p99 is read from histograms whose buckets grow by 8 %, so it is right within one bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_tuner.cluster.notebook import MAX_DIAGNOSIS, MAX_RESULT_MESSAGE, by_field, cut
from trimtab_tuner.metrics.names import TRIMTAB, Names
from trimtab_tuner.metrics.reading import SLOS, Reading
from trimtab_tuner.metrics.snapshot import Histogram, Window
from trimtab_tuner.run import Outcome, RunResult
from trimtab_tuner.trial import Trial

Json = dict[str, Any]
Floats = NDArray[np.float64]
RESAMPLES, MIN_BLOCKS, BLOCKS_A_WINDOW = 500, 5, 12
VERDICTS: dict[Outcome, str] = {
    "Applied": "Applied",
    "Recommended": "Recommended",
    "Kept": "KeptIncumbent",
    "Unknown": "Inconclusive",
    "Paused": "Inconclusive",
}


class Shape:
    """A latency histogram in time blocks: `counts` (blocks, bounds), not cumulative."""

    def __init__(self, bounds: tuple[float, ...], counts: Floats) -> None:
        self._bounds = bounds
        self._counts = counts

    @classmethod
    def of(cls, window: Window, name: str) -> Shape | None:
        """Of one measured window; None when nothing was observed."""
        whole = window.histogram(name)
        if whole is None or whole.count <= 0:
            return None
        edges = np.linspace(window.start_s, window.end_s, BLOCKS_A_WINDOW + 1)
        rows = []
        for low, high in itertools.pairwise(edges):
            part = window.since(float(low)).until(float(high)).histogram(name)
            if part is not None and part.bounds == whole.bounds:
                rows.append(np.diff(np.asarray(part.cumulative), prepend=0.0))
        return cls(whole.bounds, np.asarray(rows))

    @classmethod
    def together(cls, shapes: Sequence[Shape | None]) -> Shape | None:
        """Of several windows of one config."""
        there = [shape for shape in shapes if shape is not None]
        if not there or any(shape._bounds != there[0]._bounds for shape in there):
            return None
        return cls(there[0]._bounds, np.concatenate([shape._counts for shape in there]))

    def quantile(self, q: float) -> float | None:
        """Over all blocks."""
        return self._quantile(self._counts.sum(axis=0), q)

    def interval(self, q: float, seed: int = 0) -> tuple[float, float] | None:
        """95 % interval by resampling blocks that hold anything."""
        blocks = self._counts[self._counts.sum(axis=1) > 0]
        if len(blocks) < MIN_BLOCKS:
            return None
        rng = np.random.default_rng(seed)
        weights = rng.multinomial(len(blocks), np.full(len(blocks), 1 / len(blocks)), size=RESAMPLES)
        found = [self._quantile(row, q) for row in weights @ blocks]
        values = np.asarray([value for value in found if value is not None])
        low, high = np.quantile(values, (0.025, 0.975))
        return float(low), float(high)

    def _quantile(self, counts: Floats, q: float) -> float | None:
        return Histogram(self._bounds, tuple(np.cumsum(counts).tolist()), 0.0).quantile(q)


class Arm:
    """All measurements of one config in one role, reduced as they come: raw windows are large."""

    def __init__(self, names: Names = TRIMTAB) -> None:
        self._names = names
        self._readings: list[Reading] = []
        self._blocks: list[tuple[int, int]] = []  # (violated, judged)
        self._ttft: list[Shape | None] = []
        self._itl: list[Shape | None] = []

    def add(self, trial: Trial) -> None:
        """One measured trial."""
        measurement = trial.measurement
        if not isinstance(measurement.reading, Reading):
            return
        self._readings.append(measurement.reading)
        self._blocks += [(block.violated, block.n) for block in measurement.blocks]
        if len(measurement.snapshots) > 1:
            window = Window(measurement.snapshots)
            self._ttft.append(Shape.of(window, self._names.ttft))
            self._itl.append(Shape.of(window, self._names.itl))

    def __len__(self) -> int:
        return len(self._readings)

    def to_json(self) -> Json:
        """At most 32 entries, as in status.result.before and after. Times in seconds."""
        readings = self._readings
        if not readings:
            return {}
        n, violated = sum(r.n for r in readings), sum(r.violated for r in readings)
        wall_s = sum(r.wall_s for r in readings)
        found: Json = {
            "requests": n,
            "violated": violated,
            "violatedFraction": _round(violated / n if n else None),
            "observedSeconds": _round(wall_s, 1),
            "windows": len(readings),
            "tokensPerSecond": _round(sum(r.generation_tokens for r in readings) / wall_s if wall_s else None, 1),
            "pods": max(r.targets for r in readings),
        }  # fmt: skip
        found |= {f"violated{slo.title()}": sum(r.slo(slo).violated for r in readings) for slo in SLOS}
        found |= _interval("violatedFraction", self._fraction_interval())
        for name, shapes in (("Ttft", self._ttft), ("Itl", self._itl)):
            shape = Shape.together(shapes)
            if shape is not None:
                found[f"p50{name}Seconds"] = _round(shape.quantile(0.5))
                found[f"p99{name}Seconds"] = _round(shape.quantile(0.99))
                found |= _interval(f"p99{name}Seconds", shape.interval(0.99))
            elif len(readings) == 1:  # simulated: read from the tokens themselves
                for q in ("p50", "p99"):
                    found[f"{q}{name}Seconds"] = _round(getattr(readings[0], f"{name.lower()}_{q}_s"))
        return {name: value for name, value in found.items() if value is not None}

    def _fraction_interval(self) -> tuple[float, float] | None:
        table = np.asarray([block for block in self._blocks if block[1]], dtype=np.float64)
        if len(table) < MIN_BLOCKS:
            return None
        rng = np.random.default_rng(0)
        picks = rng.integers(0, len(table), size=(RESAMPLES, len(table)))
        sums = table[picks].sum(axis=1)
        low, high = np.quantile(sums[:, 0] / np.maximum(sums[:, 1], 1), (0.025, 0.975))
        return float(low), float(high)


class Arms:
    """Incumbent and candidates of one run. What counts is what was measured for the confirmation, where there was one."""

    def __init__(self) -> None:
        self._explored = Arm()  # the incumbent, before
        self._incumbent = Arm()
        self._candidate = Arm()

    def add(self, trial: Trial) -> None:
        """One trial, as it ends."""
        if trial.measurement.status != "measured":
            return
        if trial.role == "incumbent":
            self._explored.add(trial)
        elif trial.role == "confirm":
            # The incumbent is measured without a lease, so it is the one that runs what ran before.
            (self._incumbent if trial.decision == "incumbent" else self._candidate).add(trial)

    def before(self) -> Json:
        """The incumbent's numbers."""
        return (self._incumbent if len(self._incumbent) else self._explored).to_json()

    def after(self) -> Json:
        """The confirmed candidate's numbers."""
        return self._candidate.to_json()


def result(found: RunResult, verdict: str, arms: Arms, note: str = "") -> Json:
    """As in status.result, within its limits."""
    changed = verdict in ("Applied", "Recommended")
    text = f"{found.reason}; {note}" if note else found.reason
    if found.comparison is not None:
        c = found.comparison
        text += f"; difference {c.difference:.2%} of requests, 95 % interval {c.low:.2%} to {c.high:.2%}, {c.blocks} pairs of blocks"
    if found.diagnosis is not None:
        text += f"; {found.diagnosis.state}: {found.diagnosis.because}"
    built: Json = {
        "verdict": verdict,
        "message": cut(text, MAX_RESULT_MESSAGE),
        "before": arms.before(),
    }
    if found.diagnosis is not None:
        built["diagnosis"] = cut(found.diagnosis.state, MAX_DIAGNOSIS)
    if changed:
        built |= {"config": by_field(found.after), "after": arms.after()}
    return built


def failure(reason: str, verdict: str = "Failed") -> Json:
    """The result of a run that could not be carried out."""
    return {"verdict": verdict, "message": cut(reason, MAX_RESULT_MESSAGE)}


def _interval(name: str, interval: tuple[float, float] | None) -> Json:
    return {} if interval is None else {f"{name}Low": _round(interval[0]), f"{name}High": _round(interval[1])}


def _round(value: float | None, digits: int = 5) -> float | None:
    return None if value is None else round(value, digits)
