"""Bounds of histograms, by unit."""

from __future__ import annotations

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BYTES = tuple(float(1 << power) for power in range(10, 32, 2))
"""1 KiB to 1 GiB."""
PIXELS = tuple(float(side * side) for side in (64, 128, 256, 512, 768, 1024, 1280, 1536, 2048, 4096))
"""Areas of square pictures."""
STEPS = (1, 2, 4, 8, 12, 16, 20, 25, 30, 40, 50, 75, 100, 200)
