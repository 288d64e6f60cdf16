"""What the Prometheus operator makes of a PodMonitor: a scrape job, and pods as Prometheus discovers them. Used by `tests/cluster/test_scraped.py`.

The job's relabelling is the Prometheus operator's, word for word, for the fields that we write. Pods come by a file with the labels
that Prometheus' own discovery would give them, since Debian's Prometheus is built without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_META = "__meta_kubernetes_pod"


def job(monitor: Json, targets: Path) -> Json:
    """The scrape job of a PodMonitor with one endpoint; pods are read from `targets`."""
    spec, metadata = monitor["spec"], monitor["metadata"]
    [endpoint] = spec["podMetricsEndpoints"]
    relabel: list[Json] = [
        {"source_labels": [f"{_META}_phase"], "regex": "(Failed|Succeeded)", "action": "drop"},
        *({"source_labels": [f"{_META}_label_{_name(key)}", f"{_META}_labelpresent_{_name(key)}"],
           "regex": f"({re.escape(value)});true", "action": "keep"} for key, value in spec["selector"]["matchLabels"].items()),
        {"source_labels": [f"{_META}_container_port_name"], "regex": endpoint["port"], "action": "keep"},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{_META}_container_name"], "target_label": "container"},
        {"source_labels": [f"{_META}_name"], "target_label": "pod"},
        *({"source_labels": [f"{_META}_label_{_name(key)}"], "target_label": _name(key), "regex": "(.+)"}
          for key in spec["podTargetLabels"]),
        {"target_label": "job", "replacement": f"{metadata['namespace']}/{metadata['name']}"},
        {"target_label": "endpoint", "replacement": endpoint["port"]},
    ]  # fmt: skip
    return {
        "job_name": f"podMonitor/{metadata['namespace']}/{metadata['name']}/0",
        "scrape_interval": endpoint["interval"],
        "metrics_path": endpoint["path"],
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
        "relabel_configs": relabel,
    }


def discovered(pods: Sequence[Json]) -> list[Json]:
    """Pods as discovery of role `pod` shows them: one target for each port of each container."""
    return [target for pod in pods for target in _ports(pod)]


def _ports(pod: Json) -> Iterator[Json]:
    metadata, status = pod["metadata"], pod["status"]
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            labels = {
                "__meta_kubernetes_namespace": metadata["namespace"],
                f"{_META}_name": metadata["name"],
                f"{_META}_phase": status["phase"],
                f"{_META}_container_name": container["name"],
                f"{_META}_container_port_name": port.get("name", ""),
            }
            for key, value in metadata["labels"].items():
                labels |= {f"{_META}_label_{_name(key)}": value, f"{_META}_labelpresent_{_name(key)}": "true"}
            yield {"targets": [f"{status['podIP']}:{port['containerPort']}"], "labels": labels}


def _name(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)
