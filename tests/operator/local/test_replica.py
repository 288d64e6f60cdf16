"""A replica's process and probes, with small scripts that misbehave as an engine might."""

import asyncio
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from trimtab_operator import names
from trimtab_operator.local import replica as replica_module
from trimtab_operator.local.process import port_file
from trimtab_operator.local.replica import Phase, Replica

SERVER = """
import http.server, json, os, signal, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = not os.path.exists("not-ready")
        self.send_response(200 if ready else 503); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
with open(sys.argv[1] + ".new", "w") as file:
    json.dump({"port": server.server_port, "admin_port": 1, "pid": os.getpid()}, file)
os.replace(sys.argv[1] + ".new", sys.argv[1])
signal.signal(signal.SIGTERM, AT_THE_END)
server.serve_forever()
"""
POLITE = SERVER.replace("AT_THE_END", "lambda *_: os._exit(0)")
STUBBORN = SERVER.replace("AT_THE_END", "signal.SIG_IGN")

Scenario = Callable[[Replica], Awaitable[None]]


def run(tmp_path: Path, code: str, scenario: Scenario) -> list[Phase]:
    """Run a scenario over one replica whose process runs `code` in `tmp_path` → the phases it went through."""
    phases: list[Phase] = []

    async def main() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            script = f"import os; os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(code)
            replica = Replica(
                "chat-0",
                "hash",
                [sys.executable, "-c", script, str(port_file(tmp_path))],
                tmp_path,
                client,
                lambda changed: phases.append(changed.phase),
            )
            replica.start()
            try:
                async with asyncio.timeout(30):
                    await scenario(replica)
            finally:
                replica.kill()
                await replica.end(0)

    asyncio.run(main())
    return phases


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.02)


def test_replica_gets_ready_and_ends_on_sigterm(tmp_path: Path) -> None:
    async def scenario(replica: Replica) -> None:
        await until(lambda: replica.phase is Phase.READY)
        assert replica.addresses is not None
        await replica.end(5)
        assert replica.pid is None

    assert run(tmp_path, POLITE, scenario)[:4] == [Phase.STARTING, Phase.READY, Phase.DRAINING, Phase.ENDED]


def test_draining_waits_for_the_requests_under_way(tmp_path: Path) -> None:
    async def scenario(replica: Replica) -> None:
        await until(lambda: replica.phase is Phase.READY)
        backend = replica.backend
        assert backend is not None
        backend.outstanding += 1
        backend.idle.clear()
        ending = asyncio.create_task(replica.end(20))
        await asyncio.sleep(0.3)
        assert replica.pid is not None  # still there for its request
        backend.idle.set()
        await ending
        assert replica.pid is None

    run(tmp_path, POLITE, scenario)


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "_EXIT_GRACE_S", 0.3)

    async def scenario(replica: Replica) -> None:
        await until(lambda: replica.phase is Phase.READY)
        await replica.end(0.2)
        assert replica.pid is None

    run(tmp_path, STUBBORN, scenario)


def test_replica_that_does_not_answer_its_probe_gets_no_requests(tmp_path: Path) -> None:
    async def scenario(replica: Replica) -> None:
        await until(lambda: replica.phase is Phase.READY)
        (tmp_path / "not-ready").touch()
        await until(lambda: replica.phase is Phase.NOT_READY)
        (tmp_path / "not-ready").unlink()
        await until(lambda: replica.phase is Phase.READY)

    run(tmp_path, POLITE, scenario)


def test_process_that_gives_up_says_why(tmp_path: Path) -> None:
    async def scenario(replica: Replica) -> None:
        await until(lambda: replica.phase is Phase.FAILED)
        assert replica.failure is not None
        assert replica.failure.reason == names.MODEL_LOAD_FAILED
        assert replica.failure.message == "ended with exit status 3: no such tensor"
        assert replica.no_memory_since_s is None
        await replica.restart()
        assert replica.restarts == 1
        await until(lambda: replica.phase is Phase.FAILED)
        assert replica.process is not None
        assert replica.process.log_tail().splitlines() == ["loading", "no such tensor"] * 2

    run(tmp_path, 'import sys; print("loading"); print("no such tensor"); sys.exit(3)', scenario)


def test_full_device_counts_as_no_place(tmp_path: Path) -> None:
    async def scenario(replica: Replica) -> None:
        await until(lambda: replica.phase is Phase.FAILED)
        assert replica.failure is not None
        assert replica.failure.reason == names.INSUFFICIENT_GPU
        first = replica.no_memory_since_s
        assert first is not None
        await replica.restart()
        await until(lambda: replica.phase is Phase.FAILED)
        assert replica.no_memory_since_s == first  # since when, not when last

    run(
        tmp_path,
        'import sys; sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")',
        scenario,
    )


def test_command_that_does_not_exist_is_a_failure(tmp_path: Path) -> None:
    async def scenario(replica: Replica) -> None:
        await until(lambda: replica.phase is Phase.FAILED)
        replica.command = ["/no/such/engine"]
        await replica.restart()
        await until(lambda: replica.phase is Phase.FAILED)
        assert replica.failure is not None
        assert "No such file" in replica.failure.message

    run(tmp_path, "raise SystemExit(1)", scenario)
