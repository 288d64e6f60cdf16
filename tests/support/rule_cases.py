"""An example and a counterexample of each CEL rule of both CRDs. Tried in local mode (`tests/contract`) and at a real API server
(`tests/cluster`), which must agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from support.services import BUDGET_PARAMETER, SMALLEST, resource, run_resource
from trimtab_operator import names


class Case(NamedTuple):
    """`message` begins the rule's message; `good` and `bad` are resources, `old` what an update starts from."""

    message: str
    good: dict[str, Any]
    bad: dict[str, Any]
    old: dict[str, Any] | None = None


def named(name: str, built: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**(built or resource()), "metadata": {"name": name}}


def target(name: str = "web") -> dict[str, Any]:
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    return {**SMALLEST, "spec": {"targetRef": reference}}


def parameters(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"tuning.parameters": list(entries)}


POLICY: dict[str, Any] = {"name": "schedulingPolicy", "choices": ["fcfs"]}
SEVEN: list[dict[str, Any]] = [{"name": f"c{i}"} for i in range(7)]


def nightly(**fields: object) -> dict[str, Any]:
    return {"nightly": {"schedule": "@daily", **fields}, "parameters": [POLICY]}


CASES = {
    names.SERVICE_KIND: [
        Case("metadata.name must be at most", named("a" * 40), named("a" * 41)),
        Case("metadata.name must begin", named("a-1"), named("1-a")),
        Case("metadata.name must begin", named("chat"), named("chat.eu")),
        Case("exactly one of", resource(), {**SMALLEST, "spec": {}}),
        Case("exactly one of", target(), resource(targetRef=target()["spec"]["targetRef"])),
        Case("a service cannot change between", resource(replicas=2), target(), old=resource()),
        Case(
            "tuning.parameters max",
            resource(**parameters({**BUDGET_PARAMETER, "max": 8192})),
            resource(**parameters({**BUDGET_PARAMETER, "max": 8193})),
        ),
        Case(
            "tuning.parameters max",
            resource(**parameters({"name": "maxNumSeqs", "min": 1, "max": 256}, POLICY)),
            resource(**parameters({"name": "maxNumSeqs", "min": 1, "max": 257}, POLICY)),
        ),
        Case(
            "tuning.parameters max",
            resource(**parameters({"name": "longPrefillTokenThreshold", "min": 0, "max": 8192})),
            resource(**parameters({"name": "longPrefillTokenThreshold", "min": 0, "max": 8193})),
        ),
        Case(
            "revision is allowed",
            resource(**{"model.uri": "hf://a/b", "model.revision": "main"}),
            resource(**{"model.revision": "main"}),
        ),
        Case(
            "tokenSecretRef is allowed",
            resource(**{"model.uri": "hf://a/b", "model.tokenSecretRef": {"name": "s"}}),
            resource(**{"model.tokenSecretRef": {"name": "s"}}),
        ),
        Case(
            "claimName and sizeLimit",
            resource(**{"model.cache.claimName": "c"}),
            resource(**{"model.cache": {"claimName": "c", "sizeLimit": "1Gi"}}),
        ),
        Case("targetRef cannot change", target(), target("other"), old=target()),
        Case(
            "maxNumBatchedTokens must not exceed",
            resource(**{"engine.maxNumBatchedTokens": 8192}),
            resource(**{"engine.maxNumBatchedTokens": 8193}),
        ),
        Case(
            "maxNumSeqs must not exceed",
            resource(**{"engine.maxNumSeqs": 256}),
            resource(**{"engine.maxNumSeqs": 257}),
        ),
        Case(
            "maxNumBatchedTokens must be at least",
            resource(**{"engine.maxNumBatchedTokens": 64}),
            resource(**{"engine.maxNumBatchedTokens": 63}),
        ),
        Case(
            "longPrefillTokenThreshold must not",
            resource(**{"engine.longPrefillTokenThreshold": 8192}),
            resource(**{"engine.longPrefillTokenThreshold": 8193}),
        ),
        Case(
            "kvCacheMemory and gpuMemoryUtilization",
            resource(**{"engine.gpuMemoryUtilization": 0.5}),
            resource(**{"engine.gpuMemoryUtilization": 0.5, "engine.kvCacheMemory": "1Gi"}),
        ),
        Case(
            "tensorParallelSize above 1",
            resource(**{"engine.tensorParallelSize": 2, "engine.runtime": "vllm"}),
            resource(**{"engine.tensorParallelSize": 2}),
        ),
        Case(
            "extraArgs must not repeat",
            resource(**{"engine.extraArgs": ["--seed=1", "--portable", "--device", "cpu"]}),
            resource(**{"engine.extraArgs": ["--seed=1", "--port=1"]}),
        ),
        Case(
            "extraArgs must not repeat",
            resource(**{"engine.extraArgs": ["--num-threads=2"]}),
            resource(**{"engine.extraArgs": ["--max-num-seqs", "9"]}),
        ),
        Case(  # a line's end is where regular expressions of two languages differ
            "extraArgs must not repeat",
            resource(**{"engine.extraArgs": ["--ports=1\n", "x--port", "--port_x"]}),
            resource(**{"engine.extraArgs": ["--port=1\n"]}),
        ),
        Case(
            "classes may hold at most",
            resource(**{"slo.classes": [*SEVEN, {"name": "default"}]}),
            resource(**{"slo.classes": [*SEVEN, {"name": "c7"}]}),
        ),
        Case(
            "a mode other than Off",
            resource(tuning={"mode": "Apply", "parameters": [POLICY]}),
            resource(**{"tuning.mode": "Recommend"}),
        ),
        Case(
            "nightly needs",
            resource(tuning=nightly()),
            resource(tuning={"nightly": nightly()["nightly"]}),
        ),
        Case(
            "schedulingPolicy takes choices",
            resource(**parameters(POLICY)),
            resource(**parameters({"name": "schedulingPolicy", "min": 1, "max": 2})),
        ),
        Case(
            "schedulingPolicy takes choices",
            resource(**parameters(BUDGET_PARAMETER)),
            resource(**parameters({"name": "maxNumBatchedTokens", "max": 2})),
        ),
        Case(
            "min must not exceed max",
            resource(**parameters({"name": "maxNumSeqs", "min": 8, "max": 8})),
            resource(**parameters({"name": "maxNumSeqs", "min": 9, "max": 8})),
        ),
        Case(
            "min must be at least 1",
            resource(**parameters({"name": "longPrefillTokenThreshold", "min": 0, "max": 8})),
            resource(**parameters({"name": "maxNumSeqs", "min": 0, "max": 8})),
        ),
        Case(
            "drift.enabled needs",
            resource(tuning={"drift": {"enabled": True}, "parameters": [POLICY]}),
            resource(tuning={"drift": {"enabled": True}}),
        ),
        Case(
            "drift.enabled needs",
            resource(tuning={"drift": {"enabled": False}}),
            resource(tuning={"drift": {"enabled": True}, "parameters": []}),
        ),
        Case(
            "traceRef is allowed only",
            resource(tuning=nightly(workload="Trace", traceRef={"name": "t"})),
            resource(tuning=nightly(traceRef={"name": "t"})),
        ),
        Case(
            "workload Trace needs",
            resource(tuning=nightly(workload="Trace", traceRef={"name": "t"})),
            resource(tuning=nightly(workload="Trace")),
        ),
        Case(
            "maxSurge and maxUnavailable",
            resource(rollout={"maxSurge": 0, "strategy": "Recreate"}),
            resource(rollout={"maxSurge": 0}),
        ),
        Case(
            "minAvailable and maxUnavailable",
            resource(**{"podDisruptionBudget.minAvailable": 1}),
            resource(podDisruptionBudget={"minAvailable": 1, "maxUnavailable": 1}),
        ),
    ],
    names.RUN_KIND: [
        Case(
            "metadata.name must be at most",
            named("a" * 52, run_resource()),
            named("a" * 53, run_resource()),
        ),
        Case(
            "spec of a TuningRun cannot change",
            run_resource(),
            run_resource(maxTrials=3),
            old=run_resource(),
        ),
        Case(
            "schedulingPolicy takes choices",
            run_resource(parameters=[POLICY]),
            run_resource(parameters=[{"name": "schedulingPolicy"}]),
        ),
        Case(
            "min must not exceed max",
            run_resource(parameters=[{"name": "maxNumSeqs", "min": 8, "max": 8}]),
            run_resource(parameters=[{"name": "maxNumSeqs", "min": 9, "max": 8}]),
        ),
        Case(
            "min must be at least 1",
            run_resource(parameters=[{"name": "maxNumSeqs", "min": 1, "max": 8}]),
            run_resource(parameters=[{"name": "maxNumSeqs", "min": 0, "max": 8}]),
        ),
        Case(
            "workload.traceRef is allowed only",
            run_resource(workload={}),
            run_resource(workload={"traceRef": {"name": "t"}}),
        ),
        Case(
            "workload.type Trace",
            run_resource(workload={"type": "Trace", "traceRef": {"name": "t"}}),
            run_resource(workload={"type": "Trace"}),
        ),
    ],
}
