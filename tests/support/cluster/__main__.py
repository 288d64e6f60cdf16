"""Brings a test cluster up for a person: `make cluster`, or `python -m support.cluster up [--gpus 2] [--nodes 2]`.

`up` stays outside the namespace: it starts `inside` within, listens for the API on a loopback port, prints the KUBECONFIG, and on Ctrl-C
ends everything and deletes its folder. `exec -- COMMAND` runs a command inside a fresh cluster and returns its exit status. `build` makes
sure that all programs are there, so that nothing has to wait for them later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.cluster import binaries, certs, host_tools, namespace, operator
from support.cluster.binaries import Unavailable
from support.cluster.children import Child
from support.cluster.cluster import Cluster, NodeOptions, start
from support.cluster.control_plane import API_PORT
from support.cluster.relay import carry_to

_FOLDER_PREFIX = "trimtab-cluster-"
_READY = "ready"  # a file in the cluster's folder
_SOCKET = "api.sock"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="support.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build what is not cached, and end")
    for name in ("up", "exec", "inside"):
        sub = commands.add_parser(name)
        sub.add_argument("--nodes", type=int, default=2)
        sub.add_argument("--gpus", type=int, default=2, help="of each node")
        sub.add_argument("--no-operator", action="store_true", help="the bare cluster")
        sub.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
        if name != "up":
            sub.add_argument("argv", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.command == "inside":
        return inside(options)
    try:
        if options.command == "build":
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a build ends with us
        os.environ.update(binaries.find_all())
        os.environ["PATH"] = host_tools.search_path()
        problem = namespace.probe()
        if problem is not None:
            raise Unavailable(problem)
    except Unavailable as error:
        print(f"test cluster: {error}", file=sys.stderr)
        return 1
    if options.command == "build":
        return 0
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    try:
        return up(options, folder) if options.command == "up" else run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _inside_command(options: argparse.Namespace, folder: Path) -> list[str]:
    shape = ["--nodes", str(options.nodes), "--gpus", str(options.gpus), "--folder", str(folder)]
    shape += ["--no-operator"] if options.no_operator else []
    return namespace.command_inside([sys.executable, "-P", "-m", "support.cluster", "inside", *shape])


def run(options: argparse.Namespace, folder: Path) -> int:
    """Run a command in a cluster of its own → its exit status."""
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    return subprocess.run([*_inside_command(options, folder), "--", *argv], check=False).returncode


def up(options: argparse.Namespace, folder: Path) -> int:
    """Keep a cluster up until a signal comes."""
    begun = time.monotonic()
    (folder / "pid").write_text(str(os.getpid()))
    child = Child.start("the cluster", _inside_command(options, folder), folder / "cluster.log")
    try:
        return asyncio.run(_attend(folder, child, begun))
    finally:
        print("\nstopping …", file=sys.stderr, flush=True)
        child.stop()


async def _attend(folder: Path, child: Child, begun: float) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    handler = carry_to(lambda: asyncio.open_unix_connection(folder / _SOCKET))
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    told = False
    while not stop.is_set():
        if not child.running:
            print(f"test cluster ended:\n{child.log_tail(40)}", file=sys.stderr)
            return 1
        if not told and (folder / _READY).exists():
            told = True
            _tell(folder, port, time.monotonic() - begun)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await stop.wait()
    server.close()
    return 0


def _tell(folder: Path, port: int, ready_s: float) -> None:
    kubeconfig = folder / "kubeconfig.outside"
    certs.write_kubeconfig(kubeconfig, folder / "pki", f"https://127.0.0.1:{port}")
    pid = (folder / _READY).read_text().strip()
    programs = f"{binaries.find_or_build()}:{binaries.find_or_build(binaries.HELM)}"
    question = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}'
    print(
        f"cluster ready in {ready_s:.1f} s · logs in {folder / 'logs'} · Ctrl-C stops it and leaves nothing behind\n\n"
        f"  export KUBECONFIG={kubeconfig} PATH={programs}:$PATH\n\n"
        "  kubectl apply -f examples/chat.yaml && kubectl wait --for=condition=Ready infsvc/chat --timeout=3m\n\n"
        "pods and Services answer inside its network only, by address; a question from there, and a shell:\n\n"
        f"  nsenter --target {pid} --net curl http://$(kubectl get service chat -o jsonpath={{.spec.clusterIP}})"
        ":8000/v1/chat/completions \\\n"
        f"      -H 'Content-Type: application/json' -d '{question}'\n"
        f"  nsenter --target {pid} --net --mount --pid env KUBECONFIG={folder / 'kubeconfig'} bash\n",
        flush=True,
    )


def inside(options: argparse.Namespace) -> int:
    """The cluster itself, in its namespace; with a command: until that ends."""

    def end(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    nodes = [NodeOptions(f"node-{chr(ord('a') + i)}", gpus=options.gpus) for i in range(options.nodes)]
    with contextlib.suppress(KeyboardInterrupt), start(options.folder, nodes) as cluster:
        if not options.no_operator:
            operator.install(cluster.kubectl)
        if argv:
            return _run_in(cluster, argv)
        asyncio.run(_offer(cluster))
    return 0


def _run_in(cluster: Cluster, argv: list[str]) -> int:
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    environment["PATH"] = f"{cluster.kubectl.program.parent}:{environment['PATH']}"
    return subprocess.run(argv, env=environment, check=False).returncode


async def _offer(cluster: Cluster) -> None:
    """Let the outside reach the API server, for ever."""
    handler = carry_to(lambda: asyncio.open_connection("127.0.0.1", API_PORT))
    server = await asyncio.start_unix_server(handler, cluster.folder / _SOCKET)
    own_pid = os.environ[namespace.OUTER_PID]
    partial = cluster.folder / f".{_READY}"
    partial.write_text(own_pid)
    partial.rename(cluster.folder / _READY)
    await server.serve_forever()


def sweep() -> None:
    """Delete folders of clusters that were killed: their processes and mounts are gone, their logs are not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int((folder / "pid").read_text())
            if not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
