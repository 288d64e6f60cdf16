"""In which order workers get test files: the longest ones first, so that none is left alone with one at the end.

Used by `tests/conftest.py` in workers of pytest-xdist. A file that is missing here costs time, nothing else: the list needs to be right
about files that take half a minute and more. `make test ARGS=--durations=30` shows them.
"""

from __future__ import annotations

from pathlib import Path

_LONGEST = (
    # on a cluster
    *("test_rollout_matrix", "test_faults_api", "test_faults_operator", "test_tuning_run", "test_shadow_engines", "test_rollouts", "test_faults_engine"),
    *("test_faults_objects", "test_chart_life", "test_story", "test_simulated_runs", "test_worker_job", "test_nightly", "test_scraped", "test_operator"),
    *("test_faults_node", "test_monitors", "test_upgrade", "test_tuning_drift", "test_operator_pod", "test_invalid"),
    *("test_nodes", "test_rights", "test_model_sources", "test_namespaced"),
    # others
    *("test_demo_model", "test_local_service", "test_run", "test_local_lifecycle", "test_hub_model", "test_ends", "test_gguf"),
    *("test_dockerfile", "test_invalid_services", "test_docs", "test_search", "test_engine_loop", "test_equality", "test_target"),
)  # fmt: skip
_RANKS = {name: rank for rank, name in enumerate(_LONGEST)}


def rank(file: Path) -> int:
    """To sort by."""
    return _RANKS.get(file.stem, len(_RANKS))
