"""Finds the CRD files: packaged with the operator in a wheel, in `crds/` of a checkout. Read-only, cached."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trimtab_operator.names import RUN_KIND, SERVICE_KIND

FILES = {SERVICE_KIND: "inferenceservice.yaml", RUN_KIND: "tuningrun.yaml"}
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def directory() -> Path:
    """The folder that holds the CRD files; raises FileNotFoundError naming where it looked."""
    here = Path(__file__).resolve().parent
    # A wheel carries them inside the package; a checkout has them beside the three source roots.
    places = (here / "crds", here.parents[1] / "crds")
    for place in places:
        if (place / FILES[SERVICE_KIND]).is_file():
            return place
    raise FileNotFoundError(f"CRD files are in none of {', '.join(map(str, places))}; reinstall trimtab")


@cache
def definition(kind: str) -> dict[str, Any]:
    """The whole CustomResourceDefinition of `kind`. Shared: do not change it."""
    loaded: dict[str, Any] = yaml.load((directory() / FILES[kind]).read_text(), Loader=_FAST_LOADER)
    return loaded


@cache
def openapi(kind: str) -> dict[str, Any]:
    """The `openAPIV3Schema` of the served version. Shared: do not change it."""
    versions = definition(kind)["spec"]["versions"]
    schema: dict[str, Any] = versions[0]["schema"]["openAPIV3Schema"]
    return schema
