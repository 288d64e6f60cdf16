"""What the routes of one server share. Built once by `main`, passed to every router; no module-level globals anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab_engine.model_files import ModelFiles
from trimtab_engine.server.client import EngineClient
from trimtab_engine.server.lifecycle import Lifecycle
from trimtab_engine.server.options import ServerOptions

if TYPE_CHECKING:
    from trimtab_engine.server.live import LiveDoor
    from trimtab_engine.server.metrics.exporter import EngineMetrics
    from trimtab_engine.server.metrics.ledger import Ledger
    from trimtab_engine.server.text.model_text import ModelText
    from trimtab_engine.server.workload import WorkloadLog


@dataclass(slots=True, kw_only=True)
class AppState:
    """One server. `model_files` and `text` are None until the engine is ready; routes under /v1 are gated until then."""

    options: ServerOptions
    lifecycle: Lifecycle
    client: EngineClient
    ledger: Ledger
    metrics: EngineMetrics
    workload: WorkloadLog
    live: LiveDoor
    model_files: ModelFiles | None = None
    text: ModelText | None = None
    num_http_requests: int = 0  # being answered now, by the access middleware
