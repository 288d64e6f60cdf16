"""Everything here needs a CUDA device; without one each test is skipped and says so."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # By the marker itself: keywords also hold parameters, and a test with one named "gpu" would be skipped unseen.
    here = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="no GPU: torch sees no CUDA device"))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
