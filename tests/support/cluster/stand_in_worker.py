"""In the place of a run's worker in tests of what the operator does about one: the run's name says how it behaves.

`…fails…` ends with exit status 2 at once; every other one waits until it is ended. The image `trimtab-stand-in` of the test cluster;
the real worker is `trimtab-tuner work`.
"""

import argparse
import signal
import sys
import time

_FINAL, _STOPPED = 2, 128 + signal.SIGTERM


def main() -> int:
    """Entry point → exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    known, _ = parser.parse_known_args()
    if "fails" in known.run:
        print("first things first", file=sys.stderr)
        print("no request was recorded", file=sys.stderr)
        return _FINAL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_STOPPED))
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main())
