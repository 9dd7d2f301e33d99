"""The synthetic engine: no model, deterministic output at a given rate, and failures on request.

For tests and benchmarks of the mesh, and for trying a pipeline before its models are there. What it makes is a pure
function of (prompt, parameters, seed), so that every replica makes the same.
"""
