"""Prometheus metrics of a process that serves clients: a head or a gateway."""
