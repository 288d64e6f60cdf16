"""The resources as frozen dataclasses: parse once at the edge, trust the types after it."""

from trimtab_operator.api.run import InvalidRun, RunSpec, RunStatus, TuningRun, read_run
from trimtab_operator.api.service import (
    Ceilings,
    Engine,
    InferenceService,
    Metadata,
    Model,
    Parameter,
    ResolvedClass,
    Rollout,
    ServiceSpec,
    Slo,
    SloClass,
    Tuning,
)
from trimtab_operator.api.status import Recommendation

__all__ = [
    "Ceilings",
    "Engine",
    "InferenceService",
    "InvalidRun",
    "Metadata",
    "Model",
    "Parameter",
    "Recommendation",
    "ResolvedClass",
    "Rollout",
    "RunSpec",
    "RunStatus",
    "ServiceSpec",
    "Slo",
    "SloClass",
    "Tuning",
    "TuningRun",
    "read_run",
]
