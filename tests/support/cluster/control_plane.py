"""etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kube-proxy: flags, readiness in order, ordered stop.

Used by `cluster`, inside a namespace (fixed ports are free there). Everything is in memory: data lies on a tmpfs that the
namespace takes with it. Knows nothing of the node agent.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

from support.cluster import certs
from support.cluster.children import Child
from support.cluster.namespace import NODE_IP

START_S = 120.0  # generous: two cores may be shared with a build
API_PORT = 6443
API_URL = f"https://127.0.0.1:{API_PORT}"
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
PROXY_NODE = "node-a"  # one kube-proxy serves the one network that all nodes share
POD_CIDR = "10.244.0.0/15"  # real pods 10.244/16, fake ones 10.245/16
#: What ends with the API server, see `ControlPlane.away`.
_LED = ("kube-controller-manager", "kube-scheduler")
_ETCD_URL, _ETCD_PEER_URL = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
_CONTROLLERS = (
    *(
        "serviceaccount-token-controller",
        "serviceaccount-controller",
        "root-ca-certificate-publisher-controller",
    ),
    *("namespace-controller", "garbage-collector-controller", "pod-garbage-collector-controller"),
    *("deployment-controller", "replicaset-controller", "statefulset-controller", "daemonset-controller"),
    *("job-controller", "cronjob-controller", "ttl-after-finished-controller", "endpointslice-controller"),
    *("disruption-controller", "horizontal-pod-autoscaler-controller", "node-lifecycle-controller"),
    *("persistentvolume-binder-controller", "persistentvolume-protection-controller"),
    *(
        "persistentvolumeclaim-protection-controller",
        "taint-eviction-controller",
        "resourcequota-controller",
        "clusterrole-aggregation-controller",
    ),
)


#: What programs with a service account's token ask for, operators above all; nodes and people have certificates.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}


class ControlPlane:
    """The five programs of one cluster. `start`, `start_proxy` when there is a node, `stop`; once each."""

    def __init__(self, binaries: Path, folder: Path, apiserver: Sequence[str] = ()) -> None:
        """binaries: folder of the programs; folder: for certificates, logs, kubeconfig (data on `folder/data`); apiserver: further flags."""
        self._binaries = binaries
        self._apiserver_flags = tuple(apiserver)
        self._folder = folder
        self._children: list[Child] = []
        self.pki = folder / "pki"
        self.kubeconfig = folder / "kubeconfig"
        self.logs = folder / "logs"
        self.audit_log = self.logs / "audit.jsonl"  # see `support.cluster.audit`

    def start(self) -> None:
        """Start all but kube-proxy, in order, each when the one before is ready. On any failure all are stopped."""
        self.logs.mkdir(parents=True, exist_ok=True)
        certs.write_certificates(self.pki, NODE_IP, KUBERNETES_SERVICE_IP)
        certs.write_kubeconfig(self.kubeconfig, self.pki, API_URL)
        (self._folder / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
        try:
            self._start_programs()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """kube-proxy, scheduler, controller-manager, apiserver, etcd."""
        while self._children:
            self._children.pop().stop()

    def child(self, name: str) -> Child:
        """The program `name`, for tests that break it."""
        return next(child for child in self._children if child.name == name)

    def restart(self, name: str) -> None:
        """Stop (if it runs) and start again the program `name`, and wait until it is ready. What goes with kube-apiserver: `away`."""
        with self.away(name):
            pass

    @contextlib.contextmanager
    def away(self, *names: str) -> Iterator[None]:
        """These programs are not there until the block ends; then they have all that they had.

        With kube-apiserver go the controller manager and the scheduler, as with leader election: they end themselves when they cannot
        renew their lease, and start anew. A controller manager that lived on would take the silence for that of the nodes (open watches
        alone hold a kube-apiserver that is to end for longer than the grace), and take all pods out of their Services on its return.
        """
        wanted = {*names, *(_LED if "kube-apiserver" in names else ())}
        gone = [child.name for child in self._children if child.name in wanted]
        assert set(gone) == wanted, f"no such program: {wanted - set(gone)}"
        for name in reversed(gone):
            self.child(name).stop()
        try:
            yield
        finally:
            self._start_again(gone)

    def _start_again(self, names: Sequence[str]) -> None:
        programs = self._programs()
        for name in names:
            position = next(i for i, child in enumerate(self._children) if child.name == name)
            child = self._children[position] = Child.start(name, programs[name][0], self.logs / f"{name}.log")
            if name not in _LED:
                self._wait(child, programs[name][1])
        for name in set(names) & set(_LED):
            self._wait(self.child(name), programs[name][1])

    def _start_programs(self) -> None:
        programs = self._programs()
        for name in ("etcd", "kube-apiserver"):
            self._launch(name, programs[name][0])
            self._wait(self._children[-1], programs[name][1])
        # These wait for nothing but the API server, so they start side by side.
        for name in _LED:
            self._launch(name, programs[name][0])
        for child, name in zip(self._children[-2:], _LED, strict=True):
            self._wait(child, programs[name][1])
        # Pods are refused before these exist.
        base = f"{API_URL}/api/v1/namespaces/default"
        self._wait(self.child("kube-controller-manager"), self._answers(f"{base}/serviceaccounts/default"))
        self._wait(
            self.child("kube-controller-manager"), self._answers(f"{base}/configmaps/kube-root-ca.crt")
        )

    def start_proxy(self) -> None:
        """Start kube-proxy and wait for it. Not earlier: it waits 30 s for a Node of its name that has an address."""
        command, ready = self._programs()["kube-proxy"]
        self._launch("kube-proxy", command)
        self._wait(self._children[-1], ready)

    def _launch(self, name: str, command: Sequence[str]) -> None:
        self._children.append(Child.start(name, command, self.logs / f"{name}.log"))

    def _wait(self, child: Child, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while not ready():
            child.check()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{child.name} not ready after {START_S:.0f} s:\n{child.log_tail()}")
            time.sleep(0.05)

    def _answers(self, url: str) -> Callable[[], bool]:
        """Whether a GET with the admin's certificate answers 200."""
        context = ssl.create_default_context(cafile=str(self.pki / "ca.crt"))
        context.load_cert_chain(self.pki / "admin.crt", self.pki / "admin.key")
        if not url.startswith(API_URL):  # these make their own certificates
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(url, verify=context, timeout=5.0, trust_env=False).status_code == 200
            return False

        return answers

    def _programs(self) -> dict[str, tuple[list[str], Callable[[], bool]]]:
        """name → (command line, readiness)."""
        serving = (
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
        )
        kubeconfig = f"--kubeconfig={self.kubeconfig}"
        return {
            "etcd": (
                [
                    *(
                        str(self._binaries / "etcd"),
                        "--name=test",
                        f"--data-dir={self._folder / 'data' / 'etcd'}",
                    ),
                    *(f"--listen-client-urls={_ETCD_URL}", f"--advertise-client-urls={_ETCD_URL}"),
                    *(
                        f"--listen-peer-urls={_ETCD_PEER_URL}",
                        f"--initial-advertise-peer-urls={_ETCD_PEER_URL}",
                    ),
                    *(f"--initial-cluster=test={_ETCD_PEER_URL}", "--unsafe-no-fsync", "--log-level=warn"),
                ],
                self._answers(f"{_ETCD_URL}/health"),
            ),
            "kube-apiserver": (self._apiserver(), self._answers(f"{API_URL}/readyz")),
            "kube-controller-manager": (
                [
                    *(str(self._binaries / "kube-controller-manager"), kubeconfig, *serving),
                    f"--service-account-private-key-file={self.pki / 'sa.key'}",
                    *(f"--root-ca-file={self.pki / 'ca.crt'}", "--use-service-account-credentials=false"),
                    *("--kube-api-qps=200", "--kube-api-burst=400"),
                    # Five times as fast as the defaults, so that a dead node is seen in seconds.
                    *("--node-monitor-period=1s", "--node-monitor-grace-period=8s"),
                    *("--node-eviction-rate=10", "--secondary-node-eviction-rate=10"),
                    *("--large-cluster-size-threshold=0", "--horizontal-pod-autoscaler-sync-period=5s"),
                    f"--controllers={','.join(_CONTROLLERS)}",
                ],
                self._answers("https://127.0.0.1:10257/healthz"),
            ),
            "kube-scheduler": (
                [
                    *(str(self._binaries / "kube-scheduler"), kubeconfig, *serving),
                    *("--kube-api-qps=200", "--kube-api-burst=400"),
                ],
                self._answers("https://127.0.0.1:10259/readyz"),
            ),
            "kube-proxy": (
                [
                    *(str(self._binaries / "kube-proxy"), kubeconfig, f"--hostname-override={PROXY_NODE}"),
                    *("--proxy-mode=iptables", f"--cluster-cidr={POD_CIDR}", "--bind-address=127.0.0.1"),
                    "--iptables-min-sync-period=200ms",
                    # conntrack's sysctls are read-only in a network namespace.
                    *("--conntrack-max-per-core=0", "--conntrack-min=0"),
                    *("--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s"),
                ],
                self._answers("http://127.0.0.1:10256/livez"),
            ),
        }

    def _apiserver(self) -> list[str]:
        pki = self.pki
        return [
            *(str(self._binaries / "kube-apiserver"), f"--etcd-servers={_ETCD_URL}"),
            *("--bind-address=0.0.0.0", f"--secure-port={API_PORT}", f"--advertise-address={NODE_IP}"),
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            *(f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}"),
            *(
                f"--client-ca-file={pki / 'ca.crt'}",
                "--anonymous-auth=false",
                "--authorization-mode=Node,RBAC",
            ),
            f"--audit-policy-file={self._folder / 'audit-policy.json'}",
            f"--audit-log-path={self.audit_log}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            *("--allow-privileged=true", "--profiling=false"),
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / 'admin.crt'}",
            f"--kubelet-client-key={pki / 'admin.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            *("--default-not-ready-toleration-seconds=5", "--default-unreachable-toleration-seconds=5"),
            # Aggregated APIs (metrics for autoscalers).
            *(
                f"--requestheader-client-ca-file={pki / 'ca.crt'}",
                "--requestheader-allowed-names=front-proxy",
            ),
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy.key'}",
            *self._apiserver_flags,
        ]
