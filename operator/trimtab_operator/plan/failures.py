"""Why an engine ended: the operator's reasons from exit status and last output. Pure; the same for pods and processes."""

from __future__ import annotations

import re

from trimtab_operator import names

# What torch and the engine say when the device is full: there is no place for this replica, as for a pod without a GPU.
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|bytes are in use after loading", re.IGNORECASE)

# An extended resource has a domain in its name; the scheduler's plugin for claims speaks of them by that word.
_NO_DEVICE = re.compile(r"Insufficient [^\s,]+/[^\s,]+|resourceclaim", re.IGNORECASE)


def no_memory(tail: str) -> bool:
    """Whether the last output says that the device is full."""
    return _NO_MEMORY.search(tail) is not None


def reason(exit_status: int, tail: str, was_ready: bool) -> str:
    """A reason of `names`. `exit_status` as a kubelet or a shell gives it: above 128 for a signal; below 0 too."""
    if not was_ready and no_memory(tail):
        return names.INSUFFICIENT_GPU
    # An engine that ends by itself before it was ever ready could not load; a killed one says nothing of that.
    gave_up = 0 < exit_status < 128 and not was_ready
    return names.MODEL_LOAD_FAILED if gave_up else names.ENGINE_CRASHED


def no_place(message: str) -> str:
    """What a replica without a place lacks: a device, unless the scheduler names only other things (memory, node labels)."""
    by_scheduler = "nodes are available" in message
    return names.UNSCHEDULABLE if by_scheduler and not _NO_DEVICE.search(message) else names.INSUFFICIENT_GPU
