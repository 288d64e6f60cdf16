"""The API server gets a certificate of another authority, whose file is mounted anew: nobody needs a restart to believe it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.cluster.relay import BreakableRelay
from support.cluster.story import wait_until
from support.cluster_operator import OperatorProcess, write_admin_key
from support.kube_api import KubeApi, kube_api
from support.services import resource
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Kube, load_credentials
from trimtab_operator.cluster.login import connection
from trimtab_tuner.cluster import kube as tuner_kube

pytestmark = pytest.mark.cluster
SUSPENDED = resource(suspend=True) | {"metadata": {"name": "chat", "namespace": "default"}}


@pytest.fixture
def own_api() -> Iterator[KubeApi]:
    """An API server that nobody else uses."""
    with kube_api() as running:
        yield running


def test_an_authority_that_is_rotated_is_taken_up_by_watches_requests_and_workers(
    own_api: KubeApi, tmp_path: Path
) -> None:
    address = urlsplit(own_api.url)
    assert address.hostname is not None
    assert address.port is not None
    with BreakableRelay(address.hostname, address.port) as relay:
        kubeconfig = tmp_path / "kubeconfig"
        relayed = own_api.kubeconfig.read_text().replace(own_api.url, f"https://127.0.0.1:{relay.port}")
        kubeconfig.write_text(relayed)
        write_admin_key(tmp_path)
        running = OperatorProcess(kubeconfig, tmp_path, "trusting", (
            "--namespace", "default", "--operator-namespace", "default", "--resync", "600"))  # fmt: skip
        kube = Kube(load_credentials(str(kubeconfig)).configuration)
        worker = tuner_kube.connect(str(kubeconfig))
        running.start()
        try:
            kube.create(SUSPENDED)

            def looked_at() -> bool:
                found = kube.get(kinds.SERVICE, "default", "chat")
                assert found is not None
                return bool(
                    found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]
                )

            wait_until(looked_at)
            before = served(own_api)
            own_api.rotate_authority()
            wait_until(lambda: served(own_api) != before, 120)
            relay.cut()
            kube.merge(kinds.SERVICE, "default", "chat", {"spec": {"engine": {"maxNumBatchedTokens": 256}}})
            wait_until(looked_at, 120, "the watch is open again, by another authority's certificate")
            read = worker.get(tuner_kube.SERVICE, "default", "chat")
            assert asyncio.run(read)["spec"]["engine"]["maxNumBatchedTokens"] == 256
            assert "CERTIFICATE_VERIFY_FAILED" not in running.log.read_text()
        finally:
            running.stop()


def served(api: KubeApi) -> str:
    """The certificate that the server shows now."""
    address = urlsplit(api.url)
    return ssl.get_server_certificate((str(address.hostname), int(address.port or 0)))


def test_what_is_rotated_out_is_believed_no_more_and_a_file_that_cannot_be_read_changes_nothing(
    own_api: KubeApi, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.crt"
    former = own_api.ca.read_bytes()
    authority.write_bytes(former)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(own_api.kubeconfig.read_text().replace(str(own_api.ca), str(authority)))
    context = connection(load_credentials(str(kubeconfig))).as_ssl_context()

    def shake_hands() -> None:
        async def once() -> None:
            address = urlsplit(own_api.url)
            _, writer = await asyncio.open_connection(
                address.hostname, address.port, ssl=context, server_hostname="127.0.0.1"
            )
            writer.close()
            await writer.wait_closed()

        asyncio.run(once())

    shake_hands()
    authority.write_text("half a fi")
    shake_hands()
    before = served(own_api)
    own_api.rotate_authority()
    wait_until(lambda: served(own_api) != before, 120)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands()
    authority.write_bytes(own_api.ca.read_bytes())
    shake_hands()
    authority.write_bytes(former)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands()
