"""LoRA adapters: the ones that the pipeline file names, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.lora.request import LoRARequest

from stagemesh.rpc.errors import invalid
from stagemesh.v1 import stage_pb2 as stage_pb


class LoraAdapters:
    """The allow-list of one stage."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        """`modules` maps names to paths."""
        self._requests = {
            name: LoRARequest(name, number, modules[name]) for number, name in enumerate(sorted(modules), 1)
        }

    def request(self, name: str) -> LoRARequest:
        """The engine's handle of an adapter. Raises MeshError(INVALID_REQUEST) for a name that is not listed."""
        if name not in self._requests:
            listed = ", ".join(self._requests) or "none"
            raise invalid("lora.name", name, f"the stage's lora_modules are: {listed}")
        return self._requests[name]

    def of_task(self, submit: stage_pb.SubmitTask) -> LoRARequest | None:
        """The adapter that a task asks for. Raises MeshError(INVALID_REQUEST)."""
        if not submit.HasField("lora"):
            return None
        if submit.lora.HasField("scale") and submit.lora.scale != 1.0:
            raise invalid("lora.scale", submit.lora.scale, "vLLM applies adapters at scale 1")
        return self.request(submit.lora.name)

    def names_of(self, numbers: Iterable[int]) -> list[str]:
        """Names of adapters by the engine's numbers."""
        by_number = {request.lora_int_id: name for name, request in self._requests.items()}
        return sorted(by_number.get(number, str(number)) for number in numbers)
