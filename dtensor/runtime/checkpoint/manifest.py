"""`manifest.json`: the contents of a checkpoint, with checksums of the manifest itself.

    {"head": {"format": "dtensor", "version": 1, "name": "100", "sequence": 7, "step": 100, ...},
     "head_crc32": "0a1b2c3d",
     "body": {"files": {...}, "tensors": [...], "small": {...}, "extra": ...},
     "crc32": "4e5f6071"}

It is one JSON object on four lines. ``head_crc32`` covers the first line, so that a search for the
newest of many checkpoints reads only the head of each; ``crc32`` covers all lines before it.

Invariants: any changed bit raises CheckpointError. ``sequence`` is one more than the greatest
sequence in the folder when the save began; it orders checkpoints without a clock.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dtensor.runtime.checkpoint.records import CheckpointError

MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The identity of a checkpoint. ``layout``: the format of its tensor files, "dcp" or "hf"."""

    name: str
    sequence: int
    step: int | None
    layout: str
    format: str = "dtensor"
    version: int = VERSION


def manifest_text(head: Head, body: dict[str, Any]) -> bytes:
    """Return the content of `manifest.json`."""
    first = _dumps(asdict(head))
    text = b'{"head": %s,\n"head_crc32": "%s",\n"body": %s,\n' % (
        first,
        _crc(first),
        _dumps(body),
    )
    return text + b'"crc32": "%s"}\n' % _crc(text)


def read_manifest(folder: Path) -> tuple[Head, dict[str, Any]]:
    """Return the head and body. Raises CheckpointError if a checksum does not match."""
    path = folder / MANIFEST
    text = path.read_bytes()
    if not text.startswith(b'{"head": '):
        raise CheckpointError(
            f"{path} was not written by dtensor, or its first bytes are damaged.\nfix: if another "
            "program wrote it, move it out of the folder; otherwise load another checkpoint"
        )
    rest, _, last = text[:-1].rpartition(b"\n")
    if text[-1:] != b"\n" or last != b'"crc32": "%s"}' % _crc(rest + b"\n"):
        raise damaged(path, "its checksum does not match its content")
    with path.open("rb") as file:
        head = _head(path, file)
    return head, json.loads(text)["body"]


def read_head(folder: Path) -> Head | None:
    """Return the head; None if the folder has no manifest by dtensor."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            if file.read(9) != b'{"head": ':
                return None
            file.seek(0)
            return _head(path, file)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def made_in(folder: Path, *, skip_damaged: bool) -> list[Head]:
    """Return the heads of dtensor's checkpoints in a folder, oldest first, except renamed ones.

    A damaged manifest is skipped or raises CheckpointError, by ``skip_damaged``.
    """
    heads: list[Head] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            try:
                head = read_head(Path(entry.path))
            except CheckpointError:
                if not skip_damaged:
                    raise
                continue
            if head is not None and head.name == entry.name:
                heads.append(head)
    return sorted(heads, key=lambda head: head.sequence)


def damaged(path: Path, why: str) -> CheckpointError:
    """Return the error for a file whose content has changed since it was written."""
    return CheckpointError(
        f"{path} is not as it was written: {why}.\n"
        f"fix: load another checkpoint of {path.parent.parent}, or a copy of this one; delete "
        f"{path.parent} if there is none"
    )


def _head(path: Path, file: BinaryIO) -> Head:
    """Read and check the head of an open manifest. Raises CheckpointError if it is damaged."""
    first, second = file.readline(), file.readline()
    text = first[len(b'{"head": ') : -len(b",\n")]
    if second != b'"head_crc32": "%s",\n' % _crc(text):
        raise damaged(path, "the checksum of its head does not match its content")
    head = json.loads(text)
    if (head.get("format"), head.get("version")) != ("dtensor", VERSION):
        raise CheckpointError(
            f"{path} is of format {head.get('format')!r}, version {head.get('version')!r}; this "
            f"dtensor reads 'dtensor', version {VERSION}.\nfix: load it with the dtensor that "
            "wrote it"
        )
    return Head(**head)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _crc(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
