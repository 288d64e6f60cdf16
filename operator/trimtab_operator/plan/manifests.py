"""spec → the Kubernetes objects of one service, as dicts for server-side apply. Pure.

Every pod meets the `restricted` Pod Security level: non-root, read-only root, no capabilities, no service-account token. What a
user's podTemplate says is laid over it by Kubernetes' strategic merge keys, but for the labels that select the pods. Called by
`render` and the reconciler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from trimtab_operator import names
from trimtab_operator.api.service import InferenceService, ServiceSpec
from trimtab_operator.api.status import Recommendation, Resolved
from trimtab_operator.plan.drift import digest
from trimtab_operator.plan.engine_flags import PVC_MOUNT, Placement, engine_arguments, from_hub
from trimtab_operator.plan.live import Switch, live_document
from trimtab_operator.plan.objects import child as _object
from trimtab_operator.plan.overlay import overlay_pod_template
from trimtab_operator.plan.template import engine_environment, template_hash

SERVING_PORT = 8000
ADMIN_PORT = 8001
ENDPOINT_SPREAD_S = 5  # how long kube-proxies and gateways take to forget a leaving pod
HANDOVER_S = 300  # how long the only pod serves on after its deletion, at most, while the next one starts (plan.handover)
GRACE_MARGIN_S = 15  # for the engine to end by itself after its drain limit
USER_ID = 65532  # any non-root id: the image does not depend on it
LIVE_DIRECTORY = "/etc/trimtab/live"
KEYS_DIRECTORY = "/etc/trimtab/api-keys"
HUB_ENDPOINT_KEY, HUB_CA_KEY = "hub-endpoint", "hub-ca.pem"  # of the live ConfigMap
HOME = "/var/lib/trimtab"  # caches (converted weights, compiled kernels) live below it

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hub:
    """Where models of hf:// come from, as the operator was told. None: the public hub, the system's authorities."""

    endpoint: str | None = None
    ca_pem: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What the operator knows and the spec does not say."""

    resolved: Resolved = field(default_factory=Resolved)
    admin_public_key: str | None = None  # PEM; the operator's own
    operator_namespace: str = "trimtab-system"
    generation: int = 1  # of the live document
    recommendation: Recommendation | None = None
    hub: Hub = field(default_factory=Hub)
    fleet: Switch = field(default_factory=Switch)
    surge: int | None = None  # strategy Auto found no room: 0
    replicas: int | None = None  # strategy Recreate waits for old pods to be gone: 0
    template: Manifest | None = None  # the pods' template as it was built before; None: build it


def manifests(service: InferenceService, context: Context) -> list[Manifest]:
    """All children, in the order to apply them: the Deployment last, so that what it mounts is there."""
    built = [service_account(service), live_config_map(service, context), cluster_service(service)]
    if service.spec.security.network_policy.enabled:
        built.append(network_policy(service, context))
    budget = disruption_budget(service)
    if budget is not None:
        built.append(budget)
    built.append(deployment(service, context))
    return built


def service_account(service: InferenceService) -> Manifest:
    """An account without rights, whose token no pod mounts."""
    account = _object(service, "v1", "ServiceAccount", names.service_account(service.name))
    account["automountServiceAccountToken"] = False
    return account


def live_config_map(service: InferenceService, context: Context) -> Manifest:
    """live.json (the truth that survives restarts) and the key by which engines know the operator."""
    document = live_document(
        service.spec, context.generation, context.recommendation, service.metadata.annotations, context.fleet
    )
    built = _object(service, "v1", "ConfigMap", names.live_config_map(service.name))
    built["data"] = {"live.json": json.dumps(document, indent=2, sort_keys=True) + "\n"}
    if context.admin_public_key is not None:
        built["data"]["admin.pem"] = context.admin_public_key
    if from_hub(service.spec):
        # Here and not in the pod template, so that another hub restarts nobody who has a model.
        built["data"][HUB_CA_KEY] = context.hub.ca_pem or ""
        if context.hub.endpoint is not None:
            built["data"][HUB_ENDPOINT_KEY] = context.hub.endpoint
    return built


def cluster_service(service: InferenceService) -> Manifest:
    """The address of the OpenAI API. The admin port is reached pod by pod only."""
    built = _object(service, "v1", "Service", names.service(service.name))
    wanted = service.spec.service
    if wanted.annotations:
        built["metadata"]["annotations"] = dict(wanted.annotations)
    built["spec"] = {
        "type": wanted.type,
        "selector": names.selector(service.name),
        "ports": [
            {
                "name": "http",
                "port": wanted.port,
                "targetPort": "http",
                "protocol": "TCP",
                "appProtocol": "http",
            }
        ],
    }
    return built


def disruption_budget(service: InferenceService) -> Manifest | None:
    """None at one replica or fewer: a budget there would only block node drains."""
    wanted = service.spec.pod_disruption_budget
    if not wanted.enabled or service.spec.wanted_replicas <= 1:
        return None
    built = _object(service, "policy/v1", "PodDisruptionBudget", names.disruption_budget(service.name))
    built["spec"] = {
        "selector": {"matchLabels": names.selector(service.name)},
        # A pod that never gets ready must not block a drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    if wanted.min_available is not None:
        built["spec"]["minAvailable"] = wanted.min_available
    else:
        built["spec"]["maxUnavailable"] = 1 if wanted.max_unavailable is None else wanted.max_unavailable
    return built


def network_policy(service: InferenceService, context: Context) -> Manifest:
    """In: the serving port for `ingressFrom` and workers of tuning runs (or everyone), the admin port for the operator and those workers
    alone. Out: a download, or nothing."""
    serving: dict[str, Any] = {"ports": [{"port": "http", "protocol": "TCP"}]}
    peers = service.spec.security.network_policy.ingress_from
    mine = {names.LABEL_SERVICE: service.name, names.LABEL_COMPONENT: names.WORKER_COMPONENT}
    worker = {"podSelector": {"matchLabels": mine}}
    if peers:
        serving["from"] = [*(dict(peer) for peer in peers), worker]
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": context.operator_namespace}},
        "podSelector": {"matchLabels": {names.LABEL_COMPONENT: "operator", names.LABEL_PART_OF: "trimtab"}},
    }
    admin = {"ports": [{"port": "admin", "protocol": "TCP"}], "from": [operator, worker]}
    built = _object(service, "networking.k8s.io/v1", "NetworkPolicy", names.network_policy(service.name))
    built["spec"] = {
        "podSelector": {"matchLabels": names.selector(service.name)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [serving, admin],
        "egress": _egress(service.spec, context.hub) if from_hub(service.spec) else [],
    }
    return built


def _egress(spec: ServiceSpec, hub: Hub) -> list[Manifest]:
    """Names, and the hub's port anywhere: where it redirects a download to cannot be known."""
    own = [word.partition("=")[2] for word in spec.engine.extra_args if word.startswith("--hub-endpoint=")]
    own += [value for name, value in engine_environment(spec).items() if name == "HF_ENDPOINT"]
    ports = {443, *(_port(endpoint) for endpoint in (hub.endpoint, *own) if endpoint is not None)}
    return [
        {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
        {"ports": [{"port": port, "protocol": "TCP"} for port in sorted(ports)]},
    ]


def _port(endpoint: str) -> int:
    standard = 80 if endpoint.startswith("http://") else 443
    try:
        return urlsplit(endpoint).port or standard
    except ValueError:  # the engine will say what is wrong with it
        return standard


def deployment(service: InferenceService, context: Context) -> Manifest:
    """The engines. Live fields are not in it, so that editing them rolls nothing."""
    spec = service.spec
    built = _object(service, "apps/v1", "Deployment", names.deployment(service.name))
    built["spec"] = {
        "replicas": spec.wanted_replicas if context.replicas is None else context.replicas,
        "paused": False,  # ours: a Deployment that somebody paused would never finish a rollout, and never say so
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": max(1, round(spec.rollout.progress_deadline_s)),
        "selector": {"matchLabels": names.selector(service.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling(spec, context)},
        "template": context.template or pod_template(service, context.resolved),
    }
    return built


def pod_template(service: InferenceService, resolved: Resolved) -> Manifest:
    """What pods are made from, marked with a hash of all of it."""
    template = overlay_pod_template(_pod_template(service, resolved), service.spec.pod_template)
    template["metadata"]["labels"].update(names.labels(service.name))  # the selector depends on them
    # The template as well: two versions of the operator may build different ones from the same fields.
    content = {"fields": template_hash(service.spec, resolved), "template": template}
    template["metadata"].setdefault("annotations", {})[names.ANNOTATION_TEMPLATE_HASH] = digest(content)
    return template


def hash_of(template: Mapping[str, Any]) -> str:
    """The mark of a pod template, and of the pods made from it."""
    found: str = template["metadata"]["annotations"][names.ANNOTATION_TEMPLATE_HASH]
    return found


def _rolling(spec: ServiceSpec, context: Context) -> dict[str, Any]:
    if spec.rollout.strategy == "Recreate":
        # Type Recreate would leave rollingUpdate of an earlier apply behind, which the API server refuses.
        return {"maxSurge": 0, "maxUnavailable": "100%"}
    surge, missing = spec.rollout.max_surge, spec.rollout.max_unavailable
    if spec.rollout.strategy == "Auto" and context.surge == 0:
        surge, missing = 0, max(1, missing)
    return {"maxSurge": surge, "maxUnavailable": missing}


def farewell_s(spec: ServiceSpec) -> float:
    """From SIGTERM, or the end of a handover, until the engine has ended for certain."""
    return ENDPOINT_SPREAD_S + spec.rollout.drain_timeout_s + GRACE_MARGIN_S


def _pod_template(service: InferenceService, resolved: Resolved) -> Manifest:
    spec = service.spec
    grace_s = ENDPOINT_SPREAD_S + HANDOVER_S + farewell_s(spec)
    pod: dict[str, Any] = {
        "serviceAccountName": names.service_account(service.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": round(grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(service, resolved)],
        "volumes": _volumes(service),
    }
    if spec.engine.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.engine.image_pull_secrets]
    return {"metadata": {"labels": names.labels(service.name)}, "spec": pod}


def _container(service: InferenceService, resolved: Resolved) -> Manifest:
    spec = service.spec
    keys = spec.security.api_key_secret_ref
    placement = Placement(
        host="0.0.0.0",
        port=SERVING_PORT,
        admin_host="0.0.0.0",
        admin_port=ADMIN_PORT,
        live_config=f"{LIVE_DIRECTORY}/live.json",
        api_keys=f"{KEYS_DIRECTORY}/{keys.key}" if keys is not None else None,
        admin_public_key=f"{LIVE_DIRECTORY}/admin.pem",
        admin_audience="$(POD_UID)",  # Kubernetes fills it in from env
        hub_ca_file=f"{LIVE_DIRECTORY}/{HUB_CA_KEY}",
        leaving_time_s=ENDPOINT_SPREAD_S,
        log_format="json",
    )
    container: dict[str, Any] = {
        "name": names.ENGINE_CONTAINER,
        "image": spec.engine.image or resolved.image,
        "args": engine_arguments(spec, placement),
        "env": _environment(service),
        "ports": [
            {"name": "http", "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "startupProbe": _probe("/ready", period_s=5, failures=max(1, round(spec.startup_timeout_s / 5))),
        "readinessProbe": _probe("/ready", period_s=2, failures=2),
        "livenessProbe": {
            **_probe("/health", period_s=10, failures=3),
            # A pod that hangs has nothing to hand over.
            "terminationGracePeriodSeconds": round(ENDPOINT_SPREAD_S + farewell_s(spec)),
        },
        # The pod is out of the endpoints before the engine hears SIGTERM; it then says goodbye to kept connections.
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_SPREAD_S}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(spec),
    }
    if spec.engine.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.engine.image_pull_policy
    return container


def _probe(path: str, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _environment(service: InferenceService) -> list[Manifest]:
    spec = service.spec
    env: list[Manifest] = [
        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "HOME", "value": HOME},
    ]
    if from_hub(spec):
        endpoint = {"name": names.live_config_map(service.name), "key": HUB_ENDPOINT_KEY, "optional": True}
        env.append({"name": "HF_ENDPOINT", "valueFrom": {"configMapKeyRef": endpoint}})
    token = spec.model.token_secret_ref if spec.model is not None else None
    if token is not None:
        reference = {"name": token.name, "key": token.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return env


def _claim(spec: ServiceSpec) -> str | None:
    """The claim of a pvc:// model."""
    if spec.model is None or not spec.model.uri.startswith("pvc://"):
        return None
    return spec.model.uri.removeprefix("pvc://").partition("/")[0]


def _mounts(spec: ServiceSpec) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "live", "mountPath": LIVE_DIRECTORY, "readOnly": True},
        {"name": "cache", "mountPath": HOME},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if spec.security.api_key_secret_ref is not None:
        mounts.append({"name": "api-keys", "mountPath": KEYS_DIRECTORY, "readOnly": True})
    if _claim(spec) is not None:
        mounts.append({"name": "model", "mountPath": PVC_MOUNT, "readOnly": True})
    return mounts


def _volumes(service: InferenceService) -> list[Manifest]:
    spec = service.spec
    # Mounted as a directory: a subPath would never be updated.
    volumes: list[Manifest] = [
        {"name": "live", "configMap": {"name": names.live_config_map(service.name)}},
        {"name": "cache", **_cache(spec)},
        {"name": "tmp", "emptyDir": {}},
    ]
    keys = spec.security.api_key_secret_ref
    if keys is not None:
        volumes.append({"name": "api-keys", "secret": {"secretName": keys.name}})
    claim = _claim(spec)
    if claim is not None:
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return volumes


def _cache(spec: ServiceSpec) -> Mapping[str, Any]:
    cache = spec.model.cache if spec.model is not None else None
    if cache is not None and cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache is not None and cache.size_limit_bytes is not None:
        return {"emptyDir": {"sizeLimit": str(cache.size_limit_bytes)}}
    return {"emptyDir": {}}
