"""`manifest.json`: all that a checkpoint is, as data, with checksums of its own.

    {"head": {"format": "dtensor", "version": 1, "name": "100", "sequence": 7, "step": 100, ...},
     "head_crc32": "0a1b2c3d",
     "body": {"files": {...}, "tensors": [...], "small": {...}, "extra": ...},
     "crc32": "4e5f6071"}

One JSON object on four lines. The second checksum is of all lines before its own, the first of the
head's alone: who looks for the newest of a hundred checkpoints reads a line of each.

Invariants: a changed bit is noticed (CheckpointError), in whichever line. ``sequence`` is one more
than the greatest in the folder when the save began: the order in which they were made, that no
clock can turn round.
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
    """Which checkpoint it is. ``layout`` is whose files its tensors are in: "dcp" or "hf"."""

    name: str
    sequence: int
    step: int | None
    layout: str
    format: str = "dtensor"
    version: int = VERSION


def manifest_text(head: Head, body: dict[str, Any]) -> bytes:
    """The file's content."""
    first = _dumps(asdict(head))
    text = b'{"head": %s,\n"head_crc32": "%s",\n"body": %s,\n' % (
        first,
        _crc(first),
        _dumps(body),
    )
    return text + b'"crc32": "%s"}\n' % _crc(text)


def read_manifest(folder: Path) -> tuple[Head, dict[str, Any]]:
    """Head and body; CheckpointError if the file is not as it was written."""
    path = folder / MANIFEST
    text = path.read_bytes()
    if not text.startswith(b'{"head": '):
        raise CheckpointError(
            f"{path} is not dtensor's, or damaged in its first bytes.\nfix: if another program "
            "wrote it, move it out of the folder; else load another checkpoint"
        )
    rest, _, last = text[:-1].rpartition(b"\n")
    if text[-1:] != b"\n" or last != b'"crc32": "%s"}' % _crc(rest + b"\n"):
        raise damaged(path, "its checksum is not that of its content")
    with path.open("rb") as file:
        head = _head(path, file)
    return head, json.loads(text)["body"]


def read_head(folder: Path) -> Head | None:
    """The head alone; None where no manifest of ours is."""
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
    """What dtensor made in a folder, under the names that they still have, oldest first.
    CheckpointError for a manifest that is damaged, if it is not to be skipped."""
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
    """The error for a file that is not as it was written."""
    return CheckpointError(
        f"{path} is not as it was written: {why}.\n"
        f"fix: load another checkpoint of {path.parent.parent}, or a copy of this one; delete "
        f"{path.parent} if there is none"
    )


def _head(path: Path, file: BinaryIO) -> Head:
    first, second = file.readline(), file.readline()
    text = first[len(b'{"head": ') : -len(b",\n")]
    if second != b'"head_crc32": "%s",\n' % _crc(text):
        raise damaged(path, "the checksum of its head is not that of its content")
    said = json.loads(text)
    if (said.get("format"), said.get("version")) != ("dtensor", VERSION):
        raise CheckpointError(
            f"{path} is of format {said.get('format')!r}, version {said.get('version')!r}; this "
            f"dtensor reads 'dtensor', version {VERSION}.\nfix: load it with the dtensor that "
            "wrote it"
        )
    return Head(**said)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _crc(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
