"""`trimtab-operator`: parses the command line and calls one of run, local, render, validate. The only module that does.

Exit codes: 0 done, 1 an error of ours, 2 wrong input (with one line for each finding: path, value, what is allowed).
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from trimtab_operator import documents, render, schema, support
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import Resolved
from trimtab_operator.errors import Finding, OperatorError, Waiting
from trimtab_operator.names import RUN_KIND
from trimtab_operator.plan.manifests import Context
from trimtab_operator.plan.tuner_pod import Tuner

_EPILOG = """\
examples:
  trimtab-operator validate -f examples/chat.yaml
  trimtab-operator local -f examples/chat.yaml
  trimtab-operator run --all-namespaces
  trimtab-operator render -f chat.yaml --diff chat.old.yaml
"""

_RUN = """\
Serve the InferenceServices of a cluster, in a pod or beside one. Of several operators the one that holds the Lease acts.
"""

_LOCAL = """\
Serve one InferenceService from a file on this machine: engines are processes behind one address, and the control port
answers status, live config and tuning for the whole service.

Edits of the file are followed: live fields change between two steps, without a restart; other fields replace the engines one
after another, and nothing accepted is dropped. An invalid edit changes nothing and says why. Ctrl-C drains and leaves nothing
running.
"""


_RENDER = """\
Print the Kubernetes manifests of a service, or with --diff what an edit would do: every changed field, whether it is
taken live or restarts engines, and why. Needs no cluster and changes nothing.

  trimtab-operator render -f examples/gpu.yaml
  trimtab-operator render -f chat.yaml --diff chat.old.yaml
"""

_VALIDATE = """\
Judge a file by the CRD's schema and rules, as the API server does. All findings come at once, one a line: path, value,
what is allowed. Exit code 2 when there is one. What is valid but not served yet is said too.
"""


class _Help(argparse.HelpFormatter):
    """Paragraphs filled to the terminal's width; those with indented lines (examples) as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in f"\n{p}" else textwrap.fill(p, width) for p in parts)


class _Once(argparse.Action):
    """Takes one value. Unlike kubectl we act on one file; of two, argparse alone would silently take the last."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice; name one file a call")
        setattr(namespace, self.dest, values)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """All commands. The options of `run` and `local` are declared only for the one that is the `command`: their parts load
    slowly."""
    parser = argparse.ArgumentParser(
        prog="trimtab-operator",
        description="Serve language models from InferenceService resources.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"trimtab-operator {version('trimtab')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = commands.add_parser(
        "run",
        help="serve the InferenceServices of a cluster",
        description=_RUN,
        formatter_class=_Help,
    )
    if command == "run":
        from trimtab_operator.cluster.main import add_arguments as add_run_arguments

        add_run_arguments(running)
    local = commands.add_parser(
        "local",
        help="serve one InferenceService from a file on this machine",
        description=_LOCAL,
        formatter_class=_Help,
    )
    _add_file(local, "one InferenceService; edits are followed")
    if command == "local":
        from trimtab_operator.local.main import add_arguments

        add_arguments(local)
    rendering = commands.add_parser(
        "render",
        help="show what would be applied, or what a change would restart",
        description=_RENDER,
        formatter_class=_Help,
    )
    _add_file(rendering, "one InferenceService")
    rendering.add_argument(
        "--diff",
        type=Path,
        metavar="OLD",
        help="do not print manifests; show what changes from OLD to FILE, and why",
    )
    rendering.add_argument(
        "--image",
        default=f"trimtab/engine:{version('trimtab')}",
        help="engine image for a spec that names none (%(default)s)",
    )
    rendering.add_argument(
        "--tuner-image",
        default=f"trimtab/tuner:{version('trimtab')}",
        help="image of what makes nightly runs (%(default)s)",
    )
    rendering.add_argument(
        "--generation", type=int, default=1, metavar="N", help="number of the live document (%(default)s)"
    )
    validation = commands.add_parser(
        "validate",
        help="judge a file by the CRD's schema and rules",
        description=_VALIDATE,
        formatter_class=_Help,
    )
    _add_file(validation, "one InferenceService or TuningRun")
    validation.add_argument(
        "--old", type=Path, metavar="OLD", help="judge FILE as an update of OLD (rules on what may change)"
    )
    return parser


def _add_file(parser: argparse.ArgumentParser, holds: str) -> None:
    parser.add_argument(
        "-f",
        "--filename",
        type=Path,
        action=_Once,
        required=True,
        metavar="FILE",
        help=f"YAML file with {holds}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console script."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser(words[0] if words else None).parse_args(words)
    try:
        if arguments.command == "run":
            from trimtab_operator.cluster.main import run as run_in_cluster

            return run_in_cluster(arguments)
        if arguments.command == "local":
            from trimtab_operator.local.main import run

            return run(arguments)
        return _render(arguments) if arguments.command == "render" else _validate(arguments)
    except OperatorError as error:
        print(f"trimtab-operator: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 1


def _render(arguments: argparse.Namespace) -> int:
    if arguments.diff is not None:
        old = schema.load_service(arguments.diff)
        new = schema.load_service(arguments.filename, old)
        sys.stdout.write(render.difference(old, new))
        return 0
    service = schema.load_service(arguments.filename)
    support.check(service, "cluster")
    for finding in support.later(service):
        print(f"{arguments.filename}: {finding}", file=sys.stderr)
    context = Context(resolved=Resolved(image=arguments.image), generation=arguments.generation)
    sys.stdout.write(render.render(service, context, Tuner(arguments.tuner_image)))
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    old = None
    if arguments.old is not None:
        before, named = documents.read(arguments.old)
        old = schema.validate(before, what=named)
    resource, what = documents.read(arguments.filename)
    full = schema.validate(resource, old, None if old is None else old["kind"], what)
    findings: tuple[Finding, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    if full["kind"] == RUN_KIND:
        TuningRun.parse(full)  # raises what the schema cannot say
    else:
        service = InferenceService.parse(full)
        findings, waiting = support.findings(service, "cluster"), support.later(service)
    for finding in findings:
        print(f"{what}: not carried out yet: {finding}", file=sys.stderr)
    for finding in waiting:
        print(f"{what}: {finding}", file=sys.stderr)
    print(f'{what}: {full["kind"]} "{full["metadata"]["name"]}" is valid')
    return 0


if __name__ == "__main__":
    sys.exit(main())
