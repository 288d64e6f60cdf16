"""InferenceService's spec as frozen dataclasses, parsed once at the edge and trusted after it.

Defaults and bounds are the CRD's (`crds/inferenceservice.yaml`); `tests/contract` holds the two equal, and both equal to the
engine's. Units are in the names: durations became seconds, quantities bytes. Used by `schema`, `plan` and both shells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_operator import cron
from trimtab_operator.api.parse import decode, duration, required_duration, size
from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.names import ENGINE_CONTAINER

POLICIES = ("fcfs", "priority", "sla-aware")
TUNABLE = ("maxNumBatchedTokens", "maxNumSeqs", "schedulingPolicy", "longPrefillTokenThreshold")


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A key of a Secret (or ConfigMap) of the same namespace. The default key depends on the place; see the CRD."""

    name: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Where downloaded or converted weights are kept; neither set: an emptyDir per pod."""

    claim_name: str | None = None
    size_limit_bytes: int | None = size("sizeLimit")


@dataclass(frozen=True, slots=True)
class Model:
    """Which weights to serve."""

    uri: str
    revision: str | None = None
    served_name: str | None = None
    cache: ModelCache = field(default_factory=ModelCache)
    token_secret_ref: SecretKey | None = None


@dataclass(frozen=True, slots=True)
class TargetRef:
    """A server of the user's own: read and tuned, never written."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Buffers are sized by these at start; live values stay under them."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True)
class ImagePullSecret:
    """One registry credential, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Engine:
    """How each engine runs. The first five are live start values; everything else restarts."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    priority_aging_s: float = duration("priorityAging", "30s", "0", "24h")
    runtime: str = "trimtab"
    image: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[ImagePullSecret, ...] = ()
    extra_args: tuple[str, ...] = ()
    ceilings: Ceilings = field(default_factory=Ceilings)
    max_model_len: int | None = None
    dtype: str = "auto"
    kv_block_size: int = 16
    kv_cache_memory_bytes: int | None = size("kvCacheMemory")
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    max_queued_requests: int = 512


@dataclass(frozen=True, slots=True)
class SloClass:
    """One class of requests; what is None is inherited from `Slo`."""

    name: str
    ttft_s: float | None = duration("ttft", None, "1ms", "1h")
    itl_s: float | None = duration("itl", None, "1ms", "1h")
    objective: float | None = None


@dataclass(frozen=True, slots=True)
class TrustedHeaders:
    """Request headers that a gateway sets and clients cannot."""

    slo_class: str | None = field(default=None, metadata={"wire": "class"})
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class ResolvedClass:
    """One class with everything inherited."""

    name: str
    ttft_s: float
    itl_s: float
    objective: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of the service."""

    objective: float = 99.0
    window_s: float = duration("window", "5m", "1m", "24h")
    ttft_s: float = duration("ttft", "1s", "1ms", "1h")
    itl_s: float = duration("itl", "100ms", "1ms", "1h")
    default_class: str = "default"
    trusted_headers: TrustedHeaders = field(default_factory=TrustedHeaders)
    classes: tuple[SloClass, ...] = ()

    def resolved_classes(self) -> tuple[ResolvedClass, ...]:
        """All classes, the default one included, first, when it is not listed."""
        listed = tuple(
            ResolvedClass(
                c.name,
                self.ttft_s if c.ttft_s is None else c.ttft_s,
                self.itl_s if c.itl_s is None else c.itl_s,
                self.objective if c.objective is None else c.objective,
            )
            for c in self.classes
        )
        if any(c.name == self.default_class for c in listed):
            return listed
        return (ResolvedClass(self.default_class, self.ttft_s, self.itl_s, self.objective), *listed)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One knob that is searched: `minimum` to `maximum`, or `choices` for the policy."""

    name: str
    minimum: int | None = field(default=None, metadata={"wire": "min"})
    maximum: int | None = field(default=None, metadata={"wire": "max"})
    choices: tuple[str, ...] = ()

    def allows(self, value: object) -> bool:
        """Whether `value` lies within the bounds."""
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return (self.minimum is None or self.minimum <= value) and (
            self.maximum is None or value <= self.maximum
        )

    def range_text(self) -> str:
        """The bounds in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"an integer from {self.minimum} to {self.maximum}"


@dataclass(frozen=True, slots=True)
class Nightly:
    """A TuningRun on a schedule."""

    schedule: str
    time_zone: str | None = None
    suspend: bool = False
    max_trials: int = 20
    time_limit_s: float = duration("timeLimit", "2h", "1m", "24h")
    starting_deadline_s: float = duration("startingDeadline", "1h", "1m", "24h")
    workload: str = "Recorded"
    trace_ref: SecretKey | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """A TuningRun when the service leaves its targets for `windows` SLO windows in a row."""

    enabled: bool = False
    windows: int = 3


@dataclass(frozen=True, slots=True)
class QuietTime:
    """A recurring time in which no candidate is applied."""

    schedule: str
    duration_s: float = required_duration("duration", "1m", "24h")
    time_zone: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may cost."""

    canary_pods: int = 1
    extra_replicas: int = 0
    max_throughput_loss: str = "3%"
    not_during: tuple[QuietTime, ...] = ()

    @property
    def max_throughput_loss_fraction(self) -> float:
        """`3%` as 0.03."""
        return float(self.max_throughput_loss.rstrip("%")) / 100


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the tuner may do, and within which bounds."""

    mode: str = "Off"
    parameters: tuple[Parameter, ...] = ()
    nightly: Nightly | None = None
    drift: Drift = field(default_factory=Drift)
    run_history_limit: int = 10
    limits: Limits = field(default_factory=Limits)

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name, or None."""
        return next((p for p in self.parameters if p.name == name), None)


@dataclass(frozen=True, slots=True)
class Rollout:
    """How engines are replaced."""

    strategy: str = "Auto"
    max_surge: int = 1
    max_unavailable: int = 0
    drain_timeout_s: float = duration("drainTimeout", "60s", "1s", "1h")
    progress_deadline_s: float = duration("progressDeadline", "10m", "1s", "24h")
    upgrade_policy: str = "Manual"


@dataclass(frozen=True, slots=True)
class ServicePort:
    """The Kubernetes Service in front of the engines."""

    type: str = "ClusterIP"
    port: int = 8000
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """Who reaches the pods."""

    enabled: bool = True
    ingress_from: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Security:
    """Who may call the engines."""

    api_key_secret_ref: SecretKey | None = None
    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy)


@dataclass(frozen=True, slots=True)
class Monitor:
    """One object of the Prometheus operator; `enabled` None: where its CRD exists."""

    enabled: bool | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Monitoring:
    """Objects of the Prometheus operator."""

    pod_monitor: Monitor = field(default_factory=Monitor)
    prometheus_rule: Monitor = field(default_factory=Monitor)


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """Bound of voluntary evictions; neither number set: maxUnavailable 1."""

    enabled: bool = True
    min_available: int | None = None
    max_unavailable: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What is wanted. Exactly one of `model` and `target_ref` is set."""

    model: Model | None = None
    target_ref: TargetRef | None = None
    replicas: int = 1
    engine: Engine = field(default_factory=Engine)
    slo: Slo = field(default_factory=Slo)
    tuning: Tuning = field(default_factory=Tuning)
    rollout: Rollout = field(default_factory=Rollout)
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    service: ServicePort = field(default_factory=ServicePort)
    security: Security = field(default_factory=Security)
    monitoring: Monitoring = field(default_factory=Monitoring)
    pod_disruption_budget: DisruptionBudget = field(default_factory=DisruptionBudget)
    startup_timeout_s: float = duration("startupTimeout", "30m", "10s", "24h")
    suspend: bool = False

    @property
    def wanted_replicas(self) -> int:
        """Replicas after `suspend`."""
        return 0 if self.suspend else self.replicas

    @property
    def engine_container(self) -> Mapping[str, Any]:
        """The container `engine` of `pod_template`, or an empty mapping."""
        containers = self.pod_template.get("spec", {}).get("containers", [])
        return next((c for c in containers if c.get("name") == ENGINE_CONTAINER), {})


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the operator reads of the standard object metadata."""

    name: str
    namespace: str = "default"
    generation: int = 1
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


@dataclass(frozen=True, slots=True)
class InferenceService:
    """One parsed resource. `raw` is the defaulted wire form it came from, which diffs and transition rules compare."""

    metadata: Metadata
    spec: ServiceSpec
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """`metadata.namespace`."""
        return self.metadata.namespace

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> InferenceService:
        """From a defaulted, schema-checked resource; raises InvalidResource with every finding (ranges of durations,
        schedules, shape of podTemplate) that the schema language cannot say."""
        errors: list[Finding] = []
        metadata = decode(Metadata, resource.get("metadata"), "metadata", errors)
        spec = decode(ServiceSpec, resource.get("spec"), "spec", errors)
        if spec is not None:
            _check_pod_template(spec.pod_template, errors)
            _check_schedules(spec.tuning, errors)
        if errors or metadata is None or spec is None:
            name = metadata.name if metadata is not None else "?"
            raise InvalidResource(errors, f'InferenceService "{name}"')
        return cls(metadata, spec, resource)


def _check_schedules(tuning: Tuning, errors: list[Finding]) -> None:
    """Cron lines and zones: the schema's pattern takes more than there is."""
    timed: list[tuple[str, Nightly | QuietTime]] = [
        (f"spec.tuning.limits.notDuring[{i}]", quiet) for i, quiet in enumerate(tuning.limits.not_during)
    ]
    if tuning.nightly is not None:
        timed.insert(0, ("spec.tuning.nightly", tuning.nightly))
    for where, entry in timed:
        try:
            cron.fields(entry.schedule)
        except ValueError as error:
            errors.append(Finding(f"{where}.schedule", entry.schedule, str(error)))
        try:
            cron.zone(entry.time_zone or "UTC")
        except ValueError as error:
            errors.append(Finding(f"{where}.timeZone", entry.time_zone, str(error)))


def _check_pod_template(template: Mapping[str, Any], errors: list[Finding]) -> None:
    """The little that the plan relies on; the API server's dry run judges the rest."""
    for section in ("metadata", "spec"):
        if section in template and not isinstance(template[section], Mapping):
            errors.append(Finding(f"spec.podTemplate.{section}", template[section], "an object"))
            return
    metadata = template.get("metadata", {})
    for kind in ("labels", "annotations"):
        texts = metadata.get(kind, {})
        where = f"spec.podTemplate.metadata.{kind}"
        if not isinstance(texts, Mapping) or not all(isinstance(v, str) for v in texts.values()):
            errors.append(Finding(where, texts, "an object of texts"))
    pod = template.get("spec", {})
    for kind in ("containers", "initContainers", "volumes"):
        listed = pod.get(kind, [])
        where = f"spec.podTemplate.spec.{kind}"
        if not isinstance(listed, list):
            errors.append(Finding(where, listed, "a list"))
            continue
        seen: set[str] = set()
        for index, item in enumerate(listed):
            name = item.get("name") if isinstance(item, Mapping) else None
            if not isinstance(name, str) or not name or name in seen:
                errors.append(Finding(f"{where}[{index}].name", name, "a name that no other entry has"))
            else:
                seen.add(name)
                if kind == "containers":
                    _check_container(item, f"{where}[{index}]", errors)


def _check_container(container: Mapping[str, Any], where: str, errors: list[Finding]) -> None:
    for kind in ("env", "volumeMounts", "ports"):
        listed = container.get(kind, [])
        if not isinstance(listed, list) or not all(isinstance(item, Mapping) for item in listed):
            errors.append(Finding(f"{where}.{kind}", listed, "a list of objects"))
    for kind in ("resources", "securityContext"):
        if not isinstance(container.get(kind, {}), Mapping):
            errors.append(Finding(f"{where}.{kind}", container[kind], "an object"))
    if container.get("name") == ENGINE_CONTAINER:
        for kind in ("command", "args", "image"):
            if kind in container:
                field_name = "spec.engine.image" if kind == "image" else "spec.engine.extraArgs"
                errors.append(Finding(f"{where}.{kind}", container[kind], f"left out: use {field_name}"))
