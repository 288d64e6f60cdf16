"""What all benchmarks share: provenance, spread, and the one JSON line that ends every run.

Used by the other files of this folder only. A benchmark prints progress to stderr, writes its table to
`docs/benchmarks/<name>.md` when asked (`--write`), and ends stdout with `emit(...)`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks"


def arguments(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that has `--write` and shows the benchmark's docstring as it is written."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write docs/benchmarks/{name}.md")
    return parser


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of repeats (not a confidence interval)."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def provenance(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, object]:
    """Where and with what a figure was measured."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    arguments = " ".join(sys.argv[1:])
    dirty = bool(_git("status", "--porcelain"))
    return {
        "command": f"make bench NAME={Path(sys.argv[0]).stem}"
        + (f' ARGS="{arguments}"' if arguments else ""),
        # What pages print: a figure of a changed tree says so wherever its commit stands.
        "commit": _git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else ""),
        "dirty": dirty,
        "python": platform.python_version(),
        "packages": found,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def made_by(before: Mapping[str, object], *more: object) -> str:
    """The last line of a table: command, commit, `more`, and the machine."""
    return f"Command: `{before['command']}` at commit {before['commit']}; {', '.join(map(str, (*more, before['cpu'])))}."


def emit(name: str, figures: dict[str, object], **context: object) -> None:
    """Print the last line: one JSON object with the figures at top level."""
    print(json.dumps({"benchmark": name, **figures, **context}, sort_keys=False), flush=True)


def write_table(name: str, text: str) -> Path:
    """Write `docs/benchmarks/<name>.md`; the text states caveats first and the command last."""
    DOCS.mkdir(parents=True, exist_ok=True)
    path = DOCS / f"{name}.md"
    path.write_text(text)
    return path


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
