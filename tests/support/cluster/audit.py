"""What an account asked of the API server, by the server's own record: verb, resource, namespace, answer.

The control plane audits requests made with service accounts' tokens. A record is written when the answer is; watches, when they end
and when they begin.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `resource` has its subresource (`inferenceservices/status`) and is empty for discovery; `namespace` is empty for
    a request over all namespaces."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    path: str
    code: int


def requests(log: Path, user: str, start: int = 0) -> list[Request]:
    """Everything that `user` asked since the log was `start` bytes long."""
    found = []
    with log.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                break  # being written
            record = json.loads(line)
            if record["user"]["username"] == user:
                found.append(_request(record))
    return found


def _request(record: Json) -> Request:
    about = record.get("objectRef") or {}
    parts = [about.get("resource", ""), about.get("subresource", "")]
    return Request(
        verb=record["verb"],
        group=about.get("apiGroup", ""),
        resource="/".join(part for part in parts if part),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        path=record["requestURI"].partition("?")[0],
        code=(record.get("responseStatus") or {}).get("code", 0),
    )
