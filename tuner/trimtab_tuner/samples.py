"""Keeps the raw metric samples of every measurement, so that a number in a result can be recomputed later.

Called by `commands.run` after each measurement. One gzipped JSON file a trial: all snapshots with their times, targets,
process start times and every series the tuner knows a name of.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

from trimtab_tuner.metrics.names import Names
from trimtab_tuner.metrics.snapshot import Snapshot, TargetSample
from trimtab_tuner.trial import Trial

SUFFIXES = ("", "_bucket", "_sum", "_count")


class SampleFiles:
    """Writes `samples-NN.json.gz` into a folder."""

    def __init__(self, folder: Path, names: Names) -> None:
        self._folder = folder
        self._names = frozenset(name + suffix for name in names.all() for suffix in SUFFIXES)

    def keep(self, trial: Trial) -> None:
        """Store the samples of one trial, whole or not at all."""
        document = {
            "schema": "trimtab.samples/1",
            "trial": trial.number,
            "generation": trial.measurement.generation,
            "snapshots": [self._snapshot(snapshot) for snapshot in trial.measurement.snapshots],
        }
        path = self._folder / f"samples-{trial.number:02d}.json.gz"
        partial = path.with_name(f".{path.name}.partial")
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        partial.write_bytes(gzip.compress(text.encode(), compresslevel=5, mtime=0))
        partial.replace(path)

    def _snapshot(self, snapshot: Snapshot) -> dict[str, object]:
        return {
            "taken_s": snapshot.taken_s,
            "failures": [list(failure) for failure in snapshot.failures],
            "targets": [self._target(sample) for sample in snapshot.samples],
        }

    def _target(self, sample: TargetSample) -> dict[str, object]:
        return {
            "target": sample.target,
            "taken_s": sample.taken_s,
            "process_start_s": sample.process_start_s,
            "series": {
                # A value that is no number is null: JSON has no NaN.
                name: [
                    [dict(labels), value if math.isfinite(value) else None]
                    for labels, value in by_labels.items()
                ]
                for name, by_labels in sample.series.items()
                if name in self._names
            },
        }
