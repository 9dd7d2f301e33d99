"""Nodes, leases, slots and placement. `Registry` is the live one; `Machine` holds its rules."""
