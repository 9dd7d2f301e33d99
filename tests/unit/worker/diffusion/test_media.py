"""Arrays become files that any reader of their kind opens."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
from PIL import Image

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_worker.engines.diffusion.media import encode_image, encode_preview, encode_video, encode_wav

PICTURE = np.stack(np.meshgrid(np.arange(40) * 6, np.arange(20) * 12, [0, 90, 200]), axis=0)[0].astype(np.uint8)


def test_png_is_lossless_and_says_its_size_and_seed() -> None:
    media = encode_image(PICTURE, "png", index=2, seed=-5)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(media.data))), PICTURE)
    assert (media.mime_type, media.modality) == ("image/png", frame_pb.MODALITY_IMAGE)
    assert (media.width, media.height, media.index, media.seed) == (40, 20, 2, -5)


def test_the_same_picture_is_the_same_file() -> None:
    assert encode_image(PICTURE, "png").data == encode_image(PICTURE.copy(), "png").data


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_lossy_formats_are_close(output_format: str) -> None:
    media = encode_image(PICTURE, output_format)
    image = Image.open(io.BytesIO(media.data))
    assert image.format == output_format.upper()
    assert np.abs(np.asarray(image.convert("RGB")).astype(int) - PICTURE).mean() < 8


def test_grey_and_transparent_pictures_are_encoded_too() -> None:
    grey = encode_image(PICTURE[:, :, :1], "png")
    assert Image.open(io.BytesIO(grey.data)).mode == "L"
    transparent = np.dstack([PICTURE, np.full((20, 40), 128, np.uint8)])
    assert Image.open(io.BytesIO(encode_image(transparent, "png").data)).mode == "RGBA"
    assert Image.open(io.BytesIO(encode_image(transparent, "jpeg").data)).mode == "RGB"


def test_a_preview_is_a_small_jpeg() -> None:
    assert encode_preview(PICTURE).mime_type == "image/jpeg"
    assert len(encode_preview(PICTURE).data) < PICTURE.nbytes


@pytest.mark.parametrize("output_format", ["webp", "gif"])
def test_moving_pictures_have_all_their_frames(output_format: str) -> None:
    frames = np.stack([np.roll(PICTURE, 5 * number, axis=1) for number in range(4)])
    media = encode_video(frames, output_format)
    image = Image.open(io.BytesIO(media.data))
    assert getattr(image, "n_frames", 1) == 4
    assert (media.modality, media.width, media.height) == (frame_pb.MODALITY_VIDEO, 40, 20)


def test_sound_is_16_bit_wav_and_clipped_not_wrapped() -> None:
    sound = np.array([[0.0, 0.5], [1.5, -1.5], [np.nan, -1.0]], np.float32)
    media = encode_wav(sound, 16000, seed=3)
    with wave.open(io.BytesIO(media.data)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, 16000, 2)
        samples = np.frombuffer(file.readframes(10), "<i2").reshape(-1, 2)
    assert samples.tolist() == [[0, 16384], [32767, -32767], [0, -32767]]
    assert (media.mime_type, media.sample_rate_hz) == ("audio/wav", 16000)
