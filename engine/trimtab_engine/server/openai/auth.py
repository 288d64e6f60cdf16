"""API keys: several, named, from a file that is reread when it changes, so that keys rotate without a restart.

`build_router` makes one `ApiKeys` and asks it before each guarded route. The name of the key is the request's tenant.
Knows nothing of routes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

import yaml

from trimtab_engine.errors import ConfigError
from trimtab_engine.server.openai.errors import HttpError

logger = logging.getLogger(__name__)


class ApiKeys:
    """Keys of one file (JSON or YAML, name: key). A file that became unreadable leaves the last good keys in force."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be used at start."""
        self._path = path
        self._stamp = _stamp(path)
        self._names = _load(path)

    def tenant(self, authorization: str | None) -> str:
        """Name of the key in an `Authorization: Bearer …` header; raises HttpError 401."""
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise HttpError(401, "no API key: send 'Authorization: Bearer KEY'", code="missing_api_key")
        digest = _digest(key.strip())
        # Every key is compared, each in constant time: the answer's timing tells nothing about any of them.
        found = [name for known, name in self._names.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise HttpError(401, "this API key is not known here", code="invalid_api_key")
        return found[0]

    def _reload(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._names = _load(self._path)
        except ConfigError as error:
            logger.warning("API keys not reloaded, the previous ones stay", extra={"error": str(error)})
        else:
            logger.info("API keys reloaded", extra={"names": sorted(self._names.values())})


def _stamp(path: Path) -> tuple[int, int, int] | None:
    # A mounted Secret is swapped by a symlink: the inode changes even if size and time happen to be equal.
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _load(path: Path) -> dict[bytes, str]:
    """Digest of key → name. YAML is a superset of JSON, so one parser reads both."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    # PyYAML's constructors let int("0b"), unhashable keys and deep nesting through as the last three.
    except (OSError, ValueError, yaml.YAMLError, TypeError, RecursionError) as error:
        # The error may quote the file, and the file holds secrets.
        raise ConfigError(
            "--api-keys", str(path), f"a readable JSON or YAML file ({type(error).__name__})"
        ) from None
    if not isinstance(raw, dict) or not raw:
        raise ConfigError("--api-keys", str(path), "a file with a mapping of name to key, at least one")
    names: dict[bytes, str] = {}
    for name, key in raw.items():
        if not isinstance(name, str) or not isinstance(key, str) or not key.strip():
            raise ConfigError(
                "--api-keys", str(path), f"a non-empty string as key of each name (wrong for {name!r})"
            )
        names[_digest(key.strip())] = name
    return names
