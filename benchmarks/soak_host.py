"""`stagemesh worker` as if on a machine of its own: with a /dev/shm that it shares with nobody. Needs root.

python -m soak_host ARGUMENTS OF THE WORKER
"""

from __future__ import annotations

import os
import sys

OWN_SHARED_MEMORY = 'mount -t tmpfs shm /dev/shm && exec "$@"'

if __name__ == "__main__":
    worker = [sys.executable, "-m", "stagemesh_worker", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", OWN_SHARED_MEMORY, "sh", *worker])
