"""Every name that the operator gives or reads: group, labels, annotations, children, condition types and reasons.

Constants only, so that a word appears once in code, docs and cluster. Imports nothing of ours.
"""

from __future__ import annotations

import hashlib

GROUP = "serving.trimtab.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
SERVICE_KIND = "InferenceService"
RUN_KIND = "TuningRun"
MAX_SERVICE_NAME = 40  # CronJob names end at 52 characters, and children add a suffix
MAX_RUN_NAME = 52  # as the CRD has it
FIELD_MANAGER = "trimtab-operator"

# Labels and annotations
LABEL_SERVICE = f"{GROUP}/inferenceservice"
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
ANNOTATION_TUNING = f"{GROUP}/tuning"  # paused | reverted
ANNOTATION_TEMPLATE_HASH = f"{GROUP}/config-hash"
ANNOTATION_HIGHEST = f"{GROUP}/highest-generation"  # on the ConfigMap: above every number ever given
ANNOTATION_CANDIDATE = f"{GROUP}/candidate"  # on the ConfigMap: which candidate holds which number
ANNOTATION_APPLIED = f"{GROUP}/applied"  # digest of what was applied
ANNOTATION_BUILT = (
    f"{GROUP}/built"  # on the Deployment: the pod template as it was built, for operators that build others
)
ANNOTATION_WORKER = (
    f"{GROUP}/worker"  # on a TuningRun: none, when somebody else measures and writes its status
)
ANNOTATION_ENGINES = f"{GROUP}/engines"  # on a Shadow run's Deployment: how many it has while it may act
ANNOTATION_WORKER_SETTINGS = (
    f"{GROUP}/worker-settings"  # on a worker's Job: digest of what decides whether its pod gets to start
)
LABEL_RUN = f"{GROUP}/run"
LABEL_ORIGIN = f"{GROUP}/origin"  # on a TuningRun that no person made: nightly | drift
ENGINE_CONTAINER = "engine"
WORKER_CONTAINER = "worker"
WORKER_COMPONENT = "tuning-worker"
STARTER_CONTAINER = "start"
NIGHTLY_COMPONENT = "nightly"

# Conditions
READY = "Ready"
AVAILABLE = "Available"
RECONCILING = "Reconciling"
STALLED = "Stalled"
MODEL_LOADED = "ModelLoaded"
CONFIG_APPLIED = "ConfigApplied"
SLO_MET = "SLOMet"
TUNING_READY = "TuningReady"
DRIFT_DETECTED = "DriftDetected"
UPGRADE_AVAILABLE = "UpgradeAvailable"
MONITORING_READY = "MonitoringReady"

# Reasons. Good news
SERVING = "Serving"
ENDPOINTS_READY = "EndpointsReady"
LEAVING_POD_SERVES = "LeavingPodServes"
CONFIG_IN_FORCE = "ConfigInForce"
UP_TO_DATE = "UpToDate"
AS_EXPECTED = "AsExpected"
MODEL_IS_LOADED = "ModelLoaded"
# Under way
ROLLOUT_IN_PROGRESS = "RolloutInProgress"
SCALING_UP = "ScalingUp"
SCALING_DOWN = "ScalingDown"
DRAINING = "Draining"
MODEL_LOADING = "ModelLoading"
MODEL_DOWNLOADING = "ModelDownloading"
PARTIALLY_APPLIED = "PartiallyApplied"
SUSPENDED = "Suspended"
# Trouble
PODS_NOT_READY = "PodsNotReady"
NO_READY_PODS = "NoReadyPods"
PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
MODEL_LOAD_FAILED = "ModelLoadFailed"
INSUFFICIENT_GPU = "InsufficientGPU"
UNSCHEDULABLE = "Unschedulable"
IMAGE_PULL_FAILED = "ImagePullFailed"
ENGINE_CRASHED = "EngineCrashed"
CONTAINER_CONFIG_ERROR = "ContainerConfigError"
FAILED_MOUNT = "FailedMount"
PODS_NOT_CREATED = "PodsNotCreated"
NAME_TAKEN = "NameTaken"
KIND_NOT_FOUND = "KindNotFound"
API_DENIED = "ApiDenied"
API_UNAVAILABLE = "ApiUnavailable"
ENGINE_REJECTED = "EngineRejected"
INVALID_SPEC = "InvalidSpec"
UNSUPPORTED = "Unsupported"
# Targets
TARGETS_MET = "TargetsMet"
TARGETS_MISSED = "TargetsMissed"
NOT_ENOUGH_SAMPLES = "NotEnoughSamples"
METRICS_UNAVAILABLE = "MetricsUnavailable"
# Tuning
TUNING_OFF = "OffByMode"
TUNING_PAUSED = "Paused"
TUNING_REVERTED = "Reverted"
RECOMMENDATION_SUPERSEDED = "RecommendationSuperseded"
CANDIDATE_REFUSED = "CandidateRefused"
WAITING_FOR_TURN = "WaitingForTurn"
QUIET_TIME = "QuietTime"
SERVICE_NOT_FOUND = "ServiceNotFound"
SERVICE_NOT_SERVED = "ServiceNotServed"
TIME_LIMIT_REACHED = "TimeLimitReached"
RUN_CREATED = "RunCreated"
WAITING_FOR_RUN = "WaitingForRun"
COOLING_DOWN = "CoolingDown"
NOT_YET_SUPPORTED = "NotYetSupported"
WORKER_FAILED = "WorkerFailed"
NOT_ALLOWED_BY_SERVICE = "NotAllowedByService"
UPGRADE_HELD = "HeldByPolicy"

# A Shadow run's engines
SHADOW_NOT_READY = "ShadowNotReady"
SERVICE_CHANGED = "ServiceChanged"
MADE_ROOM = "MadeRoom"

#: Failures that time does not mend: a person has to change something.
FATAL_REASONS = frozenset({MODEL_LOAD_FAILED, IMAGE_PULL_FAILED, INVALID_SPEC, UNSUPPORTED, NAME_TAKEN})
#: What a pod waits for is not there (a Secret, a claim): it goes on by itself once somebody has made it.
MISSING_REASONS = frozenset({CONTAINER_CONFIG_ERROR, FAILED_MOUNT})

#: Reasons of Stalled with which nothing of the spec was carried out.
NOT_CARRIED_OUT_REASONS = frozenset({INVALID_SPEC, UNSUPPORTED, NAME_TAKEN, API_DENIED})


def selector(service: str) -> dict[str, str]:
    """Immutable labels that pick the engine pods of a service."""
    return {LABEL_SERVICE: service, LABEL_COMPONENT: "engine"}


def labels(service: str, component: str = "engine") -> dict[str, str]:
    """All labels of a child."""
    return {
        LABEL_NAME: "trimtab",
        LABEL_INSTANCE: service,
        LABEL_COMPONENT: component,
        LABEL_PART_OF: "trimtab",
        LABEL_MANAGED_BY: FIELD_MANAGER,
        LABEL_SERVICE: service,
    }


_SHADOW = ".shadow"  # no service's name has a dot


def shadow(run: str) -> str:
    """Deployment, Service and NetworkPolicy of a Shadow run's own engines."""
    return f"{run}-shadow"


def shadow_secret(run: str, uid: str) -> str:
    """Their Secret. It may be made and never be read, so no other run's, nor anybody's, may ever have that name."""
    return f"{shadow(run)}-{hashlib.sha256(uid.encode()).hexdigest()[:16]}"


def shadow_labels(service: str, run: str | None = None) -> dict[str, str]:
    """Labels of a Shadow run's engines and of what belongs to them; without `run`, those of every run of the service.

    Not one value is the service's own: whatever selects its engines (Service, budget, policy, monitor, autoscaler, a spread
    constraint, something that users made) never counts these.
    """
    shared = {LABEL_SERVICE: f"{service}{_SHADOW}", LABEL_COMPONENT: "shadow"}
    return shared if run is None else {**shared, LABEL_RUN: run}


def service_of_label(value: str) -> str:
    """The service that a value of LABEL_SERVICE is about."""
    return value.removesuffix(_SHADOW)


def deployment(service: str) -> str:
    """Deployment, and prefix of the pods."""
    return f"{service}-engine"


def service(service_name: str) -> str:
    """Service in front of the engines: the plain name, so that its address is easy to guess."""
    return service_name


def service_account(service: str) -> str:
    """ServiceAccount of the engine pods, without any right."""
    return f"{service}-engine"


def live_config_map(service: str) -> str:
    """ConfigMap that holds live.json."""
    return f"{service}-live"


def disruption_budget(service: str) -> str:
    """PodDisruptionBudget."""
    return f"{service}-engine"


def network_policy(service: str) -> str:
    """NetworkPolicy."""
    return f"{service}-engine"


def nightly(service: str) -> str:
    """CronJob of the runs on a schedule; its ServiceAccount, Role and RoleBinding."""
    return f"{service}-nightly"


def drift_run(service: str, since_s: float) -> str:
    """TuningRun for targets that are missed since that Unix time; a long service name is cut, and told apart by a digest."""
    suffix = f"-drift-{int(since_s // 60)}"
    if len(service) + len(suffix) <= MAX_RUN_NAME:
        return service + suffix
    mark = hashlib.sha256(service.encode()).hexdigest()[:8]
    return f"{service[: MAX_RUN_NAME - len(suffix) - 9].rstrip('-')}-{mark}{suffix}"


def pod_monitor(service: str) -> str:
    """PodMonitor."""
    return f"{service}-engine"


def prometheus_rule(service: str) -> str:
    """PrometheusRule."""
    return f"{service}-engine"


def worker(run: str) -> str:
    """Everything that a run's worker consists of: account, role, binding, Secret, Job."""
    return f"{run}-worker"
