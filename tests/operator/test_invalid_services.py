"""Whatever is done to a resource, the answer is a parsed one or findings with paths: never another exception."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from support.spoiled import FULL, FULL_RUN, POISON, distinct, spoiled
from trimtab_operator import documents, schema
from trimtab_operator.errors import InvalidResource

Json = dict[str, Any]


def parse(built: Json) -> object:
    """As `validate` and local mode do: from a text."""
    read = documents.parse(yaml.safe_dump(built), "the document")
    return schema.parse_run(read) if built.get("kind") == "TuningRun" else schema.parse_service(read)


@pytest.mark.parametrize(
    ("full", "count", "least", "paths"),
    [(FULL, 400, 300, 60), (FULL_RUN, 100, 75, 10)],
    ids=["service", "run"],
)
def test_spoiled_resources_end_in_findings_with_paths(full: Json, count: int, least: int, paths: int) -> None:
    refused = [
        error for built in distinct(spoiled(full), count) if (error := refusal(parse, built)) is not None
    ]
    assert len(refused) >= least
    for error in refused:
        assert error.errors
        for finding in error.errors:
            assert finding.path
            assert finding.allowed
            assert len(str(finding)) < 5000
    assert len({finding.path for error in refused for finding in error.errors}) > paths, "the places are many"


def refusal(read: Callable[[Json], object], built: Json) -> InvalidResource | None:
    """Why it is refused; None when it is valid."""
    try:
        read(built)
    except InvalidResource as error:
        return error
    return None


@pytest.mark.parametrize("poison", POISON, ids=lambda p: repr(p)[:20])
def test_poison_as_the_whole_of_each_section_is_refused_or_understood(poison: Any) -> None:
    for section in FULL["spec"]:
        built = copy.deepcopy(FULL)
        built["spec"][section] = poison
        assert all(path.startswith("spec") for path in refusals(built)), section


def refusals(built: Json) -> list[str]:
    """Paths of all findings; empty when the resource is valid."""
    error = refusal(schema.parse_service, built)
    return [] if error is None else [finding.path for finding in error.errors]
