"""One bare API server for all tests of this folder, a fresh namespace for each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from support.kube_api import KubeApi, kube_api
from trimtab_operator.cluster.kube import Kube, load_credentials


@pytest.fixture(scope="session")
def api() -> Iterator[KubeApi]:
    with kube_api() as running:
        yield running


@pytest.fixture
def kube(api: KubeApi) -> Kube:
    return Kube(load_credentials(str(api.kubeconfig)).configuration)


@pytest.fixture
def namespace(kube: Kube) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name
