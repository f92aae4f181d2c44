"""Write a checkpoint: the controller begins and finishes it, and each rank writes its part.

    writing = Writing.begin("ckpt/100", step=100, extra={"epoch": 3})   # controller
    part = write_part(writing.folder, 0, pieces, writing.previous)      # each rank, in any thread
    writing.finish([part, ...], keep=3)                                 # controller; ckpt/100

Invariants: a checkpoint is published after all its files are synced, the manifest last, by one
rename of its folder or by moves into an existing folder (existing_folder.py). Checkpoints beyond
`keep` are removed after that. The caller must not change pieces before they are written.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtensor.errors import PlanningError, check_kind, check_number
from dtensor.private_torch import flatten_state_dict
from dtensor.runtime.checkpoint.atomic_folder import (
    StagedFolder,
    checked_path,
    claim_folder,
    disk_error,
    free_path,
    refused,
    remove_folder,
    write_synced,
)
from dtensor.runtime.checkpoint.dcp_metadata import ValueItem, metadata_bytes
from dtensor.runtime.checkpoint.existing_folder import Replacement, claim_existing
from dtensor.runtime.checkpoint.extra import decoded, encoded
from dtensor.runtime.checkpoint.manifest import (
    MANIFEST,
    Head,
    made_in,
    manifest_text,
    read_head,
)
from dtensor.runtime.checkpoint.parts import CONTROLLER, part_name, write_part
from dtensor.runtime.checkpoint.records import (
    CheckpointError,
    PartRecord,
    TensorPiece,
    TensorRecord,
    merged,
)
from dtensor.runtime.checkpoint.safetensors import (
    SHARD_BYTES,
    make_files,
    planned_files,
    read_directory,
    write_config,
)


@dataclass(slots=True)
class Writing:
    """A checkpoint being written. The controller sends ``folder`` and ``previous`` to the ranks."""

    folder: str
    """The folder for parts, next to the target."""
    previous: str | None
    """The newest checkpoint in the same folder, whose unchanged files are linked."""
    _claim: StagedFolder | Replacement
    _head: Head
    _extra: tuple[Any, dict[str, torch.Tensor]]
    _small: list[tuple[tuple[str, ...], Any]]

    @staticmethod
    def begin(
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        extra: Any = None,
        small: Mapping[tuple[str, ...], Any] | None = None,
    ) -> Writing:
        """Begin a checkpoint: make the folder `.tmp-<name>-<nonce>` next to ``path``.

        ``extra``: the user's values (numbers, text, bytes, containers, tensors). ``small``: by
        path, values of the state that are not tensors, such as ("optimizer", "param_groups"). Both
        are copied. torch's tools see a value with a path of one key as a whole, other values
        flattened like a state dict.

        Raises PlanningError if the path exists or cannot be made, or if a value cannot be written.
        """
        values = [(where, _small_tree(where, value)) for where, value in (small or {}).items()]
        return Writing._claimed(path, step, extra, values, "dcp")

    @staticmethod
    def begin_hf(
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        tied: Mapping[str, str] | None = None,
        model: nn.Module | None = None,
        step: int | None = None,
        extra: Any = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> Writing:
        """Begin a checkpoint in Hugging Face's format; ranks write with `write_hf_part`.

        The files are made here, with space for all ``tensors`` (by name: dtype and global shape).
        An existing folder is used if its only weights are dtensor's, which are then replaced.

        ``tied``: by name that is not in ``tensors``, the name of its tensor. ``model``: its
        ``config`` is written too, if it has one.
        """
        writing = Writing._claimed(path, step, extra, [], "hf")
        try:
            files = planned_files(tensors, tied or {}, shard_bytes, writing._claim.tag)
            make_files(writing._claim.folder, files)
            if model is not None:
                write_config(writing._claim.folder, model)
        except OSError as error:
            writing.abort()
            raise disk_error(writing._claim.target, error) from error
        except BaseException:
            writing.abort()
            raise
        return writing

    @staticmethod
    def _claimed(
        path: str | os.PathLike[str],
        step: int | None,
        extra: Any,
        small: list[tuple[tuple[str, ...], Any]],
        layout: str,
    ) -> Writing:
        """Claim the folder of a checkpoint and return its writing."""
        check_kind("the path", path, str | os.PathLike, "a path", 'dt.save("ckpt/100", model)')
        if step is not None:
            check_number("step", step, least=0, whole=True, fix="the number of steps taken")
        encoded_extra = encoded(extra, "extra")
        target = checked_path(path)
        _check_beside(target)
        into_existing = layout == "hf" and target.is_dir()
        claim = claim_existing(target) if into_existing else claim_folder(target)
        try:
            before = made_in(claim.target.parent, skip_damaged=True)
        except OSError as error:
            claim.give_up()
            raise refused(target, error) from error
        head = Head(
            name=claim.target.name,
            sequence=1 + max((head.sequence for head in before), default=0),
            step=None if step is None else int(step),
            layout=layout,
        )
        linkable = [other.name for other in before if other.layout == layout == "dcp"]
        previous = str(claim.target.parent / linkable[-1]) if linkable else None
        return Writing(str(claim.folder), previous, claim, head, encoded_extra, small)

    def add(self, path: tuple[str, ...], value: Any) -> None:
        """Add a value to the ``small`` values of `begin`."""
        self._small.append((path, _small_tree(path, value)))

    def finish(self, parts: Iterable[PartRecord], *, keep: int | None = None) -> None:
        """Publish the parts of all ranks, then remove the oldest checkpoints beyond ``keep``.

        Only dtensor's checkpoints of the same format under their original names are removed: a
        renamed or copied checkpoint stays. On an error the unfinished folder is removed.
        """
        try:
            if keep is not None:
                check_number("keep", keep, least=1, whole=True, fix="keep=3")
            self._publish(list(parts))
        except OSError as error:
            self.abort()
            if self.published:
                raise CheckpointError(
                    f"{self._claim.target} is saved, but the disk failed right after: {error}. "
                    "Some readers may still see the earlier files.\n"
                    "fix: check the disk, and save again"
                ) from error
            raise disk_error(self._claim.target, error) from error
        except BaseException:
            self.abort()
            raise
        if keep is not None:
            parent = self._claim.target.parent
            heads = made_in(parent, skip_damaged=True)
            for head in [head for head in heads if head.layout == self._head.layout][:-keep]:
                try:
                    remove_folder(parent / head.name)
                except OSError as error:
                    raise CheckpointError(
                        f"{self._claim.target} is saved, but {parent / head.name}, older than the "
                        f"{keep} to keep, cannot be removed: {error.strerror}.\nfix: remove it "
                        "by hand"
                    ) from error

    def abort(self) -> None:
        """Remove the unfinished files; earlier checkpoints do not change."""
        self._claim.give_up()

    @property
    def replaces(self) -> bool:
        """Whether the checkpoint is written into an existing folder."""
        return self._claim.replaces

    @property
    def published(self) -> bool:
        """Whether the checkpoint has been published at its path."""
        return self._claim.published

    def _publish(self, parts: list[PartRecord]) -> None:
        """Write the controller's part, `.metadata` and the manifest, check all files, and
        publish."""
        folder = self._claim.folder
        tree, tensors = self._extra
        pieces = [
            TensorPiece(
                path=("extra_tensors", name),
                shape=tuple(tensor.shape),
                offsets=(0,) * tensor.dim(),
                tensor=tensor,
            )
            for name, tensor in tensors.items()
        ]
        records = merged(record for part in parts for record in part.tensors)
        files = {file: nbytes for part in parts for file, nbytes in part.files.items()}
        controllers = write_part(self.folder, CONTROLLER, pieces, None, self._claim.tag)
        if self._head.layout == "hf":
            written = read_directory(folder)
            _check_written(written.tensors, records)
            files |= written.files
            records = {}
        records |= merged(controllers.tensors)
        files |= controllers.files
        if self._head.layout == "dcp":
            leaves = {
                path[0]: decoded(controllers, {})
                for path, controllers in self._small
                if len(path) == 1
            }
            if tree is not None:
                leaves["extra"] = tree
            if self._head.step is not None:
                leaves["step"] = self._head.step
            nested = _nested(
                (path, controllers) for path, controllers in self._small if len(path) > 1
            )
            value_files, items = _write_values(folder, nested, leaves)
            files |= value_files
            write_synced(folder / ".metadata", metadata_bytes(records, items))
        for file, nbytes in files.items():
            if (folder / file).stat().st_size != nbytes:
                raise CheckpointError(f"{folder / file} is not the {nbytes} bytes written to it")
        for part in (*parts, controllers):
            (folder / part_name(part.rank)).unlink()
        body = {
            "files": dict(sorted(files.items())),
            "tensors": [record.to_json() for record in records.values()],
            "small": self._small,
            "extra": tree,
        }
        write_synced(folder / MANIFEST, manifest_text(self._head, body))
        self._claim.publish()


def _check_written(
    written: Mapping[str, TensorRecord], records: Mapping[str, TensorRecord]
) -> None:
    """Raise ValueError unless the ranks wrote exactly the tensors that the files have space for."""
    missing = {n for n, record in written.items() if 0 not in record.shape} - set(records)
    if missing or set(records) - set(written):
        raise ValueError(f"not written: {sorted(missing)}; no room: {set(records) - set(written)}")


def _write_values(
    folder: Path, nested: dict[str, Any], leaves: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, ValueItem]]:
    """Write values for torch's tools by torch.save: ``nested`` values flattened like a state dict,
    ``leaves`` as a whole. dtensor itself reads values from the manifest."""
    file = "__values_0.distcp"
    flat, paths = flatten_state_dict()(nested)
    items: dict[str, ValueItem] = {}
    content = io.BytesIO()
    for name, value in {**flat, **leaves}.items():
        start = content.tell()
        torch.save(value, content)
        items[name] = ValueItem(paths.get(name, (name,)), file, start, content.tell() - start)
    if not items:
        return {}, {}
    write_synced(folder / file, content.getvalue())
    return {file: len(content.getvalue())}, items


def _check_beside(target: Path) -> None:
    """Raise PlanningError if the path is inside a checkpoint."""
    for up in target.parents:
        if os.access(up / MANIFEST, os.R_OK) and read_head(up) is not None:
            raise PlanningError(
                f"{target} would be inside the checkpoint {up}, and be removed with it.\n"
                f"fix: save next to it, such as to {free_path(up)}"
            )


def _small_tree(path: tuple[str, ...], value: Any) -> Any:
    tree, tensors = encoded(value, ".".join(path))
    if tensors:
        raise PlanningError(f"{'.'.join(path)} holds a tensor: tensors are pieces, not values")
    return tree


def _nested(small: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return the decoded values as a nested dict, from their paths."""
    root: dict[str, Any] = {}
    for path, tree in small:
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = decoded(tree, {})
    return root
