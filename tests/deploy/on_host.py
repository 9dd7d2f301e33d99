"""`python -m tests.deploy.on_host HOST MODULE ...`: become a Python module on one of the hosts of `three_hosts`.

HOST `-` is this host, as a pod of it: just with a /dev/shm of its own.

The process keeps its id, so that signals reach the module itself. Its /dev/shm is its own, as a container's is, so that
no other "host" can map what it shares.
"""

from __future__ import annotations

import os
import sys

POD = "-"
_OWN_SHM = 'mount -t tmpfs -o size=256m shm /dev/shm && exec "$@"'


def main() -> None:
    """Never returns."""
    host, *module = sys.argv[1:]
    enter = ["unshare", "--mount"] if host == POD else ["ip", "netns", "exec", host]
    os.execvp(enter[0], [*enter, "sh", "-c", _OWN_SHM, "sh", sys.executable, "-m", *module])


if __name__ == "__main__":
    main()
