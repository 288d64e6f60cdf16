"""helm as a function: the real program on the checkout's chart. Used by the chart's tests and by `support.cluster.operator`.

A developer's own helm settings and repositories are neither read nor changed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.cluster import binaries
from support.cluster.kubectl import Kubectl

Json = dict[str, Any]
CHART = Path(__file__).resolve().parents[3] / "charts" / "trimtab"
RELEASE = "trimtab"


class HelmError(Exception):
    """helm ended with another status than 0; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Helm:
    """Bound to one cluster and namespace. kubeconfig None: commands that need no cluster."""

    program: Path
    kubeconfig: Path | None = None
    namespace: str = "trimtab-system"

    @classmethod
    def find(cls, kubeconfig: Path | None = None, namespace: str = "trimtab-system") -> Helm:
        """With the program of `binaries`; raises Unavailable."""
        return cls(binaries.find_or_build(binaries.HELM) / "helm", kubeconfig, namespace)

    def __call__(
        self, *arguments: str, values: Mapping[str, Any] | None = None, timeout_s: float = 240.0
    ) -> str:
        """Run it → standard output; raises HelmError with what it said. values: as of a values file."""
        given = [] if values is None else ["--values", "-"]
        home = binaries.cache_folder() / "helm-home"
        done = subprocess.run(
            [str(self.program), *arguments, "--namespace", self.namespace, *given],
            input=None if values is None else json.dumps(values),
            stdin=subprocess.DEVNULL if values is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={
                **os.environ,
                "KUBECONFIG": str(self.kubeconfig or os.devnull),
                **{f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
            },
            check=False,
        )
        if done.returncode != 0:
            raise HelmError(f"helm {' '.join(arguments)}: {done.stderr.strip()}\n{done.stdout.strip()}")
        return done.stdout

    def template(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        release: str = RELEASE,
        api_versions: Sequence[str] = (),
        chart: Path = CHART,
    ) -> list[Json]:
        """The objects that the chart makes of `values`, in its order."""
        flags = [f"--api-versions={version}" for version in api_versions]
        text = self("template", release, str(chart), *flags, values=values or {})
        return [document for document in yaml.safe_load_all(text) if document is not None]


def apply(kubectl: Kubectl, objects: Sequence[Json], options: tuple[str, ...] = ()) -> None:
    """Server-side apply of objects of several namespaces; kubectl takes those of one at a time."""
    for namespace in dict.fromkeys(o["metadata"].get("namespace", kubectl.namespace) for o in objects):
        these = [o for o in objects if o["metadata"].get("namespace", kubectl.namespace) == namespace]
        kubectl.within(namespace).apply(*these, options=options)
