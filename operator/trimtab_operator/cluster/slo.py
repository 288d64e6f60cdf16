"""Asks Prometheus how many requests met their targets, and says when a service's verdict has changed.

`main` calls `turn` in a thread of its own when there is an address: one query for each length of window, whatever the number of services.
Which Prometheus is the operator's configuration, so that no tenant names an address that the operator then calls. Nothing depends
on it: while it is away, SLOMet is Unknown and says so.
"""

from __future__ import annotations

import logging
import math
import re
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from trimtab_operator import names
from trimtab_operator.api.service import Slo
from trimtab_operator.cluster.observe import Key
from trimtab_operator.plan.slo import UNASKED, Attainment, Counts, judge

logger = logging.getLogger(__name__)

PERIOD_S = 30.0
FIRST_S = 3.0  # after the first looks, so that a new operator's SLOMet is Unknown for no longer
TIMEOUT_S = 20.0
# As a Deployment names them. A long name is cut, so a shadow's of a run that is called SERVICE-engine may have as many parts; no
# template's hash has a vowel.
_POD = re.compile(r"(.+)-engine-(?!shadow-)[^-]+-[^-]+")
_LABELS = ("namespace", "pod", "slo_class", "slo", "outcome")


class PrometheusError(Exception):
    """No counts; the message is short and the same for the same cause, since it goes into a condition."""


class SloWatch:
    """See the module. `notify` hears of services whose verdict changed."""

    def __init__(self, url: str, credentials: Path | None, notify: Callable[[Key], None]) -> None:
        self._url = url.rstrip("/") + "/api/v1/query"
        self._credentials = credentials
        self._notify = notify
        self._lock = threading.Lock()
        self._wanted: dict[Key, Slo] = {}
        self._found: dict[Key, Attainment] = {}

    def about(self, key: Key, slo: Slo) -> Attainment:
        """The last verdict on a service; from now on it is asked for."""
        with self._lock:
            self._wanted[key] = slo
            return self._found.get(key, UNASKED)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        with self._lock:
            self._wanted.pop(key, None)
            self._found.pop(key, None)

    def turn(self) -> None:
        """Ask once for all services."""
        with self._lock:
            wanted = dict(self._wanted)
        by_window: dict[float, list[Key]] = defaultdict(list)
        for key, slo in wanted.items():
            by_window[slo.window_s].append(key)
        for window_s, keys in by_window.items():
            try:
                counts = self._counts(window_s)
            except PrometheusError as error:
                logger.warning("no SLO counts", extra={"error": str(error)})
                found = dict.fromkeys(keys, Attainment("Unknown", names.METRICS_UNAVAILABLE, str(error)))
            else:
                found = {key: judge(wanted[key], counts.get(key, {})) for key in keys}
            self._take(found)

    def _take(self, found: Mapping[Key, Attainment]) -> None:
        with self._lock:
            changed = [
                key for key in found if key in self._wanted and self._found.get(key, UNASKED) != found[key]
            ]
            self._found.update({key: found[key] for key in changed})
        for key in changed:
            self._notify(key)

    def _counts(self, window_s: float) -> dict[Key, dict[tuple[str, str], Counts]]:
        """Of every service that Prometheus knows; raises PrometheusError."""
        by = ", ".join(_LABELS)
        query = f"sum by ({by}) (increase(trimtab_slo_requests_total[{round(window_s)}s]))"
        sums: dict[Key, dict[tuple[str, str], Counts]] = defaultdict(dict)
        for sample in self._ask(query):
            labels, value = sample
            engine = _POD.fullmatch(labels.get("pod", ""))
            if engine is None:
                continue  # scraped without the labels of a pod, or not ours
            of = sums[Key(labels.get("namespace", ""), engine.group(1))]
            place = (labels.get("slo_class", ""), labels.get("slo", ""))
            met, violated = of.get(place, Counts())
            late = labels.get("outcome") == "violated"
            of[place] = Counts(met + value * (not late), violated + value * late)
        return sums

    def _ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        try:
            headers, login, context = self._login()
            with httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=context, auth=login) as client:
                answer = client.post(self._url, data={"query": query}, headers=headers)
            if answer.status_code != 200:
                raise PrometheusError(f"Prometheus answers {answer.status_code}")
            content = answer.json()
            found = [
                (dict(sample["metric"]), float(sample["value"][1])) for sample in content["data"]["result"]
            ]
            return [(labels, value) for labels, value in found if math.isfinite(value)]
        except httpx.HTTPError as error:
            raise PrometheusError(f"Prometheus does not answer ({type(error).__name__})") from error
        except OSError as error:
            raise PrometheusError(
                f"the credentials for Prometheus cannot be used ({type(error).__name__})"
            ) from error
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise PrometheusError("the answer is not Prometheus'") from error

    def _login(self) -> tuple[dict[str, str], tuple[str, str] | None, ssl.SSLContext]:
        """Read anew each time: a mounted Secret may change."""

        def entry(name: str) -> str | None:
            path = self._credentials / name if self._credentials is not None else None
            return path.read_text().strip() if path is not None and path.exists() else None

        token, user, password = entry("token"), entry("username"), entry("password")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        login = (user, password or "") if user and not token else None
        return headers, login, ssl.create_default_context(cadata=entry("ca.crt"))
