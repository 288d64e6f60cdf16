"""A pod's volumes as folders: filled at start, and kept up to date while it runs.

As a kubelet does it: every file is a link through `..data`, which is swapped in one rename, so a reader sees the old content or
the new, never a mixture. Supported: emptyDir, configMap, secret, projected (those, downwardAPI, serviceAccountToken), downwardAPI,
hostPath, and a persistentVolumeClaim whose PersistentVolume is a hostPath.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from support.cluster.agent.api import Api, ApiError, Json
from support.cluster.agent.env import ConfigError, Reader, field

TOKEN_LIFE_S = 3607  # what the API server writes into pods by default
_DATA = "..data"


class Volumes:
    """The volumes of one pod, below one folder."""

    def __init__(self, api: Api, pod: Json, folder: Path, pod_ip: str, host_ip: str) -> None:
        """folder: the pod's own."""
        self._api = api
        self._pod = pod
        self._folder = folder
        self._claims: dict[str, Path] = {}  # by name of the claim
        self._ips = (pod_ip, host_ip)
        self._reader = Reader(api, pod["metadata"]["namespace"])
        self._tokens: dict[str, tuple[bytes, float]] = {}
        self._written: dict[str, Mapping[str, bytes]] = {}

    def path(self, name: str) -> Path:
        """The folder behind the volume `name`."""
        volume = next(v for v in self._pod["spec"].get("volumes", []) if v["name"] == name)
        if "hostPath" in volume:
            return Path(str(volume["hostPath"]["path"]))
        if "persistentVolumeClaim" in volume:
            return self._claims[str(volume["persistentVolumeClaim"]["claimName"])]
        return self._folder / name

    async def prepare(self) -> None:
        """Make all of them; raises ConfigError while something they need is missing."""
        for volume in self._pod["spec"].get("volumes", []):
            if "persistentVolumeClaim" in volume:
                claim = str(volume["persistentVolumeClaim"]["claimName"])
                self._claims[claim] = await self._claimed(claim)
                continue
            path = self.path(volume["name"])
            if "hostPath" not in volume:
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(0o777)
        await self.refresh()

    async def refresh(self, pod: Json | None = None) -> None:
        """Bring ConfigMaps, Secrets, tokens and downward fields up to date; pod: its newest object."""
        self._pod = pod or self._pod
        for volume in self._pod["spec"].get("volumes", []):
            content = await self._content(volume)
            name = volume["name"]
            if content is not None and self._written.get(name) != content:
                write_atomically(self._folder / name, content)
                self._written[name] = content

    def remove(self) -> None:
        """Delete all of it, claims excepted."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _content(self, volume: Json) -> dict[str, bytes] | None:
        """Relative path → content; None for a volume that the node does not write."""
        if "projected" in volume:
            content: dict[str, bytes] = {}
            for source in volume["projected"].get("sources", []):
                content |= await self._source(source)
            return content
        for kind in ("configMap", "secret", "downwardAPI"):
            if kind in volume:
                source = dict(volume[kind])
                if kind == "secret":
                    source["name"] = source["secretName"]
                return await self._source({kind: source})
        for kind in ("emptyDir", "hostPath", "persistentVolumeClaim"):
            if kind in volume:
                return None
        raise ConfigError(f"this node agent knows no volume of kind {sorted(set(volume) - {'name'})}")

    async def _claimed(self, name: str) -> Path:
        """The folder behind a claim; ConfigError while there is none, as a kubelet waits for it."""
        claims = f"/api/v1/namespaces/{self._pod['metadata']['namespace']}/persistentvolumeclaims"
        try:
            claim = await self._api.get(f"{claims}/{name}")
            volume = claim["spec"].get("volumeName")
            if volume is None or claim.get("status", {}).get("phase") != "Bound":
                raise ConfigError(f'persistentvolumeclaim "{name}" is not bound')
            spec = (await self._api.get(f"/api/v1/persistentvolumes/{volume}"))["spec"]
        except ApiError as error:
            raise ConfigError(str(error)) from error
        if "hostPath" not in spec:
            raise ConfigError(f'this node agent knows only hostPath volumes; "{volume}" is another')
        return Path(str(spec["hostPath"]["path"]))

    async def _source(self, source: Json) -> dict[str, bytes]:
        if "serviceAccountToken" in source:
            wanted = source["serviceAccountToken"]
            return {wanted["path"]: await self._token(wanted)}
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items", [])
            return {
                i["path"]: field(i["fieldRef"]["fieldPath"], self._pod, *self._ips).encode() for i in items
            }
        for kind, resource in (("configMap", "configmaps"), ("secret", "secrets")):
            if kind in source:
                wanted = source[kind]
                optional = bool(wanted.get("optional", False))
                data = await self._reader.data(resource, wanted["name"], optional=optional) or {}
                return _selected(data, wanted, optional)
        raise ConfigError(f"this node agent knows no projection {sorted(source)}")

    async def _token(self, wanted: Json) -> bytes:
        """A bound token, renewed after 80 % of its life."""
        audience, life_s = wanted.get("audience", ""), int(wanted.get("expirationSeconds", TOKEN_LIFE_S))
        key = f"{audience}/{wanted['path']}"
        token, until = self._tokens.get(key, (b"", 0.0))
        if time.monotonic() < until:
            return token
        metadata = self._pod["metadata"]
        account = self._pod["spec"].get("serviceAccountName", "default")
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [audience] if audience else [],
                "expirationSeconds": life_s,
                "boundObjectRef": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                },
            },
        }
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        try:
            answer = await self._api.post(path, request)
        except ApiError as error:
            raise ConfigError(str(error)) from error
        token = str(answer["status"]["token"]).encode()
        self._tokens[key] = (token, time.monotonic() + 0.8 * life_s)
        return token


def _selected(data: Mapping[str, bytes], wanted: Json, optional: bool) -> dict[str, bytes]:
    """`items` picks and renames keys; without it all are taken."""
    if not wanted.get("items"):
        return dict(data)
    chosen = {}
    for item in wanted["items"]:
        if item["key"] in data:
            chosen[item["path"]] = data[item["key"]]
        elif not optional:
            raise ConfigError(f"references non-existent config key: {item['key']}")
    return chosen


def write_atomically(folder: Path, content: Mapping[str, bytes]) -> None:
    """Make `content` what `folder` shows, in one step; files that are no longer in it go."""
    old = folder / _DATA
    previous = os.readlink(old) if old.is_symlink() else None
    version = f"..{time.time_ns()}"
    for path, value in content.items():
        file = folder / version / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)
        file.chmod(0o644)
    (folder / version).mkdir(exist_ok=True)
    (folder / "..data_new").symlink_to(version)
    (folder / "..data_new").rename(old)
    heads = {Path(path).parts[0] for path in content}
    for head in heads:
        link = folder / head
        if not link.is_symlink():
            link.symlink_to(Path(_DATA, head))
    for entry in folder.iterdir():
        if entry.is_symlink() and not entry.name.startswith("..") and entry.name not in heads:
            entry.unlink()
    if previous is not None:
        shutil.rmtree(folder / previous, ignore_errors=True)
