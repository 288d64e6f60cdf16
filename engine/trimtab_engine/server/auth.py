"""Who may use the admin port: short-lived Ed25519 tokens (JWT, alg EdDSA), checked against public keys from a PEM file.

Whoever holds a private key (the operator) signs; this process only verifies. Several keys may be valid at once, so that
keys rotate without a gap, and the file is reread when it changes. Without a key file the admin port is open, and
`ServerOptions` then allows it on loopback alone.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Literal

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from trimtab_engine.errors import ConfigError

logger = logging.getLogger(__name__)

Scope = Literal["read", "write"]
CLOCK_SKEW_S = 5.0
_PEM = re.compile(rb"-----BEGIN [A-Z0-9 ]+-----.+?-----END [A-Z0-9 ]+-----", re.DOTALL)


class Unauthenticated(Exception):
    """No token, or one that does not verify (HTTP 401)."""


class Forbidden(Exception):
    """A good token that does not allow this (HTTP 403)."""


def load_public_keys(path: Path) -> list[Ed25519PublicKey]:
    """All Ed25519 public keys of a PEM file; ConfigError when there is none or one of another kind."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            "--admin-public-key", str(path), f"a readable PEM file ({error.strerror})"
        ) from error
    keys: list[Ed25519PublicKey] = []
    for block in _PEM.findall(data):
        try:
            key = load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError("--admin-public-key", str(path), f"PEM public keys ({error})") from error
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(
                "--admin-public-key", str(path), f"Ed25519 public keys, not {type(key).__name__}"
            )
        keys.append(key)
    if not keys:
        raise ConfigError("--admin-public-key", str(path), "at least one PEM public key")
    return keys


class AdminAuth:
    """Checks the Authorization header of admin requests."""

    def __init__(self, path: Path, audience: str) -> None:
        """Reads the keys now; raises ConfigError."""
        self._path = path
        self._audience = audience
        self._keys = load_public_keys(path)
        self._version = _version(path)

    def check(self, authorization: str | None, scope: Scope) -> None:
        """Raise Unauthenticated or Forbidden unless the header carries a valid token for `scope` (write includes read)."""
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise Unauthenticated("a bearer token is required")
        self._refresh()
        reason = "no key"
        for key in self._keys:
            try:
                claims = jwt.decode(
                    token.strip(),
                    key,
                    algorithms=["EdDSA"],
                    audience=self._audience,
                    leeway=CLOCK_SKEW_S,
                    options={"require": ["exp", "aud"]},
                )
            except jwt.InvalidSignatureError as error:
                reason = str(error)  # perhaps another key's
            except jwt.InvalidTokenError as error:
                raise Unauthenticated(str(error)) from error
            else:
                granted = claims.get("scope")
                if granted != "write" and granted != scope:
                    raise Forbidden(f"scope {scope!r} is required; the token has {granted!r}")
                return
        raise Unauthenticated(reason)

    def _refresh(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = load_public_keys(self._path)
        except ConfigError as error:
            # Keys that were good stay good: a half-written file must not lock the operator out.
            logger.warning("admin keys not reread", extra={"reason": str(error)})


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
