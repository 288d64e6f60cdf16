"""Which services have to be looked at after an event of a child or a pod, whatever somebody did to its labels."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab_operator import names
from trimtab_operator.cluster.handlers import concerned
from trimtab_operator.cluster.observe import Key

Json = dict[str, Any]
MADE = {"kind": names.SERVICE_KIND, "name": "chat", "controller": True}
REPLICA_SET = {"kind": "ReplicaSet", "name": "chat-engine-7d9f", "controller": True}


@pytest.mark.parametrize(
    ("label", "owners", "want"),
    [
        ("chat", [MADE], {"chat"}),
        ("chat", [REPLICA_SET], {"chat"}),
        ("other", [MADE], {"chat", "other"}),
        ("other", [REPLICA_SET], {"chat", "other"}),
        ("", [REPLICA_SET], {"chat"}),
        ("chat", [], {"chat"}),
        ("chat.shadow", [{"kind": names.RUN_KIND, "name": "try", "controller": True}], {"chat"}),
        ("chat.shadow", [{**REPLICA_SET, "name": "try-shadow-7d9f"}], {"chat"}),
        ("chat", None, {"chat"}),
        ("chat", [{**MADE, "name": "other", "controller": False}], {"chat"}),
        ("chat", [{"kind": "ReplicaSet", "name": "web-7d9f", "controller": True}], {"chat"}),
        ("chat", [{"kind": "ReplicaSet", "name": "x", "controller": True}], {"chat"}),
        ("chat-engine", [{**REPLICA_SET, "name": "chat-engine-engine-7d9f"}], {"chat-engine"}),
    ],
)
def test_an_event_is_about_the_service_of_the_label_and_about_the_one_that_made_it(
    label: str, owners: list[Json] | None, want: set[str]
) -> None:
    meta = {"labels": {names.LABEL_SERVICE: label}, "ownerReferences": owners}
    assert concerned("default", meta) == {Key("default", name) for name in want}
