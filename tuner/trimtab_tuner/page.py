"""Renders a report: one HTML page with inline pictures (no script, nothing fetched), and its JSON twin beside it.

Called by `trimtab-tuner report` and the demo. Formats what `report.build` found; decides nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from . import plots
from .compare import Row
from .errors import InputError
from .quantiles import LEVEL
from .report import Report
from .tables import rows as summary_rows
from .units import format_duration


def write(report: Report, out: str | Path) -> tuple[Path, Path]:
    """Write the page to `out` (a .html name) and its twin beside it; returns both paths."""
    page = Path(out)
    if page.suffix != ".html":
        raise InputError("--out", str(out), "a file name that ends in .html")
    twin = page.with_suffix(".json")
    page.parent.mkdir(parents=True, exist_ok=True)
    twin.write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
    page.write_text(render(report))
    return page, twin


def render(report: Report) -> str:
    """The page: one HTML document with inline pictures, no script, nothing fetched."""
    environment = Environment(
        loader=PackageLoader("trimtab_tuner"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pictures = {name: Markup(plots.to_svg(figure)) for name, figure in figures(report).items()}
    return environment.get_template("report.html.j2").render(
        report=report,
        pictures=pictures,
        headlines=headlines(report),
        rows=[
            (name, [text(summary) for summary in report.summaries.values()]) for name, text in summary_rows()
        ],
        provenance=provenance(report),
        trials=trial_rows(report.tuning),
        level=f"{LEVEL:.0%}",
        duration=format_duration,
        value=_value,
        change=_change,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def figures(report: Report) -> dict[str, Figure]:
    """All pictures by name; absent where there is nothing to draw."""
    found: dict[str, Figure] = {}
    colours = dict(
        zip(report.results, itertools.cycle(plots.COLOURS), strict=False)
    )  # the same in all pictures
    if report.results:
        found["distributions"] = plots.distributions(report.results, colours)
        found["percentiles"] = plots.percentiles(report.summaries, colours)
        found["timeline"] = plots.timeline(report.results)
    for kind, comparisons in (("bursts", report.bursts), ("tuned", report.tuned)):
        for number, comparison in enumerate(comparisons):
            pair = {label: report.results[label] for label in (comparison.before, comparison.after)}
            found[f"{kind}{number}"] = plots.distributions(pair, colours)
            if kind == "bursts" and number == 0:
                found["arrivals"] = plots.arrivals(pair, colours)
    trials = (report.tuning or {}).get("trials") or []
    if any(plots.measured(trial) for trial in trials):
        found["budget"] = plots.budget(trials, _itl_target_s(trials[0]["config"]))
    return found


def headlines(report: Report) -> list[str]:
    """What a reader in a hurry should take away, in numbers."""
    found: list[str] = []
    for comparison, text in (
        *((each, "Bursts alone, the same requests at other times") for each in report.bursts),
        *((each, "Before and after") for each in report.tuned),
    ):
        parts = [
            f"{row.name} {_value(row, row.before)} → {_value(row, row.after)}"
            for row in comparison.rows
            if row.name in ("TTFT p90", "ITL p50", "ITL p99", "goodput (both targets met)")
            and row.before is not None
            and row.after is not None
        ]
        if parts:
            found.append(f"{text} ({comparison.before} → {comparison.after}): {'; '.join(parts)}.")
    verdict = (report.tuning or {}).get("verdict")
    if isinstance(verdict, Mapping):
        found.append(f"Tuning verdict: {verdict.get('outcome')}. {verdict.get('reason')}")
    diagnosis = (report.tuning or {}).get("diagnosis")
    if isinstance(diagnosis, Mapping):
        found.append(f"Diagnosis before tuning: {diagnosis.get('state')}. {diagnosis.get('because')}")
    return found


def provenance(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each result and the tuning run: where its numbers come from."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    keys = (
        "url", "model", "server_version", "live_config", "trace", "trace_changes", "trace_hash", "lengths_hash", "mode", "seed",
        "prompt_kind", "prompt_seed", "token_ids_from", "n", "span_s", "started", "elapsed_s", "burstiness_intended",
        "burstiness_sent", "versions",
    )  # fmt: skip
    for label, result in report.results.items():
        found.append(
            (
                label,
                [(key, _text(result.meta[key])) for key in keys if result.meta.get(key) not in (None, [])],
            )
        )
    if report.tuning is not None:
        meta = report.tuning.get("meta") or {}
        found.append(
            ("tuning run", [(str(key), _text(value)) for key, value in meta.items() if value is not None])
        )
    return found


def trial_rows(tuning: Mapping[str, Any] | None) -> list[list[str]]:
    """The trials as table rows: number, role, budget, policy, n, over TTFT, over ITL, p99 gap, decision."""
    found = []
    for trial in (tuning or {}).get("trials") or []:
        config, violations = trial["config"], trial.get("violations") or {}
        p99 = trial.get("itl_p99_s")
        over = [violations.get(name) for name in ("ttft", "itl")]
        found.append(
            [
                f"{int(trial['number']) + 1}",
                str(trial.get("role", "")),
                f"{config['max_num_batched_tokens']:,}",
                str(config["scheduling_policy"]),
                f"{trial.get('n', 0):,}",
                *("–" if each is None else f"{each:,}" for each in over),
                format_duration(p99),
                f"{trial.get('decision', '')} {trial.get('reason', '')}".strip(),
            ]
        )
    return found


def _itl_target_s(config: Mapping[str, Any]) -> float | None:
    """Of the default class, from a trial's live config."""
    slo = config.get("slo") or {}
    for each in slo.get("classes", []):
        if each.get("name") == slo.get("default_class"):
            return float(each["itl_s"])
    return None


def _value(row: Row, value: float | None) -> str:
    if value is None:
        return "too few"
    return format_duration(value) if row.unit == "s" else f"{value:.0%}"


def _change(row: Row) -> str:
    if row.change is None:
        return "–"
    if math.isinf(row.change):
        return "into failures"
    if row.unit == "s":
        around = "" if row.interval is None else f" [{row.interval.low:.2f}, {row.interval.high:.2f}]"
        return f"× {row.change:.2f}{around}"
    around = (
        "" if row.interval is None else f" [{row.interval.low * 100:+.0f}, {row.interval.high * 100:+.0f}]"
    )
    return f"{row.change * 100:+.0f} points{around}"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
