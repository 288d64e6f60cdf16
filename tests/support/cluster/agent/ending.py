"""The last words of a node about a pod: its final status, and that its object may go. Used by `pod`, `pods` and `fake`."""

from __future__ import annotations

import asyncio
import logging

from support.cluster.agent.api import STRATEGIC_PATCH, Api, ApiError, Json

_RETRY_S = 1.0

_log = logging.getLogger(__name__)


async def finish(api: Api, pod: Json, status: Json) -> None:
    """Write the last status, then delete the object for good; repeated until the API server has heard it."""
    metadata = pod["metadata"]
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
    while True:
        try:
            await api.patch(
                f"{path}/status", {"metadata": {"uid": metadata["uid"]}, "status": status}, STRATEGIC_PATCH
            )
            await api.delete(
                path,
                {
                    "apiVersion": "v1",
                    "kind": "DeleteOptions",
                    "gracePeriodSeconds": 0,
                    "preconditions": {"uid": metadata["uid"]},
                },
            )
            return
        except ApiError as error:
            if error.status in (404, 409, 422):  # gone already, or another pod of that name
                return
            _log.warning("end of %s: %s", metadata["name"], error)
            await asyncio.sleep(_RETRY_S)
