"""Evaluates CEL rules as the API server does, with cel-python. Used by `schema` alone; knows nothing of our fields.

Only the part of CEL on which both agree is used in `crds/`: has, all, exists_one, matches, size, oldSelf, operators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import celpy
from celpy.adapter import json_to_cel

_NAMED = re.compile(r"\bself((?:\.[A-Za-z_]\w*)+)")


@cache
def _environment() -> celpy.Environment:
    return celpy.Environment()


@cache
def _program(rule: str) -> celpy.Runner:
    environment = _environment()
    return environment.program(environment.compile(rule))


def is_transition(rule: str) -> bool:
    """Whether the rule speaks of the old object, so that it holds only for updates."""
    return "oldSelf" in rule


def holds(rule: str, value: Any, old: Any = None) -> bool:
    """Whether `rule` holds for `value`; an evaluation error counts as refusal, as at the API server."""
    context: Mapping[str, Any] = {"self": json_to_cel(value)}
    if is_transition(rule):
        context = {**context, "oldSelf": json_to_cel(old)}
    try:
        return bool(_program(rule).evaluate(context))
    except celpy.CELEvalError:
        return False


def named_values(rule: str, value: Any) -> dict[str, Any]:
    """The fields that the rule names, with their values in `value`: what an error message shows."""
    found: dict[str, Any] = {}
    for match in _NAMED.finditer(rule):
        if rule[match.end() : match.end() + 1] == "(":  # a call such as self.name.matches(
            steps = match[1].strip(".").split(".")[:-1]
        else:
            steps = match[1].strip(".").split(".")
        current = value
        for step in steps:
            current = current.get(step) if isinstance(current, Mapping) else None
        if steps and current is not None:
            found[".".join(steps)] = current
    # An object that a guard asks for says nothing beside its named fields.
    return {
        name: item for name, item in found.items() if not any(other.startswith(f"{name}.") for other in found)
    }
