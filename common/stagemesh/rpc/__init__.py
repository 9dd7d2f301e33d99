"""What every gRPC endpoint of the mesh shares: options, errors, health."""

from stagemesh.rpc.errors import CATALOGUE, ErrorKind, MeshError, Reason
from stagemesh.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS, open_channel

__all__ = [
    "CATALOGUE",
    "CHANNEL_OPTIONS",
    "SERVER_OPTIONS",
    "ErrorKind",
    "MeshError",
    "Reason",
    "open_channel",
]
