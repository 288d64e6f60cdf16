"""`trimtab-operator run`: puts the parts together, runs kopf in this thread's event loop, and ends in order.

Called by `cli`. Blocking work happens in threads (workers, lease, resync, health), never in the event loop; the death of any
of them ends the process, so that Kubernetes starts a whole one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import kopf

from trimtab_operator.api.status import Resolved
from trimtab_operator.cluster import handlers, tokens
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.events import Recorder
from trimtab_operator.cluster.fleet import POLL_S, FleetSwitch
from trimtab_operator.cluster.health import HealthServer
from trimtab_operator.cluster.kube import Credentials, Denied, Kube, KubeError, load_credentials
from trimtab_operator.cluster.leadership import RENEW_S, REQUEST_PAUSES_S, REQUEST_TIMEOUT_S, Leadership
from trimtab_operator.cluster.metrics import OperatorMetrics
from trimtab_operator.cluster.observe import Key, Observer, RunIndex
from trimtab_operator.cluster.periodic import Periodic
from trimtab_operator.cluster.places import Place, Places
from trimtab_operator.cluster.reconcile import Reconciler
from trimtab_operator.cluster.resync import Resync
from trimtab_operator.cluster.slo import FIRST_S, PERIOD_S, SloWatch
from trimtab_operator.cluster.slots import Slots
from trimtab_operator.cluster.store import Store
from trimtab_operator.cluster.watch_rights import WatchRights
from trimtab_operator.cluster.worker import Workers, WorkQueue
from trimtab_operator.errors import OperatorError
from trimtab_operator.plan.cluster import Settings
from trimtab_operator.plan.events import Happening
from trimtab_operator.plan.live import Switch
from trimtab_operator.plan.manifests import Hub
from trimtab_operator.plan.rollout import UNSCHEDULABLE_PATIENCE_S
from trimtab_operator.plan.tuner_pod import Tuner

logger = logging.getLogger(__name__)

START_RETRY_S = 2.0
PLACES_S = 2.0
OVERDUE_S = 15.0
STOP_S = 20.0  # for reconciles under way
LEASE_STOP_S = 10.0  # two tries at a request of the Lease
_TRIED = re.compile(r"Request attempt #(\d+)\b.* failed; will retry")
_RECORD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `run`."""
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--namespace", action="append", metavar="NS",
                       help="namespace to serve, repeatable; needs no cluster-wide right (default in a pod: its own)")  # fmt: skip
    scope.add_argument("--all-namespaces", action="store_true", help="serve every namespace")
    parser.add_argument(
        "--operator-namespace", metavar="NS", help="of Lease and key Secret (default: the pod's own)"
    )
    parser.add_argument("--image", default=f"trimtab/engine:{version('trimtab')}",
                        help="engine image for services that name none (%(default)s)")  # fmt: skip
    parser.add_argument("--tuner-image", default=f"trimtab/tuner:{version('trimtab')}",
                        help="image of what makes and works tuning runs (%(default)s)")  # fmt: skip
    parser.add_argument("--worker-resources", type=_resources, default={}, metavar="JSON",
                        help="resources of the workers' container, as in a pod (default: none)")  # fmt: skip
    parser.add_argument("--prometheus-url", metavar="URL",
                        help="where condition SLOMet gets its counts (default: it stays Unknown), and workers too, if it asks for no "
                        "credentials")  # fmt: skip
    parser.add_argument("--prometheus-credentials", type=Path, metavar="DIR",
                        help="folder with token, or username and password, and ca.crt; each may be absent")  # fmt: skip
    parser.add_argument("--kubeconfig", metavar="FILE", help="outside of a cluster (default: $KUBECONFIG)")
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    parser.add_argument("--admin-key-file", type=Path, metavar="FILE",
                        help="private key for engines' admin ports (PEM, Ed25519), as mounted from the Secret")  # fmt: skip
    parser.add_argument("--admin-key-secret", metavar="NAME",
                        help="Secret to create with a new key while there is no key file (default: keep it in memory)")  # fmt: skip
    parser.add_argument("--hub-endpoint", metavar="URL",
                        help="where models of hf:// come from (default: the public hub)")  # fmt: skip
    parser.add_argument("--hub-ca-file", type=Path, metavar="FILE",
                        help="PEM of authorities that the hub's certificate may come from, for every service")  # fmt: skip
    parser.add_argument("--fleet-config-map", default="trimtab-fleet", metavar="NAME",
                        help="ConfigMap of the operator's namespace whose key `tuning` (active, paused, reverted) holds for all "
                        "services (%(default)s)")  # fmt: skip
    parser.add_argument("--max-concurrent-runs", type=int, default=4, metavar="N",
                        help="tuning runs that have a worker, or a candidate in engines, at a time, over all services (%(default)s)")  # fmt: skip
    parser.add_argument("--standalone", action="store_true", help="take no Lease: this is the only operator")
    parser.add_argument("--lease-name", default="trimtab-operator", metavar="NAME",
                        help="Lease that operators of the same services share; its holder acts (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--identity",
        default=f"{socket.gethostname()}-{os.getpid()}",
        metavar="ID",
        help="of this process in the Lease (default: host name and process id)",
    )
    parser.add_argument(
        "--workers", type=int, default=8, metavar="N", help="reconciles at a time (%(default)s)"
    )
    parser.add_argument("--resync", type=float, default=300.0, metavar="SECONDS",
                        help="look at every service at least this often (%(default)g)")  # fmt: skip
    parser.add_argument("--room-patience", type=float, default=UNSCHEDULABLE_PATIENCE_S, metavar="SECONDS",
                        help="with rollout.strategy Auto, how long a new pod may look for a place before an old one "
                        "makes room; longer where nodes are added on demand (%(default)g)")  # fmt: skip
    parser.add_argument("--health-host", default="0.0.0.0", metavar="ADDRESS",
                        help="where --health-port listens (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--health-port",
        type=int,
        default=8080,
        metavar="PORT",
        help="/healthz, /readyz, /metrics (%(default)s)",
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="JSON written once watching: health_url, pid"
    )
    parser.add_argument("--log-format", choices=("json", "text"), default="json", help="%(default)s")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning"), default="info", help="%(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until told to stop → exit status."""
    _configure_logging(arguments.log_format, arguments.log_level)
    credentials = load_credentials(arguments.kubeconfig, arguments.context)
    namespaces = _namespaces(arguments, credentials)
    if arguments.workers < 1 or arguments.resync < 1:
        raise OperatorError("--workers and --resync must be at least 1")
    if arguments.room_patience < 0:
        raise OperatorError("--room-patience must be at least 0")
    if arguments.max_concurrent_runs < 1:
        raise OperatorError("--max-concurrent-runs must be at least 1; annotation or ConfigMap pause tuning")
    return Operator(arguments, credentials, namespaces).run()


class Operator:
    """One process's parts; `namespaces` None: all."""

    def __init__(
        self, arguments: argparse.Namespace, credentials: Credentials, namespaces: list[str] | None
    ) -> None:
        self._arguments = arguments
        self._credentials = credentials
        self._namespaces = namespaces
        self._home = arguments.operator_namespace or credentials.namespace or (namespaces or ["default"])[0]
        self._hub = _hub(arguments)
        self.metrics = OperatorMetrics()
        self._plain = Kube(credentials.configuration, observe=self.metrics.request)
        self._leadership: Leadership | None = None
        self._leads = False
        if not arguments.standalone:
            lease = Kube(
                credentials.configuration,
                observe=self.metrics.request,
                pauses_s=REQUEST_PAUSES_S,
                read_timeout_s=REQUEST_TIMEOUT_S,
            )
            self._leadership = Leadership(
                lease, self._home, arguments.lease_name, arguments.identity,
                on_change=self._led,
            )  # fmt: skip
        else:
            self.metrics.leading.set(1)
        guard = self._leadership.guard if self._leadership is not None else lambda: None
        self._kube = Kube(credentials.configuration, guard=guard, observe=self.metrics.request)
        self._queue: WorkQueue[Key] = WorkQueue()
        self._index = RunIndex()
        self._store = Store()
        self._places = Places(namespaces, self._away)
        for place in self._places.all:
            self.metrics.away(place, False)
        self._resync = Resync(
            self._plain, self._places, self._index, self._look_anew, arguments.resync,
            on_done=lambda: self.metrics.last_resync.set(time.time()),
        )  # fmt: skip
        self._slo: SloWatch | None = None
        if arguments.prometheus_url is not None:
            self._slo = SloWatch(arguments.prometheus_url, arguments.prometheus_credentials, self._queue.add)
        self._recorder = Recorder(self._kube, arguments.identity)
        self._fleet = FleetSwitch(
            self._plain, self._home, arguments.fleet_config_map, self._switched, self._complain
        )
        self._slots = Slots(arguments.max_concurrent_runs, self._index, self._queue.add, self._places.away)
        watches = WatchRights(self._plain, self._places, self._resync, self._store, self._queue.add)
        self._periodic = [
            Periodic("resync", self._resync.turn, arguments.resync),
            Periodic("fleet", self._fleet.turn, POLL_S),
            Periodic("places", self._resync.retry, PLACES_S),
            Periodic("overdue", watches.turn, OVERDUE_S),
        ]
        if self._slo is not None:
            self._periodic.append(Periodic("SLO", self._slo.turn, PERIOD_S, FIRST_S))
        self._lease: Periodic | None = None
        if self._leadership is not None:
            self._lease = Periodic("lease", self._lease_turn, RENEW_S, first_s=0)
        self._workers: Workers[Key] | None = None
        self._watching = False
        self._health = HealthServer(
            arguments.health_host, arguments.health_port, self.trouble, self.not_ready, self._render
        )

    def run(self) -> int:
        """See the module."""
        self._health.start()
        try:
            engines = Engines(self._signer())
            self._first_list()
            self._start_workers(engines)
            if self._lease is not None:
                self._lease.start()
            for thread in self._periodic:
                thread.start()
            try:
                return asyncio.run(self._watch())
            finally:
                self._stop(engines)
        finally:
            self._health.stop()

    # Health

    def trouble(self) -> str | None:
        """Why a new process would do better; None when none would."""
        if self._workers is None:
            return None  # still starting; Kubernetes' startup probe bounds that
        if not self._workers.alive():
            return "a worker thread has died"
        for thread in [*self._periodic, *([self._lease] if self._lease is not None else [])]:
            if not thread.alive():
                return f"the {thread.name} thread has died"
        age_s = time.monotonic() - self._resync.last_s
        if age_s > 3 * self._arguments.resync + 60:
            return f"services were last listed {age_s:.0f} s ago"
        failed_s = max(self._plain.last_failure_s, self._kube.last_failure_s)
        return self._resync.dead_watch() or self._store.dead_watch(failed_s)

    def not_ready(self) -> str | None:
        """Why no service is looked at; a follower is ready, since it can take over."""
        return self._places.nowhere() if self._watching else "not watching yet"

    def _render(self) -> bytes:
        self.metrics.queue.set(len(self._queue))
        return self.metrics.render()

    # Start

    def _signer(self) -> tokens.Signer:
        """The admin key; waits for the API server, and for a kubelet to mount what another process has created."""
        while True:
            try:
                signer = tokens.obtain(
                    self._plain, self._home, self._arguments.admin_key_secret, self._arguments.admin_key_file
                )
            except KubeError as error:
                logger.warning("no admin key yet", extra={"error": str(error)})
                signer = None
            else:
                if signer is None:
                    logger.info("the admin key exists; waiting until it is mounted")
            if signer is not None:
                self._settings = Settings(
                    Resolved(image=self._arguments.image),
                    signer.public_pem,
                    self._home,
                    self._arguments.room_patience,
                    self._hub,
                    tuner_of(self._arguments),
                )
                return signer
            time.sleep(START_RETRY_S)

    def _first_list(self) -> None:
        """Know all runs, and the fleet's switch, before the first look, so that no lease is ended or begun for want of them."""
        while True:
            try:
                self._fleet.look()
                self._resync.once()
            except KubeError as error:
                logger.warning("cannot list services yet", extra={"error": str(error)})
                time.sleep(START_RETRY_S)
            else:
                return

    def _start_workers(self, engines: Engines) -> None:
        observer = Observer(self._kube, engines, self._index, self._store)
        reconciler = Reconciler(
            self._kube,
            engines,
            observer,
            self._settings,
            self._recorder,
            self.metrics,
            self._slo,
            fleet=lambda: self._fleet.now,
            slots=self._slots,
        )
        leadership = self._leadership

        def look(key: Key) -> float | None:
            if self._places.away(key.namespace):
                return None  # every look is owed anew once it can be listed again
            try:
                return reconciler.reconcile(key)
            except Denied:
                self._places.doubt(key.namespace)
                raise

        def observe(result: str, seconds: float) -> None:
            self.metrics.reconciles.labels(result).inc()
            self.metrics.reconcile_seconds.observe(seconds)

        self._workers = Workers(
            self._queue,
            look,
            self._arguments.workers,
            may_work=(lambda: leadership.leading) if leadership is not None else (lambda: True),
            observe=observe,
        )
        self._workers.start()

    # The event loop

    async def _watch(self) -> int:
        """kopf, and a look at the threads once a second → exit status."""
        stop, ready = asyncio.Event(), asyncio.Event()
        registry = handlers.registry(
            self._enqueue, self._resync.delivered, self._index, self._store, self._credentials
        )
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry,
                # kopf's own would ask for the user's name, and a pod's user has none.
                identity=cast("Any", self._arguments.identity),
                standalone=True,
                clusterwide=self._namespaces is None,
                namespaces=self._namespaces or (),
                stop_flag=stop,
                ready_flag=ready,
            )
        )
        announced = False
        wrong: str | None = None
        while not watching.done():
            await asyncio.wait([watching], timeout=0.2 if not announced else 1.0)
            if ready.is_set() and not announced:
                announced = self._watching = True
                self._announce()
            wrong = self.trouble()
            if wrong is not None:
                logger.error("ending", extra={"reason": wrong})
                stop.set()
                await asyncio.wait([watching], timeout=STOP_S)
                return 1
        if watching.exception() is not None:
            logger.error("the watches ended", extra={"error": repr(watching.exception())})
            return 1
        return 0  # SIGTERM or SIGINT, which kopf takes

    def _lease_turn(self) -> None:
        """Ask for the Lease. Who follows owes no look: for weeks they would pile up, of services that are long gone."""
        assert self._leadership is not None
        self._leadership.turn()
        if not self._leads:  # by what `_led` was told: it owes every look when that changes
            self._queue.clear()

    def _led(self, leading: bool) -> None:
        """Begin or cease to lead. Who begins looks at everything: at what is there, and at what went since it led last."""
        self._leads = leading
        self.metrics.leads(leading)
        if leading:
            for key in {*self._resync.known(), *self._index.contenders(), *self._store.known()}:
                self._queue.add(key)

    def _away(self, place: Place, away: bool) -> None:
        """Looks in a namespace end, or begin again: their places among runs are free, and its services are not counted."""
        self.metrics.away(place, away)
        if away:
            self._slots.wake()

    def _switched(self, switch: Switch) -> None:
        """The fleet's switch was thrown: those with runs first."""
        with_runs = list(self._index.contenders())
        for key in [*with_runs, *self._resync.known()]:
            self._queue.add(key)

    def _complain(self, config_map: dict[str, Any], problem: str) -> None:
        if self._leadership is None or self._leadership.leading:
            self._recorder.record(config_map, Happening("Warning", "InvalidFleetSwitch", problem))

    def _enqueue(self, key: Key) -> None:
        self.metrics.event()
        self._queue.add(key)

    def _look_anew(self, key: Key, delay_s: float) -> None:
        """The resync's look: nothing that a watch has said counts."""
        self._store.distrust(key)
        self._queue.add(key, delay_s)

    def _announce(self) -> None:
        where = f"http://127.0.0.1:{self._health.port}"
        logger.info("watching", extra={"namespaces": self._namespaces or "all", "health": where})
        if self._arguments.ready_file is not None:
            part = self._arguments.ready_file.with_suffix(".part")
            part.write_text(json.dumps({"health_url": where, "pid": os.getpid()}))
            part.replace(self._arguments.ready_file)

    def _stop(self, engines: Engines) -> None:
        """Finish what is under way, then let another process lead."""
        for thread in self._periodic:
            thread.stop()
        if self._workers is not None:
            self._workers.stop(STOP_S)
        if self._lease is not None and self._leadership is not None:
            self._lease.stop(LEASE_STOP_S)
            self._leadership.hand_over()
        engines.close()


def tuner_of(arguments: argparse.Namespace) -> Tuner:
    """How workers are made. One that needs credentials for Prometheus would need a Secret: it scrapes engines itself."""
    asks = arguments.prometheus_credentials is not None
    url = None if asks else arguments.prometheus_url
    return Tuner(arguments.tuner_image, arguments.worker_resources, url)


def _resources(text: str) -> dict[str, Any]:
    """The API server judges what is in it."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('an object is needed, such as {"requests": {"cpu": "1"}}')
    return found


def _hub(arguments: argparse.Namespace) -> Hub:
    """Read at start; raises OperatorError naming what is wrong."""
    endpoint: str | None = arguments.hub_endpoint
    if endpoint is not None and not endpoint.startswith(("https://", "http://")):
        raise OperatorError(
            f"--hub-endpoint: {endpoint!r} is not allowed; an address that begins with https:// or http://"
        )
    if arguments.hub_ca_file is None:
        return Hub(endpoint)
    try:
        return Hub(endpoint, arguments.hub_ca_file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"--hub-ca-file: {arguments.hub_ca_file} cannot be read: {error}") from error


def _namespaces(arguments: argparse.Namespace, credentials: Credentials) -> list[str] | None:
    if arguments.all_namespaces:
        return None
    if arguments.namespace:
        return sorted(set(arguments.namespace))
    if credentials.namespace is not None:
        return [credentials.namespace]
    raise OperatorError("outside of a cluster say which services: --namespace NS or --all-namespaces")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        content.update(
            {k: v for k, v in record.__dict__.items() if k not in _RECORD_FIELDS and not k.startswith("k8s_")}
        )
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


class _TextFormatter(logging.Formatter):
    """For people: the message and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(
            f"{k}={v}"
            for k, v in record.__dict__.items()
            if k not in _RECORD_FIELDS and not k.startswith("k8s_")
        )
        return f"{super().format(record)} {fields}".rstrip()


def _not_again(record: logging.LogRecord) -> bool:
    """kopf says each time that a watch's request has failed, for as long as it fails; the first time is enough."""
    if not record.name.startswith("kopf"):
        return True
    found = _TRIED.match(record.getMessage())
    return found is None or found[1] == "1"


def _configure_logging(form: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if level != "debug":
        handler.addFilter(_not_again)
    handler.setFormatter(
        _JsonFormatter() if form == "json" else _TextFormatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("kopf").setLevel(logging.WARNING if level != "debug" else logging.DEBUG)
