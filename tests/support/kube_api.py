"""A bare Kubernetes API for tests: the real etcd and kube-apiserver on loopback, no controllers, no nodes.

Its programs are found or built as those of the whole test cluster. Only processes started here are ended.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from support.cluster import binaries
from support.cluster.binaries import Unavailable
from trimtab_operator import crds

START_TIMEOUT_S = 120.0
TOKEN = "test-admin"
TENANT = "tenant"  # a user with no right but discovery
_TENANT_TOKEN = "test-tenant"


_PEM = serialization.Encoding.PEM
_PRIVATE = (_PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())


@dataclass(frozen=True, slots=True)
class KubeApi:
    """A running API server."""

    url: str
    kubeconfig: Path
    ca: Path
    pids: tuple[int, ...]  # kube-apiserver, etcd

    def kubeconfig_of_tenant(self, folder: Path) -> Path:
        """As `kubeconfig`, of user TENANT."""
        path = folder / "kubeconfig-tenant"
        path.write_text(self.kubeconfig.read_text().replace(TOKEN, _TENANT_TOKEN))
        return path

    def rotate_authority(self) -> None:
        """Another authority, in the file of the former; the server takes its new certificate up by itself, soon."""
        _serving_certificates(self.ca.parent)


def programs() -> Path:
    """The folder with etcd and kube-apiserver, or a skip (a failure in CI) that says what is missing."""
    try:
        return binaries.find_or_build()
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@contextlib.contextmanager
def kube_api() -> Iterator[KubeApi]:
    """Start both, install our CRDs, and end them again."""
    assets = programs()
    with tempfile.TemporaryDirectory(prefix="trimtab-api-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        _certificates(folder)
        etcd_port, peer_port, port = _free_port(), _free_port(), _free_port()
        etcd = f"http://127.0.0.1:{etcd_port}"
        peer = f"http://127.0.0.1:{peer_port}"
        first = _start(
            stack,
            folder / "etcd.log",
            [str(assets / "etcd"), "--name=test", f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={etcd}",
             f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
             f"--initial-cluster=test={peer}", "--unsafe-no-fsync", "--log-level=warn"],
        )  # fmt: skip
        second = _start(
            stack,
            folder / "apiserver.log",
            [str(assets / "kube-apiserver"), f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", f"--secure-port={port}",
             "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16",
             f"--tls-cert-file={folder / 'server.crt'}", f"--tls-private-key-file={folder / 'server.key'}",
             f"--token-auth-file={folder / 'tokens.csv'}", "--anonymous-auth=false", "--authorization-mode=RBAC",
             "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={folder / 'sa.pub'}",
             f"--service-account-signing-key-file={folder / 'sa.key'}", "--disable-admission-plugins=ServiceAccount",
             "--profiling=false"],
        )  # fmt: skip
        url = f"https://127.0.0.1:{port}"
        _wait(url, folder, second)
        for kind in crds.FILES:
            _request(
                url,
                folder,
                "POST",
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
                crds.definition(kind),
            )
        for plural in ("inferenceservices", "tuningruns"):
            _until(
                lambda plural=plural: _request(
                    url, folder, "GET", f"/apis/serving.trimtab.dev/v1alpha1/{plural}"
                )
            )
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority": str(folder / "ca.crt")}}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }  # fmt: skip
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        yield KubeApi(url, folder / "kubeconfig", folder / "ca.crt", (second.pid, first.pid))


def _start(stack: contextlib.ExitStack, log: Path, command: list[str]) -> subprocess.Popen[bytes]:
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _request(url: str, folder: Path, method: str, path: str, body: object = None) -> bytes:
    request = urllib.request.Request(
        url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        content: bytes = answer.read()
        return content


def _wait(url: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
    def ready() -> bytes:
        if process.poll() is not None:
            raise AssertionError(f"kube-apiserver ended:\n{(folder / 'apiserver.log').read_text()[-2000:]}")
        return _request(url, folder, "GET", "/readyz")

    _until(ready)
    _until(lambda: _request(url, folder, "GET", "/api/v1/namespaces/default"))


def _until(attempt: object) -> None:
    assert callable(attempt)
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            attempt()
        except (OSError, urllib.error.URLError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


def _certificates(folder: Path) -> None:
    """Those of `_serving_certificates`, keys of service-account tokens, and the users' tokens."""
    _serving_certificates(folder)
    accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "sa.key").write_bytes(accounts.private_bytes(*_PRIVATE))
    (folder / "sa.pub").write_bytes(
        accounts.public_key().public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (folder / "tokens.csv").write_text(
        f'{TOKEN},admin,1,"system:masters"\n{_TENANT_TOKEN},{TENANT},2,"tenants"\n'
    )


def _serving_certificates(folder: Path) -> None:
    """A CA, and the server's certificate for loopback."""
    now = datetime.datetime.now(datetime.UTC)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trimtab-test-ca")])

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    ca = (
        builder(issuer, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    server = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")]), key)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
        .sign(authority, hashes.SHA256())
    )
    for name, content in (
        ("server.key", key.private_bytes(*_PRIVATE)),
        ("server.crt", server.public_bytes(_PEM)),
        ("ca.crt", ca.public_bytes(_PEM)),
    ):
        part = folder / f"{name}.part"
        part.write_bytes(content)
        part.replace(folder / name)


def decode_secret(secret: dict[str, dict[str, str]], key: str) -> bytes:
    """The content of one key of a Secret."""
    return base64.b64decode(secret["data"][key])
