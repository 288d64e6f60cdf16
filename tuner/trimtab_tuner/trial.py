"""One row of a run: what was tried, what it showed, what was decided. Made by `run`, shown by views, stored in results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import SLOS, Reading
from trimtab_tuner.score import Score

Role = Literal["incumbent", "explore", "confirm"]
# incumbent: the reference. improves / no better: exploration, which accepts nothing. stopped, unknown: no verdict.
# measured: part of a confirmation; better, worse, inconclusive: what its test said, on the candidate's last row.
Decision = Literal[
    "incumbent", "improves", "no better", "stopped", "unknown", "measured", "better", "worse", "inconclusive"
]


@dataclass(slots=True)
class Trial:
    """`objective`: violated verdicts per judged request, None when nothing is known."""

    number: int
    role: Role
    measurement: Measurement
    score: Score | None
    decision: Decision
    reason: str = ""
    comparison: Mapping[str, object] = field(default_factory=dict)

    @property
    def config(self) -> LiveConfig:
        """The config that was measured."""
        return self.measurement.config

    def to_json(self) -> dict[str, object]:
        """The row as results and reports hold it. Client-side numbers where a replay gave them, else the server's."""
        measurement = self.measurement
        reading = measurement.reading if isinstance(measurement.reading, Reading) else None
        client = measurement.client or {}
        return {
            "number": self.number,
            "role": self.role,
            "config": measurement.config.to_json(),
            "generation": measurement.generation,
            "status": measurement.status,
            "n": reading.n if reading else 0,
            "violations": {name: reading.slo(name).violated if reading else None for name in SLOS},
            "itl_p99_s": client.get("itl_p99_s", reading.itl_p99_s if reading else None),
            "ttft_p50_s": client.get("ttft_p50_s", reading.ttft_p50_s if reading else None),
            "objective": self.score.objective if self.score else None,
            "constraints": dict(self.score.constraints) if self.score else {},
            "decision": self.decision,
            "reason": self.reason or measurement.reason,
            "comparison": dict(self.comparison),
            "client": dict(client),
            "blocks": [
                {"violated": b.violated, "n": b.n, "tokens": b.tokens, "seconds": round(b.seconds, 3)}
                for b in measurement.blocks
            ],
            "started_s": measurement.started_s,
            "ended_s": measurement.ended_s,
            "samples": len(measurement.snapshots),
        }
