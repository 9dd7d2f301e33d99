"""How a prefill engine's KV blocks come to a decode engine: the connector's settings, and a seal on every hand-off."""

from __future__ import annotations

import importlib.util
import socket
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.engines.base import DeviceSet, EngineConfigError

KV_TRANSFER = "kv_transfer_params"
"""Where vLLM takes and gives the parameters of a hand-off."""
SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_SEAL = "prompt_checksum"
"""Key beside vLLM's own in the parameters of a hand-off."""


def check_connector(stage: Stage) -> None:
    """Whether what the connector needs is installed. Raises EngineConfigError."""
    if _uses_nixl(stage) and importlib.util.find_spec("nixl") is None:
        raise EngineConfigError(
            "connector: NixlConnector needs the package nixl, which is not installed on this node: see "
            "examples/disaggregated/README.md"
        )


def transfer_config(stage: Stage, devices: DeviceSet) -> dict[str, Any]:
    """`kv_transfer_config` as an engine argument, with the stage's own words before ours; {} for most stages."""
    given = stage.engine_args.get("kv_transfer_config", {})
    is_half = stage.is_prefill_only or stage.is_decode_only
    if not (is_half or stage.connector) or not isinstance(given, Mapping):
        return {}
    role = "kv_producer" if stage.is_prefill_only else "kv_consumer" if stage.is_decode_only else "kv_both"
    config: dict[str, Any] = {"kv_connector": stage.connector, "kv_role": role}
    if devices.kind == "cpu":
        config["kv_buffer_device"] = "cpu"
    if not stage.is_prefill_only:
        # A prefill replica that is lost costs a recomputation, not the request.
        config["kv_load_failure_policy"] = "recompute"
    return {"kv_transfer_config": config | dict(given)}


def side_channel(
    stage: Stage, host: str, environment: Mapping[str, str]
) -> tuple[dict[str, str], socket.socket | None]:
    """Where NIXL's handshake of this engine listens, unless the environment says so; vLLM wants the port in advance.

    Args:
        host: how other replicas reach this machine.

    Returns:
        Environment variables, and what keeps the port free until vLLM listens there, many seconds later: an engine
        whose port is taken by then would wait for ever.

    Raises:
        EngineConfigError: nothing can listen at that address.
    """
    if not _uses_nixl(stage):
        return {}, None
    host = environment.get(SIDE_CHANNEL_HOST, host).strip("[]")
    if SIDE_CHANNEL_PORT in environment:
        return {SIDE_CHANNEL_HOST: host}, None
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family)
        # Bound and not listening it keeps everybody out but who asks for this very port, as vLLM will.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        raise EngineConfigError(
            f"connector: NIXL cannot listen at {host}: {error}; set {SIDE_CHANNEL_HOST} in `runtime.env` or on the "
            "node to an address of this machine that the other replicas reach"
        ) from error
    return {SIDE_CHANNEL_HOST: host, SIDE_CHANNEL_PORT: str(reserved.getsockname()[1])}, reserved


def seal(transfer: Mapping[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
    """A prefill engine's parameters with a checksum of the prompt that they belong to."""
    return {**transfer, _SEAL: _checksum(token_ids)}


def check_seal(transfer: dict[str, Any], token_ids: Sequence[int]) -> None:
    """Take the checksum out of a hand-off. KV blocks of another prompt would give wrong words, and nobody would notice.

    Raises:
        MeshError: STAGE_FAILED, the prompt is another one here.
    """
    if transfer.pop(_SEAL, None) not in (None, _checksum(token_ids)):
        raise MeshError(
            Reason.STAGE_FAILED,
            "the prefill stage read another prompt than this stage: both need the same model, tokenizer and adapter",
        )


def _checksum(token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("q", token_ids).tobytes())


def _uses_nixl(stage: Stage) -> bool:
    return "Nixl" in str(stage.connector or stage.engine_args.get("kv_transfer_config", ""))
