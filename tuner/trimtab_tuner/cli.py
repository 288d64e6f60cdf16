"""The command `trimtab-tuner`: picks a subcommand and turns errors into one line. Knows no subcommand's work.

Each subcommand is a module in `commands/` with `add_arguments(parser)` and `main(args) -> exit status`. Only the chosen one is
imported, so that `replay` does not load optuna and `--help` loads nothing.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Protocol, cast

from .errors import TunerError

# name → what it does; the module is commands/<name>.py
COMMANDS = {
    "replay": "send a trace's requests to an OpenAI-compatible server and measure every token",
    "simulate": "the same on a simulated server: the engine's scheduler, modelled step times",
    "run": "tune a running service live, behind guardrails",
    "work": "carry out one TuningRun of a cluster; what its Job does",
    "start": "create a TuningRun from inside a Kubernetes job, as the nightly CronJob does",
    "report": "turn replay results and tuning runs into one page with plots and a JSON twin",
    "trace": "look at, convert and make request traces",
}
DESCRIPTION = "Replay traffic against a served model, measure every token, and tune the running engine for its tail latency."
EPILOG = "Exit status: 0 done, 1 measured but not as it should be, 2 wrong input, 130 stopped by Ctrl-C."


class _Help(argparse.HelpFormatter):
    """Paragraphs filled to the terminal's width; those with indented lines (examples) as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in f"\n{p}" else textwrap.fill(p, width) for p in parts)


class Command(Protocol):
    """What a module in `commands/` offers."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags, with help texts."""

    def main(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status. Raises TunerError."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((each for each in arguments if not each.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="trimtab-tuner", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"trimtab-tuner {version('trimtab')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    loaded: Command | None = None
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, add_help=name == chosen)
        if name == chosen:
            loaded = cast("Command", import_module(f"trimtab_tuner.commands.{name}"))
            subparser.formatter_class = _Help
            subparser.description = loaded.__doc__
            subparser.usage = "%(prog)s [options]"
            loaded.add_arguments(subparser)
    args = parser.parse_args(arguments)
    assert loaded is not None, "argparse refuses a missing or unknown command"
    try:
        return loaded.main(args)
    except TunerError as error:
        print(f"trimtab-tuner {chosen}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"trimtab-tuner {chosen}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
