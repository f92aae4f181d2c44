"""Tests reading folders that others wrote with torch.distributed.checkpoint, and that code
planted in them does not run.
"""

from __future__ import annotations

import os
import pickle
import random
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint import Checkpoint, CheckpointError
from tests.runtime.checkpoint.saving import save, state


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a checkpoint of a model and optimizer saved by torch's own planner, and its tensors
    by name."""
    model = nn.Linear(6, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    views = {"turned": torch.randn(5, 7).t(), "part": torch.arange(9)[3:6]}
    whole = {
        "model": {**model.state_dict(), **views},
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "seen": {1, 2},
    }
    path = tmp_path / "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not distributed
        dcp.save(whole, checkpoint_id=path, no_dist=True)
    tensors = {f"model.{key}": value for key, value in whole["model"].items()}
    tensors |= {
        f"optimizer.state.{i}.{key}": value
        for i, own in whole["optimizer"]["state"].items()
        for key, value in own.items()
    }
    return path, tensors


def test_foreign_dcp_checkpoint_is_read_by_ranges(theirs: tuple[Path, dict[str, torch.Tensor]]):
    path, tensors = theirs
    saved = Checkpoint.open(path)
    assert (saved.layout, saved.step, saved.extra) == ("dcp", None, None)
    assert set(saved.tensors) == set(tensors)
    for name, full in tensors.items():
        got = saved.read(name)
        assert got.dtype == full.dtype and got.equal(full)
        if full.dim() == 2:
            assert saved.read(name, (1, 2), (3, 2)).equal(full[1:4, 2:4])
    assert saved.small["step",] == 3 and saved.small["seen",] == {1, 2}
    assert saved.small["optimizer", "param_groups", "0", "lr"] == 1e-3


def test_foreign_dcp_range_reads_only_its_bytes_and_headers(tmp_path: Path):
    full = torch.randn(1_000, 1_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": full}, checkpoint_id=tmp_path / "w", no_dist=True)
    saved = Checkpoint.open(tmp_path / "w")
    assert saved.read("w", (500, 0), (100, 1_000)).equal(full[500:600])
    assert 400_000 <= saved.bytes_read < 410_000


class Planted:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, there: Path) -> None:
        self.there = there

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.there}",)


def test_malicious_pickle_in_dcp_metadata_is_not_run(
    theirs: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
):
    path, tensors = theirs
    there = tmp_path / "it-ran"
    metadata = FileSystemReader(path).read_metadata()
    for place in ("planner_data", "storage_meta", "version", "state_dict_metadata"):
        content = (path / ".metadata").read_bytes()
        setattr(metadata, place, {"model.weight": Planted(there)})
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="names posix.system.*dtensor ran nothing of it"):
            Checkpoint.open(path)
        (path / ".metadata").write_bytes(content)
        metadata = FileSystemReader(path).read_metadata()
    (path / ".metadata").write_bytes(pickle.dumps(Planted(there)))
    with pytest.raises(CheckpointError, match="names posix.system"):
        Checkpoint.open(path)
    (path / ".metadata").write_bytes(content)

    # Plant it in every item of the files; each item is a separate pickle.
    written = BytesIO()
    torch.save(Planted(there), written)
    for index, info in metadata.storage_data.items():
        file = path / info.relative_path
        content = file.read_bytes()
        planted = written.getvalue().ljust(info.length, b"\0")
        file.write_bytes(content[: info.offset] + planted + content[info.offset + info.length :])
        saved = Checkpoint.open(path)
        with pytest.raises(CheckpointError) as caught:
            if index.fqn in tensors:
                saved.read(index.fqn)
            else:
                _ = saved.small[tuple(map(str, metadata.planner_data[index.fqn]))]
        assert file.name in str(caught.value) and index.fqn in str(caught.value)
        file.write_bytes(content)
    assert not there.exists()
    os.system(f"touch {there}")  # the pickle would have done this
    assert there.exists()


def test_malicious_pickle_in_place_of_item_is_refused(tmp_path: Path):
    there = tmp_path / "it-ran"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2), "v": 1}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = FileSystemReader(tmp_path / "a").read_metadata()
    planted = _saved(Planted(there))
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(planted)
    (tmp_path / "a" / "__0_0.distcp").write_bytes(planted)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    saved = Checkpoint.open(tmp_path / "a")
    words = "__0_0.distcp holds . as a pickle .* refuses.*dtensor ran nothing of it"
    with pytest.raises(CheckpointError, match=words):
        saved.read("w")
    with pytest.raises(CheckpointError, match=words):
        _ = saved.small["v",]
    assert not there.exists()


def test_malicious_pickle_in_own_checkpoint_is_never_read(tmp_path: Path):
    values = state()
    save(tmp_path / "1", values, extra={"rng": torch.get_rng_state()})
    there = tmp_path / "it-ran"
    for file in sorted((tmp_path / "1").iterdir()):
        content = file.read_bytes()
        for plant in (pickle.dumps(Planted(there)), _saved(Planted(there))):
            file.write_bytes((plant * len(content))[: len(content)])
            try:
                saved = Checkpoint.open(tmp_path / "1")
                for name in saved.tensors:
                    saved.read(name)
                assert file.name in (".metadata", "__values_0.distcp")
            except CheckpointError as error:
                assert file.name in str(error)
        file.write_bytes(content)
    assert not there.exists()


def _saved(value: Any) -> bytes:
    written = BytesIO()
    torch.save(value, written)
    return written.getvalue()


def test_truncated_dcp_metadata_is_refused(theirs: tuple[Path, dict[str, torch.Tensor]]):
    path, tensors = theirs
    content = (path / ".metadata").read_bytes()
    drawn = random.Random(0)
    for n in range(300):
        changed = bytearray(content)
        if n % 2:
            del changed[drawn.randrange(len(content)) :]
        else:
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
        (path / ".metadata").write_bytes(changed)
        try:
            saved = Checkpoint.open(path)
            for name in saved.tensors:
                saved.read(name)
        except CheckpointError as error:
            assert "theirs" in str(error)
    (path / ".metadata").write_bytes(content)
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:5_000])
    with pytest.raises(CheckpointError, match="__0_0.distcp ends before byte"):
        saved = Checkpoint.open(path)
        for name in tensors:
            saved.read(name)
    file.unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp cannot be read: No such file"):
        saved.read("model.weight")


def test_dcp_metadata_that_names_files_outside_folder_is_refused(
    theirs: tuple[Path, dict[str, torch.Tensor]],
):
    path, _ = theirs
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="'../secret' does not lie in the checkpoint"):
        Checkpoint.open(path)


def test_pytorch_model_bin_is_refused_by_name(tmp_path: Path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(PlanningError, match="pytorch_model.bin, a pickle.*\nfix: if you trust"):
        Checkpoint.open(tmp_path)
