"""Tables for terminals: one replay, several side by side, before and after. Rendering only; every number comes from `stats.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .quantiles import Interval
from .stats import Share, Summary
from .units import format_duration, format_durations

Row = tuple[str, Callable[[Summary], str]]


def rows() -> list[Row]:
    """What is said of a replay, in reading order; also the report's table."""
    return [
        ("requests", _requests),
        ("TTFT p50 / p90 / p99", lambda s: format_durations((s.ttft.p50, s.ttft.p90, s.ttft.p99))),
        ("ITL p50 / p90 / p99", lambda s: format_durations((s.itl.p50, s.itl.p90, s.itl.p99), "ms")),
        (
            "longest gap p50 / p90 / max",
            lambda s: format_durations((s.max_gap.p50, s.max_gap.p90, s.max_gap.max), "ms"),
        ),
        ("gaps measured (n of ITL)", lambda s: f"{s.itl.n:,}"),
        ("stalled requests", lambda s: f"{s.stalled_requests} of {s.n_due}"),
        ("TTFT target met", lambda s: _share(s.ttft_attainment)),
        ("ITL target met", lambda s: _share(s.itl_attainment)),
        ("goodput", lambda s: _share(s.attainment)),
        ("E2E p50 / p90", lambda s: format_durations((s.e2e.p50, s.e2e.p90))),
        ("output tokens/s, good", lambda s: f"{s.output_tokens_per_s:.1f}, {s.good_output_tokens_per_s:.1f}"),
        (
            "send error p50 / p99",
            lambda s: format_durations((s.send_error.p50, s.send_error.p99), "ms"),
        ),
    ]


def summary_table(summaries: Mapping[str, Summary], title: str | None = None) -> Group:
    """One column a replay; below it what was refused and why."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for label in summaries:
        table.add_column(label, justify="right")
    for name, text in rows():
        table.add_row(name, *(text(summary) for summary in summaries.values()))
    return Group(table, Text(caption(summaries.values()), style="dim"))


def caption(summaries: Iterable[Summary]) -> str:
    """Targets, and notes of quantiles that are not shown."""
    notes: dict[str, None] = {}
    for summary in summaries:
        slo = summary.slo
        notes[f"targets: TTFT {format_duration(slo.ttft_s)}, every gap {format_duration(slo.itl_s)}"] = None
        if summary.ttft.note:
            notes[f"TTFT: {summary.ttft.note}"] = None
        notes[
            "goodput: share of offered requests that met both targets; stalled: any gap over the target"
        ] = None
        if summary.n_cancelled:
            notes[f"{summary.n_cancelled} requests cut off by stopping are left out unless already late"] = (
                None
            )
    return "\n".join(notes)


def _requests(summary: Summary) -> str:
    failed = "".join(f", {count} {status}" for status, count in summary.failures.items())
    cut = f", {summary.n_cancelled} cut off" if summary.n_cancelled else ""
    return f"{summary.n_ok} of {summary.n_due} ok{failed}{cut}"


def _share(share: Share) -> str:
    if share.fraction is None:
        return "–"
    return f"{share.fraction:.0%}{_interval(share.interval)}"


def _interval(found: Interval | None) -> str:
    return "" if found is None else f" [{found.low:.0%}, {found.high:.0%}]"
