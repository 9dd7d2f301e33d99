"""Time to load and validate a pipeline file of three stages, warm.

    python benchmarks/config_load.py [FILE]

Prints milliseconds: the median, the 99th percentile, and the first load, which also imports.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 200
BUDGET_MS = 50.0
THREE_STAGES = """\
name: speech
stages:
  - name: thinker
    stage_type: llm
    model: models/omni
    is_comprehension: true
    final_output: true
    engine_args: {max_num_seqs: 32, gpu_memory_utilization: 0.8, tensor_parallel_size: 2}
    runtime: {devices: "0,1", env: {OMP_NUM_THREADS: 4}}
    default_sampling_params: {temperature: 0.6, top_p: 0.95, max_tokens: 1024, stop: ["</s>"]}
  - name: talker
    stage_type: llm
    model: ${stages.0.model}
    inputs: [thinker]
    input_adapter: embeds
    edge: stream
    engine_args: {max_num_seqs: 32, gpu_memory_utilization: 0.5}
    runtime: {devices: "2", num_replicas: 1}
    default_sampling_params: {temperature: 0.9, max_tokens: 4096, stop_token_ids: [151]}
  - name: vocoder
    stage_type: llm
    model: ${stages.0.model}
    inputs: [talker]
    input_adapter: tokens
    edge: stream
    final_output_type: audio
    engine_args: {gpu_memory_utilization: 0.2}
    runtime: {devices: "3", num_replicas: 1}
routing: {policy: least-queue-length}
limits: {max_inflight: 256, request_timeout: 120}
"""


def measure(file: Path) -> list[float]:
    """Milliseconds of each load, the first one with the imports."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        from stagemesh.config import load_pipeline

        load_pipeline(file)
        times.append((time.perf_counter() - started) * 1e3)
    return times


def main() -> int:
    """Print the figures; 1 when the median is over the budget."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pipeline.yaml"
        file.write_text(THREE_STAGES)
        first, *warm = measure(Path(sys.argv[1]) if len(sys.argv) > 1 else file)
    median, high = statistics.median(warm), statistics.quantiles(warm, n=100)[98]
    print(f"load and validate, {ROUNDS} times: median {median:.1f} ms, p99 {high:.1f} ms (budget {BUDGET_MS:g} ms)")
    print(f"the first time, with imports: {first:.0f} ms")
    return int(median > BUDGET_MS)


if __name__ == "__main__":
    sys.exit(main())
