"""Where the files of a request go."""

from __future__ import annotations

from pathlib import Path

from stagemesh.client.frames import Audio, AudioChunk, Media


def save_media(media: Media, directory: Path, request_id: str, *, kind: str = "") -> Path:
    """Save a file as `ID-STAGE-INDEX.suffix`; returns its path."""
    # A request id may hold a colon, which some file systems refuse.
    name = f"{request_id}-{media.stage}-{kind}{media.index}{media.suffix}".replace(":", "_")
    return media.save(directory / name)


class SoundSaver:
    """Pieces of sound, kept until the last one of their stage has come."""

    def __init__(self, directory: Path, request_id: str) -> None:
        self._directory = directory
        self._request_id = request_id
        self._chunks: dict[str, list[AudioChunk]] = {}

    def add(self, chunk: AudioChunk) -> tuple[Audio, Path] | None:
        """Take a piece; after the last one, the whole sound and where it was saved."""
        self._chunks.setdefault(chunk.stage, []).append(chunk)
        if not chunk.last:
            return None
        sound = Audio.from_chunks(self._chunks.pop(chunk.stage))
        return sound, save_media(sound, self._directory, self._request_id)
