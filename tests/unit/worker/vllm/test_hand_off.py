"""What a replica does about a hand-off of KV blocks, without an engine."""

from __future__ import annotations

import socket

import pytest
import zmq

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.engines.base import DeviceSet, EngineConfigError
from stagemesh_worker.engines.vllm import hand_off

CPU, GPU = DeviceSet(("cpu:0",), (0,)), DeviceSet(("cuda:0",), (), ("0",))
DECODE = Stage(name="decode", is_decode_only=True, connector="NixlConnector")
PREFILL = Stage(name="prefill", is_prefill_only=True, connector="NixlConnector")


def test_seal_lets_the_same_prompt_pass_and_leaves_vllms_own_words() -> None:
    transfer = hand_off.seal({"remote_port": 5}, (1, 2, 300_000))
    hand_off.check_seal(transfer, [1, 2, 300_000])
    assert transfer == {"remote_port": 5}
    hand_off.check_seal(transfer, [1])  # another connector's, without a seal


@pytest.mark.parametrize("token_ids", [(1, 2), (1, 2, 4), (2, 1, 3), ()])
def test_another_prompt_fails_the_task(token_ids: tuple[int, ...]) -> None:
    with pytest.raises(MeshError) as caught:
        hand_off.check_seal(hand_off.seal({}, (1, 2, 3)), token_ids)
    assert caught.value.reason is Reason.STAGE_FAILED
    assert caught.value.message == (
        "the prefill stage read another prompt than this stage: both need the same model, tokenizer and adapter"
    )


def test_halves_get_their_roles_and_only_decode_computes_what_did_not_arrive() -> None:
    assert hand_off.transfer_config(PREFILL, CPU)["kv_transfer_config"] == {
        "kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"
    }  # fmt: skip
    assert hand_off.transfer_config(DECODE, GPU)["kv_transfer_config"] == {
        "kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"
    }  # fmt: skip
    assert hand_off.transfer_config(Stage(name="writer"), CPU) == {}


def test_stage_goes_before_the_mesh_key_by_key() -> None:
    given = {"kv_connector": "NixlConnector", "kv_load_failure_policy": "fail"}
    stage = Stage(name="decode", is_decode_only=True, engine_args={"kv_transfer_config": given})
    config = hand_off.transfer_config(stage, CPU)["kv_transfer_config"]
    assert config == {**given, "kv_role": "kv_consumer", "kv_buffer_device": "cpu"}


def test_side_channels_port_is_kept_for_vllm_alone() -> None:
    wanted, reserved = hand_off.side_channel(DECODE, "127.0.0.1", {})
    assert reserved is not None and wanted[hand_off.SIDE_CHANNEL_HOST] == "127.0.0.1"
    port = int(wanted[hand_off.SIDE_CHANNEL_PORT])
    with reserved, zmq.Context() as context, context.socket(zmq.ROUTER) as listener, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        listener.bind(f"tcp://127.0.0.1:{port}")  # as vLLM does
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            assert client.recv(1), "it greets"
    assert hand_off.side_channel(Stage(name="writer"), "127.0.0.1", {}) == ({}, None)


def test_side_channel_of_the_environment_goes_first() -> None:
    given = {hand_off.SIDE_CHANNEL_HOST: "127.0.0.2", hand_off.SIDE_CHANNEL_PORT: "5600"}
    wanted, reserved = hand_off.side_channel(DECODE, "127.0.0.1", given)
    assert {**given, **wanted} == given and reserved is None


def test_address_of_another_machine_is_refused_in_one_line() -> None:
    with pytest.raises(EngineConfigError) as caught:
        hand_off.side_channel(DECODE, "192.0.2.7", {})
    assert str(caught.value).startswith("connector: NIXL cannot listen at 192.0.2.7: ")
    assert "set VLLM_NIXL_SIDE_CHANNEL_HOST in `runtime.env` or on the node" in str(caught.value)


def test_missing_nixl_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_off.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineConfigError, match="NixlConnector needs the package nixl"):
        hand_off.check_connector(DECODE)
    hand_off.check_connector(Stage(name="writer"))
