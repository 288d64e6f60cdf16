"""The engine image and the pod that runs it agree on the one folder that is writable and survives: the cache."""

import re
from pathlib import Path

from trimtab_operator.plan.manifests import HOME

DOCKERFILE = Path(__file__).resolve().parents[2] / "Dockerfile"


def test_the_image_caches_where_the_pod_mounts_a_volume() -> None:
    stage = DOCKERFILE.read_text().split("FROM base AS engine")[1]
    variables = dict(
        pair.split("=", 1) for line in re.findall(r"^ENV (.*)$", stage, re.MULTILINE) for pair in line.split()
    )
    assert variables["HOME"] == HOME
    caches = [value for name, value in variables.items() if "CACHE" in name]
    assert caches
    assert [value for value in caches if not value.startswith(f"{HOME}/")] == []
