"""Ties a child to its parent's life, then becomes the given command. Run as a script: `launcher.py PARENT_PID COMMAND…`.

The kernel kills the child when the operator ends, in whatever way (kill -9 included). Linux only; elsewhere the command
just starts. Standard library alone, so that it costs a few milliseconds.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives execve


def main() -> None:
    """Become the command."""
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != int(sys.argv[1]):
            sys.exit("the parent ended before its child began")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
