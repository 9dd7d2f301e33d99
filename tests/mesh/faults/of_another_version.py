"""`python -m tests.mesh.faults.of_another_version ...`: a node agent as a later release would have it."""

import sys

import stagemesh

VERSION = "7.0.0"

if __name__ == "__main__":
    stagemesh.__version__ = VERSION
    from stagemesh.cli.main import run

    sys.argv.insert(1, "worker")
    run()
