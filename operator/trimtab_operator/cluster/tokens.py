"""The operator's Ed25519 key pair and the short-lived tokens it signs for engines' admin ports.

The private key lives in one Secret of the operator's namespace, which the operator may only *create*: it reads the key from the
mounted file. Engines get the public key through their ConfigMap. Used by `engines` and `main`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from trimtab_operator import names
from trimtab_operator.cluster.kube import Conflict, Kube
from trimtab_operator.errors import OperatorError

Scope = Literal["read", "write"]
TOKEN_LIFE_S = 60.0
KEY_ENTRY = "admin-key.pem"


class Signer:
    """Signs tokens with one private key."""

    def __init__(self, key: Ed25519PrivateKey, now: Callable[[], float] = time.time) -> None:
        self._key = key
        self._now = now

    @classmethod
    def new(cls) -> Signer:
        """With a fresh key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Signer:
        """From a PEM file; raises OperatorError naming it."""
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise OperatorError(f"{path}: no private key can be read ({error})") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise OperatorError(f"{path}: an Ed25519 key is needed, not {type(key).__name__}")
        return cls(key)

    @property
    def private_pem(self) -> bytes:
        """PKCS 8, unencrypted: what the Secret holds."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def public_pem(self) -> str:
        """What engines verify with."""
        public = self._key.public_key()
        return public.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ).decode()

    def token(self, audience: str, scope: Scope, life_s: float = TOKEN_LIFE_S) -> str:
        """A token for one engine (`audience` is the pod's UID), good for a minute, or for `life_s`."""
        now = self._now()
        claims = {
            "aud": audience,
            "scope": scope,
            "iat": int(now),
            "exp": int(now + life_s),
            "iss": names.FIELD_MANAGER,
        }
        return jwt.encode(claims, self._key, algorithm="EdDSA")


def obtain(kube: Kube, namespace: str, secret: str | None, file: Path | None) -> Signer | None:
    """The mounted key; else a new one, kept in the Secret. None while the Secret exists but is not mounted yet: ask again.

    Without a Secret's name the key lives as long as the process; engines then learn the next one through their ConfigMap.
    """
    if file is not None and file.exists():
        return Signer.load(file)
    signer = Signer.new()
    if secret is None:
        return signer
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret,
            "namespace": namespace,
            "labels": {names.LABEL_PART_OF: "trimtab", names.LABEL_MANAGED_BY: names.FIELD_MANAGER},
        },
        "type": "Opaque",
        "immutable": True,
        "data": {KEY_ENTRY: base64.b64encode(signer.private_pem).decode()},
    }
    try:
        kube.create(manifest)
    except Conflict:
        return None
    return signer
