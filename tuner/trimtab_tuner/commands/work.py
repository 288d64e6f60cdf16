"""Carry out one TuningRun of a cluster: what the operator's Job for a run does.

  trimtab-tuner work --namespace chat --run try
  trimtab-tuner work --namespace chat --run try --prometheus http://prometheus:9090 --kubeconfig ~/.kube/config

Everything else is said by the run and by the service that it names. Candidates and results go into the run's status; the operator
puts them in force. Started again, it goes on with the trials that the status has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import yaml

from trimtab_tuner.cluster import kube, records, worker
from trimtab_tuner.cluster.plan import Engines
from trimtab_tuner.errors import InputError, TunerError
from trimtab_tuner.run_view import RunView

API_KEY_VARIABLE = "TRIMTAB_API_KEY"
KEY_NAME = "trimtab-tuner"  # the tenant that replayed requests then belong to
TERMINATION_LOG = Path("/dev/termination-log")
STOPPED = 128 + signal.SIGTERM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.add_argument("--namespace", required=True, metavar="NAME", help="of the run and its service")
    parser.add_argument("--run", required=True, metavar="NAME", help="the TuningRun")
    parser.add_argument(
        "--prometheus", metavar="URL", help="read metrics there (default: scrape the service's pods)"
    )
    parser.add_argument(
        "--tokens", metavar="FILE", help="read tokens by pod UID, for evaluators that need workload records"
    )
    parser.add_argument("--trace", metavar="FILE", help="the trace of spec.workload.traceRef")
    parser.add_argument(
        "--url", metavar="URL", help="where a Live run replays it to (default: the service by its name)"
    )
    parser.add_argument(
        "--engines",
        metavar="N@URL",
        help="number and address of the engines that a Shadow run has of its own",
    )
    parser.add_argument(
        "--kubeconfig", metavar="FILE", help="how to reach the cluster (default: the pod's ServiceAccount)"
    )
    parser.add_argument(
        "--api-keys",
        metavar="FILE",
        help=f"the service's API keys by name; a replay takes the one named {KEY_NAME}, or else the first",
    )
    parser.epilog = (
        f"Without --api-keys a replay takes the key in the environment variable {API_KEY_VARIABLE}."
    )


def main(args: argparse.Namespace) -> int:
    """Carry it out. Exit status 0: a result is in the run's status, or nothing was left to do; 1: try again; 2: wrong flags;
    143: stopped by SIGTERM."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="  %(levelname)s %(message)s")
    try:
        orders = worker.Orders(
            args.namespace,
            args.run,
            prometheus=args.prometheus,
            trace=None if args.trace is None else Path(args.trace),
            url=args.url,
            tokens=records.load_tokens(None if args.tokens is None else Path(args.tokens)),
            api_key=(os.environ.get(API_KEY_VARIABLE) or None)
            if args.api_keys is None
            else api_key(Path(args.api_keys)),
            engines=None if args.engines is None else _engines(args.engines),
        )
        with RunView() as view:
            said = asyncio.run(_until_stopped(kube.connect(args.kubeconfig), orders, view))
    except TunerError as error:
        _last_words(str(error))
        if isinstance(error, InputError):
            raise  # exit status 2: another try would end alike
        print(f"  error: {error}", file=sys.stderr)
        return 1
    if said is None:
        _last_words("stopped by SIGTERM")
        return STOPPED
    print(f"  {said}", file=sys.stderr)
    return 0


def api_key(path: Path) -> str:
    """One of the keys in a file as engines take it (JSON or YAML, name: key). Raises InputError without telling what it holds."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InputError("--api-keys", str(path), f"a readable YAML file ({type(error).__name__})") from None
    if not isinstance(found, dict) or not found or not all(isinstance(key, str) for key in found.values()):
        raise InputError("--api-keys", str(path), "an object from name to key")
    return str(found.get(KEY_NAME) or next(iter(found.values())))


def _engines(text: str) -> Engines:
    count, at, url = text.partition("@")
    if not (at and url and count.isdigit() and int(count) > 0):
        raise InputError("--engines", text, "N@URL such as 2@http://10.96.0.9:8000")
    return Engines(url, int(count))


async def _until_stopped(api: kube.Kube, orders: worker.Orders, view: RunView) -> str | None:
    """None when SIGTERM came first; the candidate is given back before that is said."""
    task = asyncio.ensure_future(worker.work(api, orders, view))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


def _last_words(text: str) -> None:
    """The termination message of the container, where there is one: its last line is the cause."""
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(text.replace("\n", " ") + "\n")
