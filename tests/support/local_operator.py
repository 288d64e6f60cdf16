"""Runs `trimtab-operator local` as a user does: a real process with a YAML file, real engines, the tiny model.

Everything is on the loopback with ports of the system's choice. A service that a test leaves behind is killed with its engines.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

Json = dict[str, Any]
START_TIMEOUT_S = 120.0


def service_resource(model: Path, name: str = "chat", **spec: Any) -> Json:
    """An InferenceService of the model in folder `model`, with small buffers."""
    engine = {"maxNumBatchedTokens": 512, "maxNumSeqs": 16, "kvCacheMemory": "16Mi", "maxModelLen": 1024}
    return {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": f"file://{model}", "servedName": "tiny"}, "engine": engine, **spec},
    }


class LocalOperator:
    """One running operator. `resource` is what its file says; change it and call `save`."""

    def __init__(self, folder: Path, resource: Json) -> None:
        self.folder = folder
        self.resource = resource
        self.file = folder / "service.yaml"
        self.log_file = folder / "operator.log"
        self.save()
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command(self.file, folder / "state", "--ready-file", str(folder / "ready.json")),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        first_line = self.wait_log(r"on (http://\S+) \(control (http://\S+)\)")
        self.url, self.control_url = first_line.group(1), first_line.group(2)
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.control = httpx.Client(base_url=self.control_url, timeout=60, trust_env=False)

    def save(self) -> None:
        """Replace the file, as an editor does."""
        temporary = self.file.with_suffix(".new")
        temporary.write_text(yaml.safe_dump(self.resource))
        temporary.replace(self.file)

    @property
    def log(self) -> str:
        """What the operator printed."""
        return self.log_file.read_text()

    def wait_log(self, pattern: str) -> re.Match[str]:
        """Wait until the operator has printed something."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (found := re.search(pattern, self.log)) is not None:
                return found
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        raise AssertionError(f"{pattern} is not in the log:\n{self.log}")

    def status(self) -> Json:
        """Body of `/status`."""
        body: Json = self.control.get("/status").json()
        return body

    def wait(self, holds: Callable[[Json], bool], timeout_s: float = START_TIMEOUT_S) -> Json:
        """Wait until the status fulfils a condition → that status."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            status = self.status()
            if holds(status):
                return status
            time.sleep(0.05)
        raise AssertionError(f"never came about; status: {json.dumps(status, indent=1)}\nlog:\n{self.log}")

    def wait_ready(self) -> Json:
        """Wait until the service is Ready with nothing under way and its live config applied."""
        return self.wait(is_settled)

    def engine_pids(self) -> list[int]:
        """Pids of all processes of this service's engines: the HTTP processes and their workers."""
        return [pid for pid, parents in _ancestors().items() if self.process.pid in parents]

    def stop(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the end → exit status."""
        self.client.close()
        self.control.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


def command(file: Path, state_dir: Path, *options: str) -> list[str]:
    """The operator's command line, with free ports."""
    operator = [str(Path(sys.executable).with_name("trimtab-operator")), "local"]
    return [
        *operator,
        "-f",
        str(file),
        "--port",
        "0",
        "--control-port",
        "0",
        "--state-dir",
        str(state_dir),
        *options,
    ]


def condition(status: Json, kind: str) -> Json:
    """One condition of a status."""
    found: Json = next(c for c in status["conditions"] if c["type"] == kind)
    return found


def is_settled(status: Json) -> bool:
    """Ready, nothing under way, and every replica has its live config in force."""
    verdicts = {c["type"]: c["status"] for c in status["conditions"]}
    applied, _, of_all = status["live"]["applied"].partition("/")
    return (
        applied == of_all
        and verdicts.get("Ready") == "True"
        and verdicts.get("Reconciling") == "False"
        and verdicts.get("ConfigApplied") == "True"
        and status["file"]["error"] is None
    )


def pids(status: Json) -> dict[str, int]:
    """Replica → pid."""
    return {replica["name"]: replica["pid"] for replica in status["replicas"]}


def reasons(status: Json) -> list[str]:
    """Reasons of the events, oldest first."""
    return [event["reason"] for event in status["events"]]


def alive(process_ids: list[int]) -> list[int]:
    """Those of the given processes that have not ended."""
    table = _ancestors()
    return [pid for pid in process_ids if pid in table]


def _ancestors() -> dict[int, set[int]]:
    """Every process that is not a zombie → the pids above it."""
    parent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                parent[int(entry.name)] = int(fields[1])
    table: dict[int, set[int]] = {}
    for pid in parent:
        above: set[int] = set()
        at = parent[pid]
        while at and at not in above:
            above.add(at)
            at = parent.get(at, 0)
        table[pid] = above
    return table
