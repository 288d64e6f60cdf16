"""Options of the HTTP process: addresses, limits, keys, drain times. Built by `cli`, read by everything in `server`.

Static for the life of the process. What the engine process needs is in `config.EngineConfig`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from trimtab_engine.errors import ConfigError

MAX_QUEUED_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything about serving that needs a restart to change (the API-key file is reread on change)."""

    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port, see port_file
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    port_file: Path | None = None  # JSON {"port", "admin_port", "pid"}, written once both ports are bound
    live_config: Path | None = None  # live.json of a mounted ConfigMap, polled
    max_queued_requests: int = 512
    drain_timeout_s: float = 60.0
    leaving_time_s: float = 0.0  # how long "leaving" lasts after SIGTERM before new requests are refused
    shed_late: bool = False  # streams wait for their first token, as they may still be refused
    stall_timeout_s: float = 120.0
    client_stall_timeout_s: float = 30.0  # a reader of a stream that takes nothing for so long has left
    api_keys: Path | None = None  # JSON or YAML mapping of name to key
    admin_public_key: Path | None = None  # PEM, one or several Ed25519 public keys
    admin_audience: str | None = None
    trusted_class_header: str | None = None
    trusted_tenant_header: str | None = None
    log_format: str = "text"

    def __post_init__(self) -> None:
        for path, port in (("--port", self.port), ("--admin-port", self.admin_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(path, port, "a port from 0 (any free one) to 65535")
        if not 1 <= self.max_queued_requests <= MAX_QUEUED_REQUESTS:
            allowed = f"an integer from 1 to {MAX_QUEUED_REQUESTS}"
            raise ConfigError("--max-queued-requests", self.max_queued_requests, allowed)
        for path, value in (
            ("--drain-timeout", self.drain_timeout_s),
            ("--leaving-time", self.leaving_time_s),
        ):
            if not 0 <= value <= 86_400:
                raise ConfigError(path, value, "seconds from 0 to 86400")
        for path, value in (
            ("--stall-timeout", self.stall_timeout_s),
            ("--client-stall-timeout", self.client_stall_timeout_s),
        ):
            if not 0.1 <= value <= 86_400:
                raise ConfigError(path, value, "seconds from 0.1 to 86400")
        if self.admin_public_key is None and not is_loopback(self.admin_host):
            raise ConfigError(
                "--admin-host",
                self.admin_host,
                "a loopback address, unless --admin-public-key names a file of keys: whoever reaches "
                "the admin port can retune the engine",
            )
        if self.admin_public_key is not None and not self.admin_audience:
            raise ConfigError(
                "--admin-audience",
                self.admin_audience,
                "a name of this engine when --admin-public-key is given",
            )


def is_loopback(host: str) -> bool:
    """Whether an address to bind can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
