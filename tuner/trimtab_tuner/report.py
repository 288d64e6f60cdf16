"""What a report says: results side by side, uniform beside bursty, before and after, trials, and what limits the conclusions.

`build` takes results with labels (and the document of a tuning run, if any) and finds what can be compared. `page.py` renders
it. Computes no statistic itself: `stats.py` and `compare.py` do.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .compare import Comparison, compare
from .errors import InputError, UnreadableFile
from .quantiles import Interval
from .result import ReplayResult
from .stats import Summary, summarise
from .units import format_duration

SCHEMA = "trimtab.report/1"
TUNING_SCHEMA = "trimtab.tuning/1"
_LATE_SEND_S = 0.005
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Report:
    """What a page shows. `tuning` is the document of a tuning run (schema trimtab.tuning/1) or None."""

    title: str
    results: Mapping[str, ReplayResult]
    summaries: Mapping[str, Summary]
    bursts: tuple[Comparison, ...]
    tuned: tuple[Comparison, ...]
    tuning: Mapping[str, Any] | None
    caveats: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON twin: everything in the page but the pictures, with provenance."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"trimtab": version("trimtab"), "python": platform.python_version()},
            "caveats": list(self.caveats),
            "results": {
                label: {"meta": dict(result.meta), "summary": self.summaries[label].to_json()}
                for label, result in self.results.items()
            },
            "comparisons": {
                "uniform_to_bursty": [_comparison_json(found) for found in self.bursts],
                "before_to_after": [_comparison_json(found) for found in self.tuned],
            },
            "tuning": self.tuning,
        }


def build(
    results: Mapping[str, ReplayResult],
    tuning: Mapping[str, Any] | None = None,
    title: str = "Trimtab report",
) -> Report:
    """Find what can be compared. Words in labels that mean something: uniform and bursty, before and after.

    Labels that differ in such a word alone are compared (`uniform` with `bursty`; `bursty, before` with `bursty, after`). Without
    such labels results are matched by what they sent: even arrivals against others of the same requests under the same live
    config, and the same requests at the same times under different ones. Raises InputError when there is nothing to show.
    """
    if not results and tuning is None:
        raise InputError("RESULT", None, "at least one replay result or tuning result is needed")
    summaries = {label: summarise(result) for label, result in results.items()}
    bursts = tuple(compare(pair, results[pair[0]], results[pair[1]]) for pair in _bursts(results))
    tuned = tuple(compare(pair, results[pair[0]], results[pair[1]]) for pair in _tuned(results))
    caveats = _caveats(results, summaries, [*bursts, *tuned], tuning)
    return Report(title, results, summaries, bursts, tuned, tuning, tuple(caveats))


def load_tuning(path: str | Path) -> dict[str, Any]:
    """Read the document of a tuning run. Raises InputError."""
    try:
        document = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableFile(path, error, "a tuning result (JSON)") from None
    return check_tuning(document, str(path))


def check_tuning(document: object, path: str) -> dict[str, Any]:
    """Whether this is a tuning result with the fields that a report draws."""
    if not isinstance(document, dict) or document.get("schema") != TUNING_SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InputError(f"{path}: schema", found, f"a tuning result with schema {TUNING_SCHEMA!r}")
    trials = document.get("trials")
    if not isinstance(trials, list):
        raise InputError(f"{path}: trials", trials, "a list")
    for number, trial in enumerate(trials):
        config = trial.get("config") if isinstance(trial, dict) else None
        if (
            not isinstance(config, dict)
            or not {"max_num_batched_tokens", "scheduling_policy"} <= config.keys()
        ):
            raise InputError(
                f"{path}: trials[{number}].config", config, "max_num_batched_tokens and scheduling_policy"
            )
    return document


def _bursts(results: Mapping[str, ReplayResult]) -> list[tuple[str, str]]:
    named = _named(results, "uniform", "bursty")
    if named:
        return named
    found: dict[str, tuple[str, str]] = {}  # one for each live config
    for even, first in results.items():
        for other, second in results.items():
            same_requests = second.meta.get("lengths_hash") == first.meta.get("lengths_hash")
            if (
                first.meta.get("mode") == "uniform" != second.meta.get("mode")
                and same_requests
                and _config(first) == _config(second)
            ):
                found.setdefault(str(_config(first)), (even, other))
    return list(found.values())


def _tuned(results: Mapping[str, ReplayResult]) -> list[tuple[str, str]]:
    named = _named(results, "before", "after")
    if not named and {"bursty", "after"} <= results.keys():
        named = [("bursty", "after")]
    found: dict[str, tuple[str, str]] = {}  # one for each set of arrivals
    labels = list(results)
    for position, before in enumerate(labels):
        for after in labels[position + 1 :]:
            first, second = results[before], results[after]
            same_times = first.meta.get("trace_hash") == second.meta.get("trace_hash")
            if same_times and _config(first) != _config(second):
                found.setdefault(str(first.meta.get("trace_hash")), (before, after))
    # Bursts first: they are what tuning is for.
    return sorted(named or found.values(), key=lambda pair: results[pair[0]].meta.get("mode") == "uniform")


def _named(results: Mapping[str, ReplayResult], first: str, second: str) -> list[tuple[str, str]]:
    """Pairs of labels that differ in these words alone."""
    return [
        (a, b)
        for a in results
        for b in results
        if first in a and second in b and a.replace(first, "") == b.replace(second, "")
    ]


def _config(result: ReplayResult) -> dict[str, Any]:
    live = result.meta.get("live_config") or {}
    return {key: value for key, value in live.items() if key not in ("generation", "source")}


def _caveats(
    results: Mapping[str, ReplayResult],
    summaries: Mapping[str, Summary],
    comparisons: Sequence[Comparison],
    tuning: Mapping[str, Any] | None,
) -> list[str]:
    found: list[str] = []
    said: dict[str, list[str]] = {}  # the same words for several results are said once

    def note(label: str, text: str) -> None:
        said.setdefault(text, []).append(label)

    for label, result in results.items():
        summary, meta = summaries[label], result.meta
        if summary.ttft.note:
            note(label, f"TTFT: {summary.ttft.note} (n = {summary.ttft.n}).")
        if summary.n_failed:
            kinds = ", ".join(f"{count} {status}" for status, count in summary.failures.items())
            note(
                label,
                f"{summary.n_failed} of {summary.n_due} requests failed ({kinds}); they count as infinitely late.",
            )
        if meta.get("interrupted"):
            note(
                label,
                f"stopped early; {summary.n_cancelled} requests were cut off and {meta.get('n', 0) - summary.n_due} never sent.",
            )
        late = summary.send_error.p99
        if late is not None and late > _LATE_SEND_S:
            note(
                label,
                f"the sender itself was late by {format_duration(late)} at p99; latencies include that.",
            )
        if summary.length_mismatches:
            note(
                label, f"{summary.length_mismatches} answers or prompts were not as long as the trace asked."
            )
        if summary.deliveries < 0.9 * summary.output_tokens:
            note(
                label,
                f"{summary.output_tokens:,} tokens came in {summary.deliveries:,} chunks; gaps are between chunks.",
            )
        if summary.cached_tokens and summary.prompt_tokens:
            share = summary.cached_tokens / summary.prompt_tokens
            note(label, f"{share:.0%} of prompt tokens came from the server's prefix cache.")
        if meta.get("simulated"):
            note(label, "simulated: the engine's scheduler with modelled step times, no server.")
        if str(meta.get("token_ids_from", "")).startswith("assumed"):
            note(label, f"prompt token ids come from an {meta['token_ids_from']}.")
        if meta.get("live_config") != meta.get("live_config_after"):
            note(label, "the live config changed during the replay.")
    found += [f"{', '.join(labels)}: {text}" for text, labels in said.items()]
    for comparison in comparisons:
        if not comparison.same_requests:
            found.append(
                f"{comparison.before} and {comparison.after} did not send the same requests: their difference is not only what it seems."
            )
    if any(urlsplit(str(result.meta.get("url"))).hostname in _LOOPBACK for result in results.values()):
        found.append("Sender and server shared one machine, so they took time from each other.")
    if results:
        found.append(
            "One replay each: intervals say how the requests scatter in time blocks, not how a repeat would differ."
        )
        found.append(
            "Gaps of requests that ran in the same step are one observation, not many: read p99 of gaps with its interval."
        )
    if tuning is not None:
        found.append("Trials only rank candidates; the verdict rests on the comparison that it names.")
    return found


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "before": comparison.before,
        "after": comparison.after,
        "paired": comparison.paired,
        "same_requests": comparison.same_requests,
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "before": _number(row.before),
                "after": _number(row.after),
                "change": _number(row.change),
                "change_is": "ratio" if row.unit == "s" else "difference",
                "interval": _interval_json(row.interval),
                "n_before": row.n_before,
                "n_after": row.n_after,
            }
            for row in comparison.rows
        ],
    }


def _interval_json(found: Interval | None) -> list[float | str | None] | None:
    return None if found is None else [_number(found.low), _number(found.high)]


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    return "inf" if math.isinf(value) else round(value, 6)
