"""Runs a real Prometheus for tests: found on PATH or in the cache, else unpacked from Debian's package (no root, no daemon)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.engine_server import wait_until

TOOLS = Path(os.environ.get("TRIMTAB_CACHE", Path.home() / ".cache/trimtab")) / "tools"


def prometheus_binary(name: str = "prometheus") -> str:
    """Path of `prometheus` or `promtool`. Without it the test is skipped with the cause, or failed where CI is set."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{TOOLS}/usr/bin")
    if found:
        return found
    cause = _unpack()
    if cause is None:
        return str(TOOLS / "usr/bin" / name)
    message = f"no {name} on PATH or in {TOOLS}, and Debian's package could not be unpacked: {cause}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _unpack() -> str | None:
    """Fetch and unpack into the cache, whole or not at all; why not, or None."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "apt-get and dpkg-deb are not here"
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as folder:
        cause = _run(folder, "apt-get", "download", "prometheus")
        if cause is not None and os.geteuid() == 0:
            # Package lists that are absent or older than the mirror: fetch them once and try again.
            cause = _run(folder, "apt-get", "update") or _run(folder, "apt-get", "download", "prometheus")
        if cause is None:
            package = next(Path(folder).glob("prometheus_*.deb")).name
            cause = _run(folder, "dpkg-deb", "-x", package, "unpacked")
        if cause is not None:
            return cause
        (TOOLS / "usr/bin").mkdir(parents=True, exist_ok=True)
        for name in ("prometheus", "promtool"):
            Path(folder, "unpacked/usr/bin", name).replace(TOOLS / "usr/bin" / name)
    return None


def _run(folder: str, *command: str) -> str | None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    return f"{' '.join(command)}: {done.stderr.strip()[-200:]}" if done.returncode else None


@contextlib.contextmanager
def start_prometheus(
    targets: Sequence[str] | Mapping[str, Mapping[str, str]],
    *,
    interval_s: float = 1.0,
    labels: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """A Prometheus that scrapes `targets` (URLs of `/metrics`; a mapping gives each its own labels) under job "engine" and `labels`;
    its URL."""
    own = targets if isinstance(targets, Mapping) else {target: {} for target in targets}
    static = [
        {"targets": [urlsplit(target).netloc], "labels": {**(labels or {}), **named}}
        for target, named in own.items()
    ]
    job = {"job_name": "engine", "static_configs": static}
    with serve_prometheus([job], interval_s=interval_s) as url:

        def scraped() -> bool:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": "sum(up)"}, timeout=5.0).json()
            return bool(answer["data"]["result"]) and answer["data"]["result"][0]["value"][1] == str(
                len(targets)
            )

        wait_until(scraped, 60.0, lambda: "no target was scraped")  # discovery is throttled to once in 5 s
        yield url


@contextlib.contextmanager
def serve_prometheus(
    jobs: Sequence[Mapping[str, Any]],
    *,
    interval_s: float = 1.0,
    rule_groups: Sequence[Mapping[str, Any]] = (),
    port: int | None = None,
) -> Iterator[str]:
    """A Prometheus with these scrape jobs and rules; its URL. port: None for any."""
    binary = prometheus_binary()
    with tempfile.TemporaryDirectory(prefix="trimtab-prom-") as folder:
        timing = {f"{what}_interval": f"{round(interval_s * 1000)}ms" for what in ("scrape", "evaluation")}
        configuration = {
            "global": {**timing, "scrape_timeout": f"{round(interval_s * 1000)}ms"},
            "scrape_configs": list(jobs),
            "rule_files": [f"{folder}/rules.yml"],
        }
        Path(folder, "prometheus.yml").write_text(json.dumps(configuration))
        Path(folder, "rules.yml").write_text(json.dumps({"groups": list(rule_groups)}))
        port = port or free_port()
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        url = f"http://127.0.0.1:{port}"
        try:

            def ready() -> bool:
                assert process.poll() is None, Path(folder, "log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"{url}/-/ready", timeout=2.0).status_code == 200
                return False

            wait_until(ready, 60.0, lambda: Path(folder, "log").read_text())
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """One of this moment: Prometheus cannot say which one it took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found
