"""Entry of the engine process: `python -P -m trimtab_engine.worker FD [text|json]`. Started by `server.client`, never by hand."""

from __future__ import annotations

import os
import sys

from trimtab_engine import logs
from trimtab_engine.runtime import process

if __name__ == "__main__":
    logs.configure(sys.argv[2] if len(sys.argv) > 2 else "text")
    code = process.main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's threads and atexit hooks have nothing to save and can hang
