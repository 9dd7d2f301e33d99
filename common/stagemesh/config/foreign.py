"""Names of vLLM-Omni's files: what each becomes here, and which have no meaning in this mesh.

Only names are listed that files of that system really hold; a name that is in no list is either the engine's own or a
mistake, and is treated as such.
"""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "engine_input_source": "inputs",
    "custom_process_input_func": "input_adapter",
    "prompt_expand_func": "prompt_expand",
}
"""Fields of a stage that have another name here."""

MEANINGLESS_STAGE: Mapping[str, str] = {
    "input_connectors": "stages exchange tensors by reference",
    "output_connectors": "stages exchange tensors by reference",
    "cfg_kv_collect_func": "companions arrive at the adapter by role",
    "engine_input_type": "",
    "engine_output_type": "see final_output_type",
    "tts_args": "",
}
"""Fields of a stage without a meaning here, and why, where that helps."""

MEANINGLESS_ENGINE_ARGS: Mapping[str, str] = {
    "model_stage": "",
    "model_arch": "the model's folder says it",
    "hf_config_name": "",
    "worker_type": "see stage_type",
    "worker_cls": "a class of that system",
    "scheduler_cls": "a class of that system",
    "engine_output_type": "see final_output_type",
    "omni_kv_config": "",
    "omni_connector_config": "",
    "stage_connector_spec": "",
    "custom_process_next_stage_input_func": "the consumer's input_adapter reads chunks too",
    "async_chunk": "say edge: stream",
}
"""Engine arguments that only that system's engine knows."""

MEANINGLESS_RUNTIME: Mapping[str, str] = {
    "enabled": "",
    "max_inflight": "see limits.max_inflight",
    "connectors": "stages exchange tensors by reference",
    "connector_config": "",
}
"""Keys of `runtime`, of a stage or of the file."""

MEANINGLESS_SAMPLING: Mapping[str, str] = {
    "detokenize": "text is always made",
    "output_kind": "a request chooses",
}
"""Sampling parameters that the mesh sets itself."""

LLM_ONLY = frozenset(
    {
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_num_batched_tokens", "block_size",
        "enforce_eager", "trust_remote_code", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling",
        "distributed_executor_backend", "load_format", "seed", "worker_extension_cls", "allowed_local_media_path",
        "allowed_media_domains", "limit_mm_per_prompt", "mm_processor_cache_gb", "compilation_config",
        "hf_overrides", "enable_lora", "max_loras", "max_lora_rank", "speculative_config", "generation_config",
    }
)  # fmt: skip
"""Arguments of vLLM that no diffusion engine has: they are not laid over diffusion stages."""

PIPELINE_WIDE = frozenset(
    {
        "trust_remote_code", "distributed_executor_backend", "dtype", "quantization", "enable_prefix_caching",
        "enable_chunked_prefill", "data_parallel_size", "pipeline_parallel_size",
    }
)  # fmt: skip
"""Engine arguments that a deploy overlay may give once, beside `stages`, for all llm stages."""


def left_out(path: str, reason: str) -> str:
    """How a name without a meaning is told."""
    return f"{path} ({reason})" if reason else path
