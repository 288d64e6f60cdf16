"""Settings and fixtures for all tests: hypothesis's profiles, a tiny model, and one served engine on it."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import longest_first
from support.engine_server import EngineServer, start_engine
from support.tiny_models import tiny_chat_model

# Property tests are repeatable in CI and search freely on a developer's machine. No deadline anywhere: machines are
# shared, and a slow example is not a wrong one.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A shell starts what runs in its background with SIGINT ignored, and so would every process of the tests be, which are to end by it.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here, since pytest reads options before it finds `tests/cluster`."""
    parser.addoption(
        "--clusters", type=int, default=0, metavar="N",
        help="run cluster tests alone, and share their files out among N clusters, each in a namespace of its own (they wait most of the time)",
    )  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --clusters, read folders of that name alone: importing the other tests takes longer than all the rest of a collection."""
    if config.option.clusters and collection_path.is_file():
        return "cluster" not in collection_path.relative_to(config.rootpath).parts or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # pytest-xdist hands files out in this order
        items.sort(key=lambda item: longest_first.rank(item.path))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that the server can serve: two layers, 512 tokens, ChatML template; named "tiny"."""
    return tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def served_engine(tiny_model: Path) -> Iterator[EngineServer]:
    """`trimtab-engine serve` on the tiny model, ready, shared by all tests that leave it as they found it."""
    with start_engine(tiny_model) as server:
        yield server
