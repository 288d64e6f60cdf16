"""Create one TuningRun from inside a Job; the CronJob of spec.tuning.nightly does it so.

  trimtab-tuner start --namespace NS --service NAME --job JOB

The run is named after the job, so that a job that is tried again makes no second run: one that is there already counts as made. Its
operator does the rest. Exit status: 0 the run exists, 1 the API server cannot be used or does not allow it (another try may do
better), 2 the run is not valid.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

from trimtab_tuner.cluster.kube import RUN, Denied, NotFound, Unavailable, connect
from trimtab_tuner.errors import InputError

Json = dict[str, Any]
MAX_NAME = 52  # of a TuningRun
GROUP = "serving.trimtab.dev"
EVALUATORS = ("Simulator", "Shadow", "Live")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags; defaults are the TuningRun's own."""
    parser.add_argument("--namespace", required=True, metavar="NS", help="of service and run")
    parser.add_argument("--service", required=True, metavar="NAME", help="InferenceService to tune")
    parser.add_argument(
        "--job", required=True, metavar="JOB", help="name of this job, from which the run has its own"
    )
    parser.add_argument("--service-uid", metavar="UID", help="the run is deleted with this very service")
    parser.add_argument("--evaluator", choices=EVALUATORS, help="how candidates are measured (default Live)")
    parser.add_argument("--max-trials", type=int, metavar="N", help="candidates at most (default 20)")
    parser.add_argument("--time-limit", metavar="TIME", help="end of the run, as 2h or 90m (default 2h)")
    parser.add_argument(
        "--trace-config-map",
        metavar="NAME",
        help="replay a trace of this ConfigMap (default: recorded traffic)",
    )
    parser.add_argument("--trace-key", metavar="KEY", help="key of it (default trace.jsonl)")
    parser.add_argument(
        "--kubeconfig", metavar="FILE", help="outside of a cluster (default: the pod's account)"
    )


def main(args: argparse.Namespace) -> int:
    """Create it."""
    made = manifest(args)
    where = f"{args.namespace}/{made['metadata']['name']}"
    try:
        new = connect(args.kubeconfig).create(RUN, args.namespace, made)
    except (Denied, NotFound, Unavailable) as error:
        print(f"trimtab-tuner start: TuningRun {where} was not made: {error}", file=sys.stderr)
        return 1
    print(
        f"TuningRun {where} was made"
        if new
        else f"TuningRun {where} exists already; a job of another name makes another"
    )
    return 0


def run_name(service: str, job: str) -> str:
    """`chat-29401470` for job `chat-nightly-29401470` of the schedule, `chat-try` for a person's job `try`."""
    own = job.removeprefix(f"{service}-nightly-").removeprefix(f"{service}-")
    name = f"{service}-{own}"
    if len(name) <= MAX_NAME:
        return name
    mark = hashlib.sha256(job.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9].rstrip('-.')}-{mark}"


def manifest(args: argparse.Namespace) -> Json:
    """The TuningRun."""
    if args.trace_key is not None and args.trace_config_map is None:
        raise InputError("--trace-key", args.trace_key, "it needs --trace-config-map")
    labels = {f"{GROUP}/inferenceservice": args.service, f"{GROUP}/origin": "nightly"}
    metadata: Json = {"name": run_name(args.service, args.job), "namespace": args.namespace, "labels": labels}
    if args.service_uid:
        owner = {
            "apiVersion": RUN.api_version,
            "kind": "InferenceService",
            "name": args.service,
            "uid": args.service_uid,
        }
        metadata["ownerReferences"] = [owner]
    spec: Json = {"service": args.service}
    for name, value in (
        ("evaluator", args.evaluator),
        ("maxTrials", args.max_trials),
        ("timeLimit", args.time_limit),
    ):
        if value is not None:
            spec[name] = value
    if args.trace_config_map is not None:
        reference = {"name": args.trace_config_map}
        if args.trace_key is not None:
            reference["key"] = args.trace_key
        spec["workload"] = {"type": "Trace", "traceRef": reference}
    return {"apiVersion": RUN.api_version, "kind": RUN.name, "metadata": metadata, "spec": spec}
