"""`python -m stagemesh_worker`: the `stagemesh worker` command."""

import sys

from stagemesh.cli.main import run

if __name__ == "__main__":
    sys.argv.insert(1, "worker")
    run()
