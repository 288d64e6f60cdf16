"""What a container image stands for on this node: a command of the test's own environment.

The table maps the last part of an image's name (no registry, no tag, no digest) to its entrypoint. An image that is not in it cannot
be pulled, as in a cluster. `trimtab-engine` in a pod is then the console script of the environment that runs the agent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SCRIPTS = Path(sys.executable).parent
_CHECKOUT = Path(__file__).resolve().parents[4]
PATH = f"{_SCRIPTS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Image:
    """An image that this node has. entrypoint empty: the container must name a command. user: its USER."""

    entrypoint: tuple[str, ...]
    user: int = 0


def default_table() -> dict[str, Image]:
    """The images that every node has; users as in the Dockerfile."""
    table = {
        f"{prefix}{name}": Image((str(_SCRIPTS / f"trimtab-{name}"),), user=65532)
        for name in ("engine", "operator", "tuner")
        for prefix in ("trimtab-", "")
    }
    return table | {"python": Image((sys.executable, "-P")), "busybox": Image(())}


class ImageNotFound(Exception):
    """The image is not in the table; the message is a registry's."""


def find(image: str, table: Mapping[str, Image]) -> Image:
    """What `image` is; raises ImageNotFound."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    if name not in table:
        raise ImageNotFound(f'failed to pull image "{image}": not found')
    return table[name]


def content_paths(further: Iterable[Path] = ()) -> list[str]:
    """Folders that images hold: the checkout, the environment and what it points to, and `further` ones (models, say)."""
    candidates = {_CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), *further}
    candidates |= {Path(entry) for entry in sys.path if entry.endswith("site-packages")}
    chosen: list[Path] = []
    for path in sorted(path.resolve() for path in candidates):
        if path.is_dir() and not any(path.is_relative_to(other) for other in chosen):
            chosen.append(path)
    return [str(path) for path in chosen]
