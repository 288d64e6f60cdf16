"""Certificates, keys and the kubeconfig of one test cluster.

Called by `control_plane` before anything starts; a fresh authority per cluster, so that nothing of an older one is trusted.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 30


@dataclass(frozen=True, slots=True)
class Identity:
    """One key pair to make: subject, use and the names it serves under."""

    name: str  # of its files: NAME.crt, NAME.key
    common_name: str
    organization: str | None = None  # the group that RBAC sees
    server: bool = False
    hosts: Sequence[str] = ()


def write_certificates(folder: Path, node_ip: str, service_ip: str) -> None:
    """ca.crt, sa.key, sa.pub, and a pair each for apiserver, admin, front-proxy and kubelet.

    node_ip: address of the API server and of every node; service_ip: cluster IP of the Service `kubernetes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("trimtab-test-ca", None)
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    api_hosts = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "127.0.0.1")
    for identity in (
        Identity("apiserver", "kube-apiserver", server=True, hosts=(*api_hosts, node_ip, service_ip)),
        Identity("admin", "admin", organization="system:masters"),
        Identity("front-proxy", "front-proxy"),
        Identity("kubelet", "kubelet", server=True, hosts=(node_ip,)),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if identity.server else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = _builder(
            _name(identity.common_name, identity.organization), authority_name, key.public_key()
        ).add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if identity.hosts:
            alternatives = [_alternative(host) for host in identity.hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(authority_key, hashes.SHA256())
        (folder / f"{identity.name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(folder / f"{identity.name}.key", key)
    tokens = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write_key(folder / "sa.key", tokens)
    (folder / "sa.pub").write_bytes(
        tokens.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def write_server_pair(folder: Path, hosts: Sequence[str]) -> tuple[Path, Path, Path]:
    """A fresh authority and one server's pair → files of (authority, certificate, key)."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("trimtab-test-hub-ca", None)
    # Python's strict verification wants the key usage said.
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    subject_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(subject_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _builder(_name("hub", None), authority_name, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_id), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    ca_file, certificate_file, key_file = (folder / name for name in ("hub-ca.pem", "hub.crt", "hub.key"))
    ca_file.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(key_file, key)
    return ca_file, certificate_file, key_file


def write_kubeconfig(path: Path, pki: Path, server: str) -> None:
    """A kubeconfig for the cluster's admin, complete in itself (certificates inlined). JSON is YAML."""

    def inline(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "trimtab-test",
                "cluster": {"server": server, "certificate-authority-data": inline("ca.crt")},
            }
        ],
        "users": [
            {
                "name": "admin",
                "user": {
                    "client-certificate-data": inline("admin.crt"),
                    "client-key-data": inline("admin.key"),
                },
            }
        ],
        "contexts": [{"name": "trimtab-test", "context": {"cluster": "trimtab-test", "user": "admin"}}],
        "current-context": "trimtab-test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _name(common_name: str, organization: str | None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization is not None:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
