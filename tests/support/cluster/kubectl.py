"""kubectl as a function: what tests and tools say to a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
WAIT_S = 120.0  # generous: two cores may be shared


class KubectlError(Exception):
    """kubectl ended with another status than 0; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Bound to one cluster, user and namespace."""

    program: Path
    kubeconfig: Path
    namespace: str = "default"
    context: str | None = None

    def __call__(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = 180.0, check: bool = True
    ) -> str:
        """Run it → standard output; raises KubectlError with standard error, unless `check` is False."""
        context = [] if self.context is None else ["--context", self.context]
        done = subprocess.run(
            [str(self.program), "--namespace", self.namespace, *context, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            check=False,
        )
        if check and done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def within(self, namespace: str) -> Kubectl:
        """The same, for another namespace."""
        return Kubectl(self.program, self.kubeconfig, namespace, self.context)

    def get(self, *arguments: str) -> Json:
        """`kubectl get … -o json`."""
        found: Json = json.loads(self("get", *arguments, "-o", "json"))
        return found

    def items(self, *arguments: str) -> list[Json]:
        """`kubectl get` of a list."""
        return list(self.get(*arguments)["items"])

    def apply(self, *manifests: Mapping[str, Any], options: tuple[str, ...] = ()) -> str:
        """Server-side apply."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        return self("apply", "--server-side", *options, "-f", "-", stdin=text)

    def wait_for(
        self, what: str, *arguments: str, condition: Callable[[Json], bool], timeout_s: float = WAIT_S
    ) -> Json:
        """Poll `kubectl get` until the object meets `condition`; AssertionError with the object after `timeout_s`.

        what: words for the failure message.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self.get(*arguments)
            if condition(found):
                return found
            assert time.monotonic() < deadline_s, (
                f"not {what} after {timeout_s:.0f} s: {json.dumps(found.get('status', found), indent=1)}"
            )
            time.sleep(0.2)
