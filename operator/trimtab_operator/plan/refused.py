"""What the API server says of an object that it refused, told by the paths that its owner wrote. Pure.

Used by `cluster.reconcile`. A Deployment's pod template is `spec.podTemplate` laid over ours, so a typo in there comes back by paths of
the Deployment, and with numbers of containers that nobody wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab_operator import names
from trimtab_operator.errors import Finding

# `failed to create typed patch object (team/chat-engine; apps/v1, Kind=Deployment): .spec.x: field not declared in schema`
_TYPED = re.compile(r"^failed to create typed patch object \([^)]*\):\s*(?:errors:)?\s*")
_FIELD = re.compile(r"^\s*\.?(?P<path>[A-Za-z][^\s:]*(?:\[[^\]]*\][^\s:]*)*): (?P<message>.+)$")
_NUMBERED = re.compile(r"\.(containers|initContainers)\[(\d+)\]")
_TEMPLATE = "spec.template."


def findings(
    what: str, causes: Sequence[tuple[str, str]], message: str, applied: Iterable[Mapping[str, Any]]
) -> tuple[Finding, ...]:
    """`what` was asked (`PATCH …/deployments/chat-engine`), `causes` are (path, message) as far as they are told apart, `applied` the
    objects that were to be applied."""
    plural, _, name = "/".join(what.split("/")[-2:]).partition("/")
    listed = [(path, text) for path, text in causes if path] or _typed(message)
    if not listed:
        return (Finding(f"{plural}/{name}", None, message or "refused"),)
    refused = next((o for o in applied if o.get("kind") == "Deployment" and plural == "deployments"), None)
    return tuple(_finding(f"{plural}/{name}", path, text, refused) for path, text in listed)


def _typed(message: str) -> list[tuple[str, str]]:
    """Fields that the kind does not have, one a line."""
    if not _TYPED.match(message):
        return []
    lines = _TYPED.sub("", message).splitlines()
    return [(match["path"], match["message"]) for line in lines if (match := _FIELD.match(line))]


def _finding(child: str, path: str, text: str, deployment: Mapping[str, Any] | None) -> Finding:
    if deployment is None or not path.startswith(_TEMPLATE):
        return Finding(f"{child} {path}", None, text)
    spec = deployment["spec"]["template"].get("spec") or {}

    def by_name(match: re.Match[str]) -> str:
        return f".{match[1]}[{_name(spec, match[1], int(match[2])) or match[2]}]"

    asked = _NUMBERED.search(path)
    hint = ""
    if asked and path.endswith(".image") and _name(spec, asked[1], int(asked[2])) != names.ENGINE_CONTAINER:
        hint = f"; every container but `{names.ENGINE_CONTAINER}`, whose image is ours, needs one"
    theirs = _NUMBERED.sub(by_name, path).removeprefix(_TEMPLATE)
    return Finding(f"spec.podTemplate.{theirs}", None, f"{text}{hint}")


def _name(spec: Mapping[str, Any], kind: str, number: int) -> str | None:
    listed = spec.get(kind) or []
    return str(listed[number].get("name")) if number < len(listed) else None
