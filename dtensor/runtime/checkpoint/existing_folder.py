"""Weights in an existing folder: beside other files, or in place of older weights.

    claim = claim_existing(Path("out"))   # out/.tmp-out-1f0c9a3e; out has a tokenizer
    ...                                   # safetensors files, their index, config.json, a manifest
    claim.publish()                       # moved into out; our older files there are removed

A reader never gets a mix of the old and the new, whatever is killed when. Readers are transformers,
which reads `model.safetensors` if it exists and else the files that the index names; a reader that
follows the index; and ours, which follows the manifest. For that,

- files of tensors get unused names, and are moved first: no reader opens them yet. (The first
  weights in a folder have the usual names.)
- The files that readers follow are moved last, each by one rename: the index, then the manifest
  (before the files, where there was none). An older `model.safetensors`, which transformers would
  prefer, is removed after them, and then the other older files.
- A different `config.json` and the weights cannot change at once. So the files that readers follow
  are first taken away: a reader then, or after a kill there, finds no weights. They are kept in the
  `.tmp-*`, and put back if the save fails, or by the next save after a kill.

Only files that dtensor has saved there are ever removed: those that a manifest names, or a list in
the `.tmp-*` of a writer that was killed before it had one. Other weights are refused, and named.

Invariants: each step is synced before the next begins; one process at a time writes to a folder.

Not here: folders that a save makes (atomic_folder.py), the contents of the files.
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

_LIST = "files.json"
"""In the `.tmp-*`: the list of our files in the folder, before and after; see `_Listed`."""
_OLD = "old"
"""In the `.tmp-*`: the folder of files that are put back if the save fails."""
_TENSORS = re.compile(r".*\.(safetensors|distcp)")
_WEIGHTS = re.compile(
    r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?|.*\.distcp|\.metadata"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """Files of tensors in the folder by size, ``before`` this save and ``after`` it; ``added`` are
    other new files of the save."""

    before: Mapping[str, int]
    after: Mapping[str, int] = field(default_factory=dict[str, int])
    added: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        said = {"before": self.before, "after": self.after, "added": self.added}
        write_synced(folder / _LIST, json.dumps(said).encode())

    @staticmethod
    def read(folder: Path) -> _Listed:
        """Empty without a list: the save was of another kind, or moved nothing."""
        try:
            said: dict[str, Any] = json.loads((folder / _LIST).read_bytes())
            before, after = (
                {plain_name(name): int(nbytes) for name, nbytes in said[key].items()}
                for key in ("before", "after")
            )
            return _Listed(before=before, after=after, added=tuple(map(plain_name, said["added"])))
        except FileNotFoundError:
            return _Listed(before={})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(folder / _LIST, repr(error)) from error


@dataclass(slots=True)
class Replacement:
    """A folder being written: the files of ``folder`` go to ``target``."""

    folder: Path
    target: Path
    tag: str
    """The part of its tensor files' names that makes them unique; or ""."""
    _before: Mapping[str, int]
    _locks: list[int]
    replaces: bool = True
    published: bool = False
    _needed: bool = False

    def publish(self) -> None:
        """Move all files, and remove our older ones. A failure before the new weights are published
        leaves the old ones."""
        names = {path.name for path in self.folder.iterdir()} - {_LIST, _OLD}
        tensors = {n: (self.folder / n).stat().st_size for n in names if _TENSORS.fullmatch(n)}
        others = sorted(
            n
            for n in names - set(tensors) - {INDEX, MANIFEST}
            if _content(self.target / n) != (self.folder / n).read_bytes()
        )
        self._prepare(tensors, others)
        self._needed = True
        try:
            self._move(tensors, others)
        except BaseException:
            if not self.published:
                self._undo()
            raise
        self._remove_old(set(self._before) - set(tensors))
        self._needed = False
        self.give_up()

    def give_up(self) -> None:
        """Remove files that were written and not moved, except those that the next save needs."""
        if not self._needed:
            shutil.rmtree(self.folder, ignore_errors=True)
        while self._locks:
            unlock(self._locks.pop())

    def _undo(self) -> None:
        try:
            _give_back(self.folder, self.target)
        except OSError as error:
            raise CheckpointError(
                f"{self.target} could not be written, and the earlier files could not be put back: "
                f"{error}. They are in {self.folder}.\n"
                f"fix: check the disk, and save there once more, which puts them back first"
            ) from error
        self._needed = False

    def _prepare(self, tensors: Mapping[str, int], others: list[str]) -> None:
        """Write to the disk everything that an undo needs."""
        old = self.folder / _OLD
        old.mkdir()
        added: list[str] = []
        for name in (INDEX, SINGLE, MANIFEST, *others):
            if not (self.target / name).exists():
                added.append(name)
            elif name not in (SINGLE, MANIFEST):  # SINGLE is moved, if at all; MANIFEST is the last
                write_synced(old / name, (self.target / name).read_bytes())
        _Listed(before=self._before, after=tensors, added=tuple(added)).write(self.folder)
        sync(old)
        sync(self.folder)

    def _move(self, tensors: Mapping[str, int], others: list[str]) -> None:
        here, there = self.folder, self.target
        last = [name for name in (SINGLE, INDEX, MANIFEST) if (here / name).exists()]
        if not (there / MANIFEST).exists():  # else files of tensors would be read without it
            last.remove(MANIFEST)
            (here / MANIFEST).rename(there / MANIFEST)
            sync(there)
        for name in sorted(tensors.keys() - {SINGLE}):
            (here / name).rename(there / name)
        sync(there)
        if others:
            (there / INDEX).unlink(missing_ok=True)
            if (there / SINGLE).exists():
                sync(there)
                (there / SINGLE).rename(here / _OLD / SINGLE)
            sync(there)
            for name in others:
                (here / name).rename(there / name)
            sync(there)
        for name in last:
            (here / name).rename(there / name)
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

    PlanningError, and nothing is changed, if it has weights that dtensor did not save there, if it
    is or holds checkpoints, or if another process writes there.
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
        _check_others(target, files)
        for left in leftovers(target):
            if not (target / INDEX).exists() and _put_aside(left):
                _give_back(left, target)
        tag = secrets.token_hex(4)
        folder, inner = locked_folder(target, f"{target.name}-{tag}")
        locks.append(inner)
        _Listed(before=files).write(folder)
        sync(folder)
        remove_leftovers(target)  # this one has taken over their lists
        return Replacement(folder, target, f"-{tag}" if files else "", files, locks)
    except BaseException as error:
        for descriptor in locks:
            unlock(descriptor)
        if isinstance(error, OSError):
            raise refused(target, error) from error
        raise


def _own_files(target: Path) -> dict[str, int]:
    """The files of tensors in it that dtensor has saved there, with the sizes that they had."""
    files: dict[str, int] = {}
    for left in leftovers(target):
        listed = _Listed.read(left)
        files |= {**listed.before, **listed.after}
    if (target / MANIFEST).exists():
        head = read_head(target)
        if head is None:
            raise PlanningError(
                f"{target / MANIFEST} is another program's, and a save would replace it.\n"
                f"fix: save to another path, such as {free_path(target)}"
            )
        if head.layout != "hf":
            raise PlanningError(
                f"{target} is a checkpoint in torch's files, and a save never replaces one.\n"
                f"fix: save to another path, such as {free_path(target)}"
            )
        files |= {str(n): int(nbytes) for n, nbytes in read_manifest(target)[1]["files"].items()}
    return files


def _check_others(target: Path, files: Mapping[str, int]) -> None:
    ours = [head for head in made_in(target, skip_damaged=True) if head.layout == "dcp"]
    if ours:
        raise PlanningError(
            f"{target} holds checkpoints, such as {ours[-1].name}, which dt.resume would no longer "
            f"find behind one that is {target} itself.\n"
            f"fix: save beside them, such as to {free_path(target / 'hf')}"
        )
    strange = sorted(
        path.name
        for path in target.iterdir()
        if _WEIGHTS.fullmatch(path.name) and not _is_own(path, files)
    )
    if strange:
        few = ", ".join(strange[:4]) + (f" and {len(strange) - 4} more" if strange[4:] else "")
        raise PlanningError(
            f"{target} has weights that dtensor did not save there: {few}. A save there would mix "
            f"them with its own, or replace them.\n"
            f"fix: save to another path, such as {free_path(target)}; or remove them first, if you "
            f"no longer need them"
        )


def _is_own(path: Path, files: Mapping[str, int]) -> bool:
    if path.name == INDEX:
        try:
            return set(index_map(path).values()) <= files.keys()
        except CheckpointError:
            return False
    return path.is_file() and files.get(path.name) == path.stat().st_size


def _put_aside(folder: Path) -> bool:
    """Whether a dead writer took away the files that readers follow."""
    return any((folder / _OLD / name).exists() for name in (INDEX, SINGLE))


def _give_back(folder: Path, target: Path) -> None:
    """Undo the moves from ``folder``, in an order in which no reader sees a mix."""
    old, listed = folder / _OLD, _Listed.read(folder)
    back = [path.name for path in old.iterdir()]
    others = sorted(set(back) - {INDEX, SINGLE})
    for name in (INDEX, SINGLE):
        if name in listed.added or (others and name == INDEX):
            (target / name).unlink(missing_ok=True)
    sync(target)
    for name in set(listed.added) - {MANIFEST}:
        (target / name).unlink(missing_ok=True)
    for name in (*others, *(name for name in (SINGLE, INDEX) if name in back)):
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
