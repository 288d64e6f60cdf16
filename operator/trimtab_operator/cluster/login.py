"""kopf's form of our credentials. Used by `handlers`; the requests of `kube` need nothing of this.

A token is read anew at each login, which kopf asks for when one is refused; the authorities of the API server's certificate, and a
client's own certificate, at each connection (as urllib3 does for `kube`). All of them are renewed on disk while a process lives.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable
from typing import Any

import kopf

from trimtab_operator.cluster.kube import Credentials

_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


class _Connection(kopf.ConnectionInfo):
    """kopf keeps one TLS context as long as a login lasts: for months."""

    def as_ssl_context(self) -> ssl.SSLContext:
        return _AsFilesSay(super().as_ssl_context)


class _AsFilesSay(ssl.SSLContext):
    """Each connection that is begun with it is judged by the files of that moment; while they cannot be read, by those before."""

    _built: ssl.SSLContext
    _build: Callable[[], ssl.SSLContext]

    def __new__(cls, build: Callable[[], ssl.SSLContext]) -> _AsFilesSay:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._build, made._built = build, build()
        return made

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            self._built = self._build()
        return self._built.wrap_bio(*arguments, **options)


def connection(credentials: Credentials) -> kopf.ConnectionInfo:
    """What kopf connects by."""
    found = credentials.configuration
    if credentials.in_cluster:
        with open(_TOKEN) as file:
            return _Connection(server=found.host, ca_path=found.ssl_ca_cert, token=file.read().strip())
    bearer = found.get_api_key_with_prefix("BearerToken", alias="authorization") or ""
    scheme, _, token = bearer.partition(" ")
    if not token:
        scheme, token = "Bearer", scheme
    return _Connection(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        certificate_path=found.cert_file if found.cert_file and os.path.exists(found.cert_file) else None,
        private_key_path=found.key_file if found.key_file and os.path.exists(found.key_file) else None,
        scheme=scheme if token else None,
        token=token or None,
    )
