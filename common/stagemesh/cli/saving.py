"""Where the files of a request go."""

from __future__ import annotations

from pathlib import Path

from stagemesh.client.frames import Media


def save_media(media: Media, directory: Path, request_id: str, *, kind: str = "") -> Path:
    """Save a file as `ID-STAGE-INDEX.suffix`; returns its path."""
    # A request id may hold a colon, which some file systems refuse.
    name = f"{request_id}-{media.stage}-{kind}{media.index}{media.suffix}".replace(":", "_")
    return media.save(directory / name)
