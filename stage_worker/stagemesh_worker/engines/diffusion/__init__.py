"""The diffusion engine: any diffusers pipeline, in a process of its own behind ZeroMQ.

The replica's side is `engine.py` (no torch); the computing side is `child.py`, which imports torch and diffusers.
A request passes: request.py (checks, call arguments) -> batching.py (who shares a call) -> process.py (the wire) ->
child.py -> generation.py (the pipeline's call) -> and its arrays return the same way to media.py (files).
"""
