"""``python -m rollstream.cli.launcher.reaper MARKER``: kills what a launcher leaves behind when it vanishes.

It holds the read end of a pipe whose only writer is the launcher. End of file means that the launcher is gone, by
whatever death; then every process with its marker is killed. After an orderly stop there is nothing left to kill.
"""

from __future__ import annotations

import signal
import sys

from rollstream.cli.launcher.leash import kill_marked


def main() -> None:
    """Wait for the launcher's end, then sweep."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    kill_marked(sys.argv[1])


if __name__ == "__main__":
    main()
