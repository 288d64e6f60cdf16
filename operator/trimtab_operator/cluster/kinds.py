"""Static table of the kinds that the operator reads or writes: where each lives in the Kubernetes API.

Static, because discovery costs a start and a cache, and a kind that is not here is one that the chart's RBAC does not allow
either. Used by `kube`; knows nothing of what objects mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_operator import names


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind. `group` is empty for core; `namespaced` False: a cluster-scoped kind."""

    name: str
    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As in `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path below the server's address; `namespace` None lists all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


SERVICE = Kind(names.SERVICE_KIND, names.GROUP, names.VERSION, "inferenceservices")
RUN = Kind(names.RUN_KIND, names.GROUP, names.VERSION, "tuningruns")
POD = Kind("Pod", "", "v1", "pods")
CONFIG_MAP = Kind("ConfigMap", "", "v1", "configmaps")
SECRET = Kind("Secret", "", "v1", "secrets")
EVENT = Kind("Event", "", "v1", "events")
CLUSTER_SERVICE = Kind("Service", "", "v1", "services")
SERVICE_ACCOUNT = Kind("ServiceAccount", "", "v1", "serviceaccounts")
DEPLOYMENT = Kind("Deployment", "apps", "v1", "deployments")
DISRUPTION_BUDGET = Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies")
NAMESPACE = Kind("Namespace", "", "v1", "namespaces", namespaced=False)
POD_MONITOR = Kind("PodMonitor", "monitoring.coreos.com", "v1", "podmonitors")
PROMETHEUS_RULE = Kind("PrometheusRule", "monitoring.coreos.com", "v1", "prometheusrules")
CRON_JOB = Kind("CronJob", "batch", "v1", "cronjobs")
JOB = Kind("Job", "batch", "v1", "jobs")
ROLE = Kind("Role", "rbac.authorization.k8s.io", "v1", "roles")
ROLE_BINDING = Kind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")

#: Kinds of a service's children that every cluster has; they are watched.
CHILDREN = (SERVICE_ACCOUNT, CONFIG_MAP, CLUSTER_SERVICE, NETWORK_POLICY, DISRUPTION_BUDGET, DEPLOYMENT)
#: Kinds of a schedule's objects, beside its ServiceAccount. Watched, and asked for only where there is a schedule.
NIGHTLY = (CRON_JOB, ROLE, ROLE_BINDING)
BY_NAME = {
    kind.name: kind
    for kind in (SERVICE, RUN, POD, CONFIG_MAP, SECRET, EVENT, CLUSTER_SERVICE, SERVICE_ACCOUNT, DEPLOYMENT,
                 DISRUPTION_BUDGET, NETWORK_POLICY, NAMESPACE, LEASE, POD_MONITOR, PROMETHEUS_RULE, JOB, *NIGHTLY)
}  # fmt: skip
