"""Turn replay results and tuning runs into one page with plots and a JSON twin.

  trimtab-tuner report uniform=uniform.json bursty=bursty.json tuned/result.json after=after.json --out report.html

Each RESULT is a file written by `replay --out` or by `run --out` (result.json), optionally with a label. The labels
uniform, bursty, before and after say what to compare; without them, results of the same requests are matched by their
hashes. The page needs no network; report.json beside it holds every number with its provenance.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab_tuner import page
from trimtab_tuner import report as reports
from trimtab_tuner.errors import InputError
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.tables import summary_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.add_argument(
        "results",
        nargs="*",
        metavar="[LABEL=]RESULT",
        help="replay result (.json, .json.gz) or a run's result.json",
    )
    parser.add_argument(
        "--run", metavar="FILE", help="result.json of a tuning run; the same as naming it among the results"
    )
    parser.add_argument(
        "--out",
        default="report.html",
        metavar="FILE",
        help="page to write; FILE.json is its twin (default report.html)",
    )
    parser.add_argument("--title", default="Trimtab report", help="heading of the page")


def main(args: argparse.Namespace) -> int:
    """Load, build, write, and print the table."""
    results, tuning = load([*args.results, *([args.run] if args.run else [])])
    report = reports.build(results, tuning, args.title)
    html, twin = page.write(report, args.out)
    if report.summaries:
        Console().print(summary_table(report.summaries))
    print(f"wrote {html} and {twin}", file=sys.stderr)
    return 0


def load(arguments: list[str]) -> tuple[dict[str, ReplayResult], dict[str, Any] | None]:
    """Results by label, and the tuning run if one is among them. Raises InputError."""
    results: dict[str, ReplayResult] = {}
    tuning: dict[str, Any] | None = None
    for argument in arguments:
        label, equals, name = argument.partition("=")
        path = Path(name if equals else argument)
        if equals and not label:
            raise InputError("RESULT", argument, "LABEL=FILE or FILE")
        if _is_tuning(path):
            if tuning is not None:
                raise InputError("RESULT", argument, "only one tuning run in a report")
            tuning = reports.load_tuning(path)
            continue
        chosen = label if equals else path.name.removesuffix(".gz").removesuffix(".json")
        if chosen in results:
            raise InputError(
                "RESULT", argument, f"a label that is not taken; use LABEL=FILE ({chosen!r} is there already)"
            )
        results[chosen] = ReplayResult.load(path)
    return results, tuning


def _is_tuning(path: Path) -> bool:
    if path.suffix == ".gz":
        return False
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # the loader of replay results says what is wrong
    return isinstance(document, dict) and document.get("schema") == reports.TUNING_SCHEMA
