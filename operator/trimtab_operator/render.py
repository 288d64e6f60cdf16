"""Texts of `trimtab-operator render`: the manifests as YAML, and what a change would restart, and why. Pure, but for its inputs.

Called by `cli`. Knows nothing of clusters: it shows what the operator would apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from trimtab_operator.api import InferenceService
from trimtab_operator.plan import nightly
from trimtab_operator.plan.manifests import Context, manifests
from trimtab_operator.plan.template import Change, changes, restarts
from trimtab_operator.plan.tuner_pod import Tuner

_ORDER = {"restart": 0, "live": 1, "at once": 2}


class _Dumper(yaml.SafeDumper):
    """Block style, texts of several lines as blocks, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def as_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """The documents as one YAML stream."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)


def render(service: InferenceService, context: Context, tuner: Tuner) -> str:
    """Everything the operator would apply for `service`."""
    return as_yaml([*nightly.manifests(service, tuner), *manifests(service, context)])


def difference(old: InferenceService, new: InferenceService) -> str:
    """What going from `old` to `new` would restart, what is live, and why; one line a field."""
    found = sorted(changes(old, new), key=lambda change: (_ORDER[change.effect], change.path))
    if not found:
        return "no field of spec differs\n"
    width = max(len(change.path) for change in found)
    lines = [_line(change, width) for change in found]
    if restarts(old, new):
        pace = new.spec.rollout
        lines.append(
            f"→ engines are replaced one after another ({pace.strategy}, maxSurge {pace.max_surge}, "
            f"maxUnavailable {pace.max_unavailable}); nothing accepted is lost"
        )
    else:
        lines.append("→ no engine restarts")
    return "\n".join(lines) + "\n"


def _line(change: Change, width: int) -> str:
    return f"{change.effect:<8} {change.path:<{width}}  {_shown(change.old)} → {_shown(change.new)}  ({change.why})"


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
