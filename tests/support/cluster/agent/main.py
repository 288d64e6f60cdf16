"""The node agent: one process is one node.

    python -m support.cluster.agent.main --name node-a --index 1 --pki DIR --folder DIR --logs DIR [--gpus 2]

Started by `support.cluster.cluster` inside the cluster's namespace. SIGSTOP makes the node silent; SIGTERM kills its pods.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
from pathlib import Path

from support.cluster.agent import node
from support.cluster.agent.api import Api
from support.cluster.agent.devices import Devices
from support.cluster.agent.images import Image, content_paths, default_table
from support.cluster.agent.log_server import serve
from support.cluster.agent.network import Addresses
from support.cluster.agent.pod import Node
from support.cluster.agent.pods import Pods
from support.cluster.namespace import NODE_IP

KUBELET_PORT = 10250


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--index", type=int, required=True, help="1 … 254: which addresses and port it has")
    parser.add_argument("--server", default="https://127.0.0.1:6443")
    parser.add_argument("--pki", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="pods' file systems; on a tmpfs")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--version", default="v1.37.2")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpu", default="8")
    parser.add_argument("--memory", default="16Gi")
    parser.add_argument("--pods", type=int, default=110)
    parser.add_argument(
        "--image", action="append", default=[], help="NAME=JSON list: a further image and its command"
    )
    parser.add_argument(
        "--content", type=Path, action="append", default=[], help="a folder that every image holds"
    )
    parser.add_argument("--backoff-s", type=float, default=10.0)
    parser.add_argument("--volume-sync-s", type=float, default=1.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(run(options))


async def run(options: argparse.Namespace) -> None:
    """Be a node until a signal comes."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    api = Api(options.server, options.pki)
    shape = node.NodeShape(
        name=options.name,
        address=NODE_IP,
        kubelet_port=KUBELET_PORT + options.index,
        gpus=options.gpus,
        cpu=options.cpu,
        memory=options.memory,
        pods=options.pods,
        version=options.version,
    )
    further = {
        name: Image(tuple(json.loads(argv))) for name, _, argv in (i.partition("=") for i in options.image)
    }
    pods = Pods(
        Node(
            name=options.name,
            address=NODE_IP,
            api=api,
            images=default_table() | further,
            content=content_paths(options.content),
            devices=Devices(options.gpus),
            addresses=Addresses(f"10.244.{options.index}"),
            folder=options.folder / options.name,
            logs=options.logs,
            backoff_s=options.backoff_s,
            volume_sync_s=options.volume_sync_s,
        )
    )
    server = await serve(pods, NODE_IP, shape.kubelet_port, options.pki)
    await node.register(api, shape)
    tasks = [asyncio.create_task(node.keep_alive(api, shape)), asyncio.create_task(pods.run(api))]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()  # neither ends by itself: show why
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await pods.close()
    server.close()
    await api.close()


if __name__ == "__main__":
    main()
