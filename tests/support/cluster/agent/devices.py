"""Which GPU of a node belongs to which pod: a device plugin's accounting."""

from __future__ import annotations


class NotEnoughDevices(Exception):
    """A pod was bound to a node that has not enough free GPUs; the message says how many there are."""


class Devices:
    """Hands out GPU indices 0 … count - 1."""

    def __init__(self, count: int) -> None:
        self._free = set(range(count))
        self._held: dict[str, list[int]] = {}

    def take(self, pod_uid: str, count: int) -> list[int]:
        """The indices of `count` GPUs for the pod, lowest first; raises NotEnoughDevices and takes none."""
        if count > len(self._free):
            raise NotEnoughDevices(f"requested {count} GPUs, {len(self._free)} are free")
        taken = sorted(self._free)[:count]
        self._free.difference_update(taken)
        self._held[pod_uid] = taken
        return taken

    def give_back(self, pod_uid: str) -> None:
        """The pod has ended."""
        self._free.update(self._held.pop(pod_uid, []))
