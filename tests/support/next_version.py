"""`trimtab-operator` as its next version could be: pods with other fields, and another hash of what restarts them.

Run as a program, in place of the console script, by the tests of upgrades and of the way back. What it changes is code that a
version may change at will; what it reads and writes in the cluster is the real operator's.
"""

from __future__ import annotations

import sys
from typing import Any

from trimtab_operator import cli
from trimtab_operator.plan import manifests

MARK = {"name": "TRIMTAB_NEXT", "value": "1"}


def become_next() -> None:
    """Change this process's operator."""
    version: Any = manifests
    environment, template_hash = version._environment, version.template_hash
    version._environment = lambda *arguments: [*environment(*arguments), MARK]
    version.template_hash = lambda *arguments: f"next-{template_hash(*arguments)}"


if __name__ == "__main__":
    become_next()
    sys.exit(cli.main())
