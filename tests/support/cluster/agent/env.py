"""A container's environment and command: `env`, `envFrom`, `valueFrom`, `$(VAR)`. The rules of the kubelet.

`Reader` fetches ConfigMaps and Secrets; everything else here is pure.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from support.cluster.agent.api import Api, ApiError, Json

KUBERNETES_SERVICE = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
}
_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


class ConfigError(Exception):
    """A reference of the pod leads nowhere (yet); the kubelet's CreateContainerConfigError."""


class Reader:
    """Reads what a pod refers to in its namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    async def data(self, resource: str, name: str, *, optional: bool = False) -> dict[str, bytes] | None:
        """Content of a ConfigMap or Secret (`resource`: configmaps, secrets); None when absent and optional."""
        try:
            found = await self._api.get(f"/api/v1/namespaces/{self.namespace}/{resource}/{name}")
        except ApiError as error:
            if error.status == 404 and optional:
                return None
            kind = "configmap" if resource == "configmaps" else "secret"
            raise ConfigError(f'{kind} "{name}" not found' if error.status == 404 else str(error)) from error
        if resource == "secrets":
            return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}
        text = {key: value.encode() for key, value in found.get("data", {}).items()}
        return text | {key: base64.b64decode(value) for key, value in found.get("binaryData", {}).items()}


async def environment(
    container: Json, pod: Json, pod_ip: str, host_ip: str, reader: Reader
) -> dict[str, str]:
    """The whole environment of a container; raises ConfigError naming what is missing."""
    result = {"HOSTNAME": pod["metadata"]["name"], **KUBERNETES_SERVICE}
    for source in container.get("envFrom", []):
        for resource, key in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if key in source:
                reference = source[key]
                data = await reader.data(
                    resource, reference["name"], optional=bool(reference.get("optional", False))
                )
                prefix = source.get("prefix", "")
                result |= {prefix + name: value.decode() for name, value in (data or {}).items()}
    for item in container.get("env", []):
        if "valueFrom" in item:
            value = await _value_from(item["valueFrom"], container, pod, pod_ip, host_ip, reader)
            if value is not None:
                result[item["name"]] = value
        else:
            result[item["name"]] = expand(item.get("value", ""), result)
    return result


async def _value_from(
    source: Json, container: Json, pod: Json, pod_ip: str, host_ip: str, reader: Reader
) -> str | None:
    if "fieldRef" in source:
        return field(source["fieldRef"]["fieldPath"], pod, pod_ip, host_ip)
    if "resourceFieldRef" in source:
        return resource_field(source["resourceFieldRef"], container)
    for resource, key in (("configmaps", "configMapKeyRef"), ("secrets", "secretKeyRef")):
        if key in source:
            reference = source[key]
            optional = bool(reference.get("optional", False))
            data = await reader.data(resource, reference["name"], optional=optional)
            if data is None or reference["key"] not in data:
                if optional:
                    return None
                raise ConfigError(f"couldn't find key {reference['key']} in {resource} {reference['name']}")
            return data[reference["key"]].decode()
    raise ConfigError(f"this node agent knows no source {sorted(source)}")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` of known variables; `$$` stands for `$`; unknown ones stay as written."""

    def value(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return _REFERENCE.sub(value, text)


def field(path: str, pod: Json, pod_ip: str, host_ip: str) -> str:
    """A downward API field; raises ConfigError for one that is not supported."""
    metadata, spec = pod["metadata"], pod["spec"]
    keyed = _KEYED.fullmatch(path)
    if keyed is not None:
        return str(metadata.get(keyed.group(1), {}).get(keyed.group(2), ""))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "metadata.labels": _pairs(metadata.get("labels", {})),
        "metadata.annotations": _pairs(metadata.get("annotations", {})),
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
        "status.hostIP": host_ip,
        "status.hostIPs": host_ip,
    }
    if path not in values:
        raise ConfigError(f"this node agent knows no field {path}")
    return str(values[path])


def _pairs(values: Mapping[str, str]) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))


def resource_field(reference: Json, container: Json) -> str:
    """`limits.cpu`, `requests.memory`, … divided by the divisor, rounded up."""
    kind, _, name = reference["resource"].partition(".")
    amount = quantity(container.get("resources", {}).get(kind, {}).get(name, "0"))
    divisor = quantity(reference.get("divisor") or "1") or 1.0
    return str(int(-(-amount // divisor)))


def quantity(text: Any) -> float:
    """A Kubernetes quantity as a number."""
    match = re.fullmatch(r"([0-9.]+)(m|[KMGT]i|[kMGT])?", str(text))
    if match is None:
        raise ConfigError(f"this node agent cannot read the quantity {text!r}")
    number, unit = float(match.group(1)), match.group(2) or ""
    return number / 1000 if unit == "m" else number * _UNITS[unit]
