"""Arrays to files: pictures, sound and moving pictures. Runs in a thread of the replica, so that the devices go on."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
from PIL import Image

from stagemesh.v1 import frame_pb2 as frame_pb

FORMATS: dict[str, tuple[str, ...]] = {
    "image": ("png", "jpeg", "webp", "raw"),
    "audio": ("wav", "raw"),
    "video": ("webp", "gif", "raw"),
}
"""Output formats of each modality, the default first. "raw" is the array itself."""

QUALITY = 90
"""JPEG and WebP quality, of 100."""
PREVIEW_QUALITY = 75
VIDEO_FRAME_MS = 125
"""Time per frame when moving pictures are encoded, in milliseconds: 8 frames a second, as diffusers' own examples."""


def encode_image(
    array: np.ndarray[Any, Any], output_format: str, *, index: int = 0, seed: int | None = None, quality: int = QUALITY
) -> frame_pb.MediaOutput:
    """Encode uint8 [height, width, 1, 3 or 4] as png, jpeg or webp."""
    image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    if output_format == "jpeg" and image.mode == "RGBA":
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, format=output_format, **({} if output_format == "png" else {"quality": quality}))
    return frame_pb.MediaOutput(
        modality=frame_pb.MODALITY_IMAGE,
        mime_type=f"image/{output_format}",
        data=buffer.getvalue(),
        index=index,
        width=image.width,
        height=image.height,
        seed=seed,
    )


def encode_grey(width: int, height: int) -> bytes:
    """A PNG of one grey, for a pipeline that wants a picture where there is none."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (128, 128, 128)).save(buffer, format="png")
    return buffer.getvalue()


def encode_preview(array: np.ndarray[Any, Any]) -> frame_pb.MediaOutput:
    """Encode uint8 [height, width, 3] as a small JPEG."""
    return encode_image(array, "jpeg", quality=PREVIEW_QUALITY)


def encode_video(
    array: np.ndarray[Any, Any], output_format: str, *, index: int = 0, seed: int | None = None
) -> frame_pb.MediaOutput:
    """Encode uint8 [frames, height, width, 3] as an animated webp or gif."""
    images = [Image.fromarray(frame) for frame in array]
    buffer = io.BytesIO()
    images[0].save(
        buffer, format=output_format, save_all=True, append_images=images[1:], duration=VIDEO_FRAME_MS, loop=0
    )
    return frame_pb.MediaOutput(
        modality=frame_pb.MODALITY_VIDEO,
        mime_type=f"image/{output_format}",
        data=buffer.getvalue(),
        index=index,
        width=images[0].width,
        height=images[0].height,
        seed=seed,
    )


def encode_wav(
    array: np.ndarray[Any, Any], sample_rate_hz: int, *, index: int = 0, seed: int | None = None
) -> frame_pb.MediaOutput:
    """Encode float [samples, channels] in [-1, 1] as 16-bit WAV; what is louder is clipped."""
    samples = (np.clip(np.nan_to_num(array), -1.0, 1.0) * 32767.0).round().astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate_hz)
        file.writeframes(samples.tobytes())
    return frame_pb.MediaOutput(
        modality=frame_pb.MODALITY_AUDIO,
        mime_type="audio/wav",
        data=buffer.getvalue(),
        index=index,
        sample_rate_hz=sample_rate_hz,
        seed=seed,
    )
