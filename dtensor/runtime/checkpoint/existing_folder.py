"""Write Hugging Face weights into a folder that exists, or replace the weights in it.

    claim = claim_existing(Path("out"))   # out/.tmp-out-1f0c9a3e; out has a tokenizer
    ...                                   # safetensors files, their index, config.json, a manifest
    claim.publish()                       # moved into out; dtensor's older files are removed

Invariants: no reader sees a mix of old and new weights, whenever a process is killed (`_move` has
the order). Readers are transformers (`model.safetensors` if it exists, else the files that the
index names) and dtensor (the manifest). Only files that dtensor saved are removed; other weights
are refused by name. Each step is synced before the next begins, and one process writes at a time.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint.atomic_folder import (
    free_path,
    leftovers,
    locked,
    locked_folder,
    refused,
    remove_leftovers,
    sync,
    unlock,
    write_synced,
)
from dtensor.runtime.checkpoint.manifest import (
    MANIFEST,
    damaged,
    made_in,
    read_head,
    read_manifest,
)
from dtensor.runtime.checkpoint.records import CheckpointError, plain_name
from dtensor.runtime.checkpoint.safetensors import INDEX, SINGLE, index_map

_LIST_FILE = "files.json"
"""A file in `.tmp-*` with dtensor's files in the target before and after the save (`_FileList`)."""
_OLD_FOLDER = "old"
"""A folder in `.tmp-*` with the files that are restored if the save fails."""
_TENSORS = re.compile(r".*\.(safetensors|distcp)")
_WEIGHTS = re.compile(
    r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?|.*\.distcp|\.metadata"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileList:
    """The tensor files of the target with their sizes, ``before`` this save and ``after`` it;
    ``added``: the other new files of the save."""

    before: Mapping[str, int]
    after: Mapping[str, int] = field(default_factory=dict[str, int])
    added: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        said = {"before": self.before, "after": self.after, "added": self.added}
        write_synced(folder / _LIST_FILE, json.dumps(said).encode())

    @staticmethod
    def read(folder: Path) -> _FileList:
        """Read the list; it is empty if the save wrote none, because it moved no file."""
        try:
            said: dict[str, Any] = json.loads((folder / _LIST_FILE).read_bytes())
            before, after = (
                {plain_name(name): int(nbytes) for name, nbytes in said[key].items()}
                for key in ("before", "after")
            )
            return _FileList(
                before=before, after=after, added=tuple(map(plain_name, said["added"]))
            )
        except FileNotFoundError:
            return _FileList(before={})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(folder / _LIST_FILE, repr(error)) from error


@dataclass(slots=True)
class Replacement:
    """A save into an existing folder: the files of ``folder`` are moved to ``target``."""

    folder: Path
    target: Path
    tag: str
    """The part of tensor file names that makes them unique; "" for the first weights."""
    _before: Mapping[str, int]
    _locks: list[int]
    replaces: bool = True
    published: bool = False
    _needed_by_next_save: bool = False

    def publish(self) -> None:
        """Move all files to the target, then remove dtensor's older files. If a move fails before
        the new weights are published, the old weights are restored."""
        names = {path.name for path in self.folder.iterdir()} - {_LIST_FILE, _OLD_FOLDER}
        tensors = {n: (self.folder / n).stat().st_size for n in names if _TENSORS.fullmatch(n)}
        others = sorted(
            n
            for n in names - set(tensors) - {INDEX, MANIFEST}
            if _content(self.target / n) != (self.folder / n).read_bytes()
        )
        self._prepare(tensors, others)
        self._needed_by_next_save = True
        try:
            self._move(tensors, others)
        except BaseException:
            if not self.published:
                self._undo()
            raise
        self._remove_old(set(self._before) - set(tensors))
        self._needed_by_next_save = False
        self.give_up()

    def give_up(self) -> None:
        """Remove files that were not moved, unless the next save needs them to restore the
        target."""
        if not self._needed_by_next_save:
            shutil.rmtree(self.folder, ignore_errors=True)
        while self._locks:
            unlock(self._locks.pop())

    def _undo(self) -> None:
        """Restore the earlier files. Raises CheckpointError if the disk prevents it."""
        try:
            _restore(self.folder, self.target)
        except OSError as error:
            raise CheckpointError(
                f"{self.target} could not be written, and the earlier files could not be put back: "
                f"{error}. They are in {self.folder}.\n"
                f"fix: check the disk, and save to it again: the save first puts the files back"
            ) from error
        self._needed_by_next_save = False

    def _prepare(self, tensors: Mapping[str, int], others: list[str]) -> None:
        """Write everything that an undo needs to the disk."""
        old = self.folder / _OLD_FOLDER
        old.mkdir()
        added: list[str] = []
        for name in (INDEX, SINGLE, MANIFEST, *others):
            if not (self.target / name).exists():
                added.append(name)
            elif name not in (SINGLE, MANIFEST):  # `_move` keeps SINGLE, and moves MANIFEST last
                write_synced(old / name, (self.target / name).read_bytes())
        _FileList(before=self._before, after=tensors, added=tuple(added)).write(self.folder)
        sync(old)
        sync(self.folder)

    def _move(self, tensors: Mapping[str, int], others: list[str]) -> None:
        """Move the files in an order in which no reader sees a mix of old and new weights.

        Tensor files have unused names and are moved first, because no reader opens them yet. The
        files that readers follow are moved last, one rename each: index, then manifest. A changed
        `config.json` cannot be replaced together with the weights, so the index and
        `model.safetensors` are removed before it: a reader then finds no weights.
        """
        source, there = self.folder, self.target
        last = [name for name in (SINGLE, INDEX, MANIFEST) if (source / name).exists()]
        if not (there / MANIFEST).exists():  # a reader without a manifest would follow the index
            last.remove(MANIFEST)
            (source / MANIFEST).rename(there / MANIFEST)
            sync(there)
        for name in sorted(tensors.keys() - {SINGLE}):
            (source / name).rename(there / name)
        sync(there)
        if others:
            (there / INDEX).unlink(missing_ok=True)
            if (there / SINGLE).exists():
                sync(there)
                (there / SINGLE).rename(source / _OLD_FOLDER / SINGLE)
            sync(there)
            for name in others:
                (source / name).rename(there / name)
            sync(there)
        for name in last:
            (source / name).rename(there / name)
            self.published = name == last[-1]
            sync(there)

    def _remove_old(self, old: set[str]) -> None:
        for name in sorted(old, key=lambda name: (name != SINGLE, name)):
            (self.target / name).unlink(missing_ok=True)
            if name == SINGLE:
                sync(self.target)
        sync(self.target)


def claim_existing(target: Path) -> Replacement:
    """Claim an existing folder for weights.

    Raises PlanningError, without changing anything, if the folder has weights that dtensor did not
    save, is or contains a checkpoint, or if another process writes to it.
    """
    locks: list[int] = []
    try:
        locks.append(os.open(target, os.O_RDONLY | os.O_DIRECTORY))
        if locked(locks[0]) is False:
            raise PlanningError(
                f"another save writes to {target} now.\n"
                f"fix: wait for it, or save to another path, such as {free_path(target)}"
            )
        files = _own_files(target)
        _check_foreign_files(target, files)
        for leftover in leftovers(target):
            if not (target / INDEX).exists() and _has_moved_files(leftover):
                _restore(leftover, target)
        tag = secrets.token_hex(4)
        folder, inner = locked_folder(target, f"{target.name}-{tag}")
        locks.append(inner)
        _FileList(before=files).write(folder)
        sync(folder)
        remove_leftovers(target)  # the new list includes the files that they list
        return Replacement(folder, target, f"-{tag}" if files else "", files, locks)
    except BaseException as error:
        for descriptor in locks:
            unlock(descriptor)
        if isinstance(error, OSError):
            raise refused(target, error) from error
        raise


def _own_files(target: Path) -> dict[str, int]:
    """Return the tensor files that dtensor saved in the folder, with their sizes then."""
    files: dict[str, int] = {}
    for leftover in leftovers(target):
        listed = _FileList.read(leftover)
        files |= {**listed.before, **listed.after}
    if (target / MANIFEST).exists():
        head = read_head(target)
        if head is None:
            raise PlanningError(
                f"another program wrote {target / MANIFEST}, and a save would replace it.\n"
                f"fix: save to another path, such as {free_path(target)}"
            )
        if head.layout != "hf":
            raise PlanningError(
                f"{target} is a checkpoint in torch's format, which a save never replaces.\n"
                f"fix: save to another path, such as {free_path(target)}"
            )
        files |= {str(n): int(nbytes) for n, nbytes in read_manifest(target)[1]["files"].items()}
    return files


def _check_foreign_files(target: Path, files: Mapping[str, int]) -> None:
    """Raise PlanningError if the folder has checkpoints, or weights that dtensor did not save."""
    ours = [head for head in made_in(target, skip_damaged=True) if head.layout == "dcp"]
    if ours:
        raise PlanningError(
            f"{target} holds checkpoints, such as {ours[-1].name}. If {target} itself were a "
            f"checkpoint, dt.resume would no longer find them.\n"
            f"fix: save to a folder next to them, such as {free_path(target / 'hf')}"
        )
    foreign = sorted(
        path.name
        for path in target.iterdir()
        if _WEIGHTS.fullmatch(path.name) and not _is_ours(path, files)
    )
    if foreign:
        shown = ", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if foreign[4:] else "")
        raise PlanningError(
            f"{target} has weights that dtensor did not save there: {shown}. A save would mix "
            f"them with its own, or replace them.\n"
            f"fix: save to another path, such as {free_path(target)}; or remove them first, if you "
            f"no longer need them"
        )


def _is_ours(path: Path, files: Mapping[str, int]) -> bool:
    """Return whether dtensor saved the file: it is listed with its size, or is an index of listed
    files."""
    if path.name == INDEX:
        try:
            return set(index_map(path).values()) <= files.keys()
        except CheckpointError:
            return False
    return path.is_file() and files.get(path.name) == path.stat().st_size


def _has_moved_files(folder: Path) -> bool:
    """Return whether a dead writer had moved away the files that readers follow."""
    return any((folder / _OLD_FOLDER / name).exists() for name in (INDEX, SINGLE))


def _restore(folder: Path, target: Path) -> None:
    """Undo the moves from ``folder``, in an order in which no reader sees a mix of weights."""
    old, listed = folder / _OLD_FOLDER, _FileList.read(folder)
    saved_names = [path.name for path in old.iterdir()]
    others = sorted(set(saved_names) - {INDEX, SINGLE})
    for name in (INDEX, SINGLE):
        if name in listed.added or (others and name == INDEX):
            (target / name).unlink(missing_ok=True)
    sync(target)
    for name in set(listed.added) - {MANIFEST}:
        (target / name).unlink(missing_ok=True)
    for name in (*others, *(name for name in (SINGLE, INDEX) if name in saved_names)):
        (old / name).rename(target / name)
        sync(target)
    for name in listed.after.keys() - listed.before.keys():
        (target / name).unlink(missing_ok=True)
    sync(target)
    if MANIFEST in listed.added:
        (target / MANIFEST).unlink(missing_ok=True)
        sync(target)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
