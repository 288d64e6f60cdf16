"""Which services have to be looked at after an event of a child or a pod, whatever somebody did to its labels; and watches that fail."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import kopf
import pytest

from trimtab_operator import names
from trimtab_operator.cluster.handlers import _configure, concerned
from trimtab_operator.cluster.main import _not_again
from trimtab_operator.cluster.observe import Key
from trimtab_operator.cluster.resync import WATCH_GRACE_S

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


def test_a_watch_tries_for_ever_and_is_back_before_it_is_taken_for_dead() -> None:
    settings = kopf.OperatorSettings()
    _configure(settings)
    for _ in range(2):  # each request begins anew
        assert not isinstance(settings.networking.error_backoffs, (int, float))
        pauses = list(itertools.islice(settings.networking.error_backoffs, 10_000))
        assert len(pauses) == 10_000, "one that gives up ends the process, whichever namespace was refused"
        assert max(pauses) < WATCH_GRACE_S / 2
        assert sum(pauses[:5]) < 15, "a server that was gone for a moment is found again soon"


@pytest.mark.parametrize(
    ("logger", "message", "want"),
    [
        ("kopf._cogs.clients.watching", "Request attempt #1 failed; will retry: GET /x -> APIForbiddenError()", True),
        ("kopf._cogs.clients.watching", "Request attempt #2 failed; will retry: GET /x -> APIForbiddenError()", False),
        ("kopf._cogs.clients.watching", "Request attempt #31/81 failed; will retry: GET /x -> TimeoutError()", False),
        ("kopf._cogs.clients.watching", "Request attempt #2 failed; escalating: GET /x -> APIServerError()", True),
        ("trimtab_operator.cluster.kube", "Request attempt #2 failed; will retry", True),
    ],
)  # fmt: skip
def test_a_watch_that_fails_for_months_says_so_once(logger: str, message: str, want: bool) -> None:
    assert _not_again(logging.LogRecord(logger, logging.ERROR, "", 1, message, None, None)) is want
