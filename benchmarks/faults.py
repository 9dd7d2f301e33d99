"""Every fault on a mesh of real processes: what is noticed, after how long, and what clients saw, as a table.

    python benchmarks/faults.py                                       # all faults, idle and under load
    python benchmarks/faults.py --only "kill -9"                      # those whose name has these words
    python benchmarks/faults.py --write docs/operations/failures.md   # and put the table into the page

One head, two nodes with a replica each, the synthetic engine; every fault hits the first node, its replica or the head,
on a mesh of its own (tests/mesh/faults/catalogue.py). Times are from the blow to the head's event (or, where the head
itself is hit, to the node's log line), and from the repair until both nodes are live and both replicas ready; where
nobody repairs anything, from the blow. Repairs follow what is noticed at once, or come after two seconds where nothing
is. Idle rows ask three times after the event; the others have three clients that ask all along.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers of the fault tests

from stagemesh_head.registry.settings import RegistrySettings
from tests.mesh.faults.catalogue import FAULTS, Fault
from tests.mesh.faults.measure import Events, Row, measure
from tests.mesh.faults.processes import eventually
from tests.mesh.faults.scene import scene

HEADER = (
    "| fault | clients | noticed as | after | healed after | requests | failed | slowest |",
    "|---|---|---|---|---|---|---|---|",
)
BEGIN, END = "<!-- table: benchmarks/faults.py -->", "<!-- end of the table -->"


def line(row: Row) -> str:
    """A row of the table."""
    after, healed = ("-" if took is None else f"{took:.2f} s" for took in (row.after_s, row.healed_s))
    noticed = row.noticed.partition("\n")[0].replace("|", "/")
    return (
        f"| {row.fault} | {row.clients} | {noticed} | {after} | {healed} "
        f"| {row.requests} | {row.failed} | {row.slowest_s:.1f} s |"
    )


def measure_anew(fault: Fault, *, loaded: bool) -> Row:
    """Measure on a mesh of its own, so that no fault inherits the damage of another."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, scene(Path(folder)) as made:
        if fault.prepare is not None:
            fault.prepare(made)
        made.start()
        with contextlib.closing(Events(made.mesh.address)) as events:
            eventually("events come", lambda: events.seen)
            row = measure(fault, made, events, loaded=loaded, lease_s=RegistrySettings().lease_s)
        return row.with_short_paths(folder)


def run(faults: Sequence[Fault], say: Callable[[str], None]) -> list[str]:
    """Measure all, idle and under load; the table, line by line."""
    lines = list(HEADER)
    say("\n".join(lines))
    for fault in faults:
        for loaded in (False, True):
            clients = "load" if loaded else "idle"
            try:
                if reason := fault.why_not():
                    raise OSError(reason)
                row = measure_anew(fault, loaded=loaded)
            except (AssertionError, OSError) as error:
                text = str(error).partition("\n")[0]
                lines.append(f"| {fault.name} | {clients} | not measured: {text} | - | - | - | - | - |")
            else:
                lines.append(line(row))
                for text in row.errors:
                    print(f"  {text}", file=sys.stderr, flush=True)
            say(lines[-1])
    return lines


def write(page: Path, table: Sequence[str], took_s: float) -> None:
    """Put the table into a page, between its two marks."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page}: has no lines {BEGIN} and {END}")
    load = os.getloadavg()[2]
    where = (
        f"Measured in one sweep of {took_s / 60:.0f} minutes on {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores, "
        f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}; load average of the last "
        f"15 minutes at its end {load:.1f}."
    )
    page.write_text("\n".join([before + begin, *table, "", where, end + after]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="only faults whose name has these words; may be given often")
    parser.add_argument("--write", type=Path, metavar="PAGE", help=f"put the table into PAGE, below its line {BEGIN}")
    arguments = parser.parse_args()
    wanted = arguments.only or [""]
    faults = [fault for fault in FAULTS if any(words in fault.name for words in wanted)]
    if not faults:
        parser.error(f"--only {', '.join(wanted)}: want words of one of {', '.join(f.name for f in FAULTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the mesh of the moment is taken down
    started = time.monotonic()
    table = run(faults, lambda text: print(text, flush=True))
    if arguments.write is not None:
        write(arguments.write, table, time.monotonic() - started)


if __name__ == "__main__":
    main()
