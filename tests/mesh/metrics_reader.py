"""Reads a process's metrics as a scraper does."""

from __future__ import annotations

import socket
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Scrape:
    """The metrics of one moment."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]
        self.families = {family.name for family in families}
        self.names = self.families | {sample.name for sample in self.samples}

    def rows(self, name: str, **labels: str) -> list[Sample]:
        """The samples of that name with these labels, and perhaps others."""
        wanted = labels.items()
        return [s for s in self.samples if s.name == f"stagemesh_{name}" and wanted <= s.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Their sum."""
        return sum(sample.value for sample in self.rows(name, **labels))


def free_address(ports: int = 1) -> str:
    """The first of so many ports in a row, all free a moment ago, of this machine."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if all(_is_free(port + number) for number in range(1, ports)):
                return f"127.0.0.1:{port}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
