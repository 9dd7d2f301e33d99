"""The LLM engine: vLLM's AsyncLLM, whose EngineCore computes in a process of its own.

A task passes: prompts.py (token ids) and sampling.py (parameters) -> generation.py or streaming.py (the engine's
stream) -> assembly.py (text) -> the sink. `launch.py` starts the engine before any thread or event loop exists.
"""
