"""Tests checkpoints of several ranks: torch's tools read them, blocks are read by range,
unchanged files are hard-linked, and old checkpoints are removed.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import warnings
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    PartRecord,
    TensorPiece,
    Writing,
    latest,
    read_part,
    write_part,
)
from tests.runtime.checkpoint.saving import GROUPS, block, check_equal, pieces, save, state


def test_saved_checkpoint_reads_back_unchanged(tmp_path: Path):
    values = state()
    save(tmp_path / "100", values, extra={"epoch": 3})
    saved = Checkpoint.open(tmp_path / "100")
    check_equal(pickle.loads(pickle.dumps(saved)), values)
    assert (saved.layout, saved.step, saved.extra) == ("dtensor", 100, {"epoch": 3})
    assert saved.small == {("optimizer", "param_groups"): GROUPS}
    assert not [name for name in os.listdir(tmp_path / "100") if name.startswith("part")]


def test_torch_distributed_checkpoint_reads_saved_checkpoint(tmp_path: Path):
    values = state()
    save(tmp_path / "100", values, extra={"a": {"b": 3}, "a.b": 4, "rng": torch.get_rng_state()})
    ours: dict[str, Any] = {
        "model": {
            name: torch.zeros_like(values["model", name])
            for name in ("0.weight", "0.mask", "wide", "none")
        },
        "optimizer": {
            "state": {
                "0.weight": {
                    key: torch.zeros_like(values["optimizer", "state", "0.weight", key])
                    for key in ("exp_avg", "step")
                }
            },
            "param_groups": [{"lr": 0.0, "betas": (0.0, 0.0), "params": []}],
        },
        "step": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not distributed
        dcp.load(ours, checkpoint_id=tmp_path / "100", no_dist=True)
        dcp_to_torch_save(tmp_path / "100", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(whole) == {"model", "optimizer", "step", "extra", "extra_tensors"}
    assert (whole["extra"]["a"], whole["extra"]["a.b"]) == ({"b": 3}, 4)
    assert torch.equal(whole["extra_tensors"]["0"], torch.get_rng_state())
    for read in (ours, whole):
        assert read["step"] == 100 and read["optimizer"]["param_groups"] == GROUPS
        for path, full in values.items():
            inner = read
            for key in path:
                inner = inner[key]
            assert torch.equal(inner, full), path


def test_stored_items_are_complete_torch_save_files(tmp_path: Path):
    values = state()
    save(tmp_path / "100", values)
    saved = Checkpoint.open(tmp_path / "100")
    for record in saved.tensors.values():
        for piece in record.pieces:
            assert piece.item is not None
            start, length = piece.item
            item = (tmp_path / "100" / piece.file).read_bytes()[start : start + length]
            assert zipfile.ZipFile(BytesIO(item)).testzip() is None
            where = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.sizes))
            assert torch.equal(
                torch.load(BytesIO(item), weights_only=True), values[record.path][where]
            )


def test_any_block_of_saved_tensor_can_be_read(tmp_path: Path):
    values = state()
    values["model", "deep"] = torch.randn(3, 40, 5, 90)  # rows longer and shorter than a block
    values["model", "complex"] = torch.randn(4, 5, dtype=torch.complex64).conj()
    values["model", "f8"] = torch.randn(4, 5).to(torch.float8_e4m3fn)
    writing = Writing.begin(tmp_path / "a")
    own = [p for rank in (0, 1) for p in pieces(state(), rank)]
    own += [block(("model", name), values["model", name]) for name in ("complex", "f8")]
    deep = ("model", "deep")
    own += [block(deep, values[deep], (0, 3), at) for at in ((0, 7), (7, 40))]
    writing.finish([write_part(writing.folder, 0, own, None)])
    saved = Checkpoint.open(tmp_path / "a")
    drawn = random.Random(0)
    for path, full in values.items():
        for _ in range(60):
            at = [sorted(drawn.randint(0, n) for _ in range(2)) for n in full.shape]
            got = saved.read(".".join(path), [a for a, _ in at], [b - a for a, b in at])
            wanted = full[tuple(slice(a, b) for a, b in at)]
            assert got.dtype == full.dtype and got.shape == wanted.shape
            assert (
                got.view(torch.uint8).equal(wanted.resolve_conj().contiguous().view(torch.uint8))
                if full.dim()
                else got.equal(full)
            )


@pytest.mark.parametrize("rows", [64, 4096])
def test_reading_row_range_reads_only_its_bytes(tmp_path: Path, rows: int):
    full = torch.randn(rows, 64)
    writing = Writing.begin(tmp_path / "a")
    writing.finish([write_part(writing.folder, 0, [block(("model", "w"), full)], None)])
    for ranks in (2, 4, 8):
        saved = Checkpoint.open(tmp_path / "a")
        size = rows // ranks
        assert saved.read("model.w", (size, 0), (size, 64)).equal(full[size : 2 * size])
        assert saved.bytes_read == size * 64 * 4
    saved = Checkpoint.open(tmp_path / "a")
    saved.read("model.w", (1, 1), (1, 1))
    assert saved.bytes_read <= max(512, full.nbytes // 32)


def test_reading_block_outside_tensor_raises(tmp_path: Path):
    save(tmp_path / "a", state())
    saved = Checkpoint.open(tmp_path / "a")
    with pytest.raises(ValueError, match=r"no block of model.0.weight \(10, 6\)"):
        saved.read("model.0.weight", (8, 0), (3, 6))
    with pytest.raises(KeyError, match="model.1.weight"):
        saved.read("model.1.weight")


def test_elements_are_written_once_and_unchanged_files_are_hard_linked(tmp_path: Path):
    values = state()
    data = sum(full.nbytes for full in values.values())
    parts = save(tmp_path / "1", values)
    written = sum(part.bytes_written for part in parts)
    items = sum(len(part.tensors) for part in parts)
    assert data < written < data + 2_000 * items
    assert all(part.bytes_linked == 0 for part in parts)

    parts = save(tmp_path / "2", values)
    assert sum(part.bytes_written for part in parts) == 0
    assert sum(part.bytes_linked for part in parts) == written
    for part in parts:
        for name in part.files:
            assert (tmp_path / "2" / name).stat().st_nlink == 2

    values["model", "0.weight"] = values["model", "0.weight"] + 1
    parts = save(tmp_path / "3", values)  # both files hold some of its rows
    assert sum(part.bytes_linked for part in parts) == 0
    values["model", "0.weight"] = values["model", "0.weight"] + 1
    parts = save(tmp_path / "4", values)  # the changed rows now have separate files
    assert 0 < sum(part.bytes_written for part in parts) < 2 * 2_000
    assert sum(part.bytes_linked for part in parts) > data
    for name in "1234":
        Checkpoint.open(tmp_path / name)
    check_equal(Checkpoint.open(tmp_path / "4"), values)
    check_equal(Checkpoint.open(tmp_path / "1"), state())


def test_unchanged_files_are_rewritten_if_hard_links_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path / "1", state())

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    parts = save(tmp_path / "2", state())
    assert all(part.bytes_linked == 0 and part.bytes_written for part in parts)
    check_equal(Checkpoint.open(tmp_path / "2"), state())


def test_damaged_file_of_previous_checkpoint_is_not_linked(tmp_path: Path):
    save(tmp_path / "1", state())
    for file in (tmp_path / "1").glob("__0_*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    save(tmp_path / "2", state())
    check_equal(Checkpoint.open(tmp_path / "2"), state())


def test_same_state_gives_identical_files(tmp_path: Path):
    for folder in ("a", "b"):
        save(tmp_path / folder / "1", state(), extra={"x": {3, 1, 2}})
    files = sorted(os.listdir(tmp_path / "a" / "1"))
    assert files == sorted(os.listdir(tmp_path / "b" / "1"))
    for file in files:
        a, b = ((tmp_path / folder / "1" / file).read_bytes() for folder in "ab")
        assert a == b, file


def test_read_part_finds_written_part(tmp_path: Path):
    writing = Writing.begin(tmp_path / "1")
    assert read_part(writing.folder, 1) is None
    part = write_part(writing.folder, 1, [block(("model", "w"), torch.ones(3))], writing.previous)
    assert read_part(writing.folder, 1) == part == pickle.loads(pickle.dumps(part))
    writing.finish([part])


def test_keep_option_removes_oldest_checkpoints_and_nothing_else(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "manifest.json").write_text("{}")
    save(tmp_path / "0", state())
    os.rename(tmp_path / "0", tmp_path / "best")  # renamed by the user, so no longer removed
    for step in (10, 9, 8, 7):
        save(tmp_path / str(step), state(step), step=step, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["7", "8", "9", "best", "notes"]
    assert latest(tmp_path) == str(tmp_path / "7")
    for step in (9, 8, 7):
        check_equal(Checkpoint.open(tmp_path / str(step)), state(step))
    with pytest.raises(PlanningError, match="keep=0 is not a whole number of at least 1"):
        save(tmp_path / "6", state(), keep=0)
    assert sorted(os.listdir(tmp_path)) == ["7", "8", "9", "best", "notes"]


def test_save_refuses_pieces_that_overlap_or_leave_gaps(tmp_path: Path):
    full = torch.ones(4, 4)
    for ranges, fault in (
        ([(0, 2), (1, 4)], "overlap"),
        ([(0, 1), (2, 4)], "lack a part of it"),
        ([(0, 2), (0, 2), (2, 4)], "overlap"),
    ):
        writing = Writing.begin(tmp_path / "1")
        own = [block(("model", "w"), full, at) for at in ranges]
        with pytest.raises(ValueError, match=fault):
            writing.finish([write_part(writing.folder, 0, own, None)])
        writing.abort()
        assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="not a block of"):
        TensorPiece(path=("w",), shape=(4,), offsets=(2,), tensor=torch.ones(3))


def test_tied_weight_is_stored_once_and_read_under_both_names(tmp_path: Path):
    """The bytes of a tied weight are written once; torch's tools see both names. Values can be
    added before the save finishes."""
    full = torch.randn(4, 4)

    def save_tied(name: str) -> PartRecord:
        writing = Writing.begin(tmp_path / name)
        part = write_part(writing.folder, 0, [block(("model", "a"), full)], writing.previous)
        again = replace(part.tensors[0], path=("model", "b"))
        writing.add(("counts",), {"a.b": 1, "a": {"b": 2}})
        with pytest.raises(PlanningError, match="counts holds a tensor"):
            writing.add(("counts",), [torch.ones(1)])
        writing.finish([replace(part, tensors=(*part.tensors, again))])
        return part

    assert save_tied("1").bytes_written < full.nbytes + 2_000
    assert save_tied("2").bytes_written == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "2", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    saved = Checkpoint.open(tmp_path / "2")
    for name in ("a", "b"):
        assert saved.read(f"model.{name}").equal(full) and whole["model"][name].equal(full)
    assert saved.small == {("counts",): {"a.b": 1, "a": {"b": 2}}}
    assert whole["counts"] == saved.small["counts",]


def test_manifest_is_json_of_four_lines(tmp_path: Path):
    save(tmp_path / "1", state(), extra={"epoch": 3})
    text = (tmp_path / "1" / "manifest.json").read_text()
    said = json.loads(text)
    assert len(text.splitlines()) == 4
    assert said["head"]["step"] == 100 and said["body"]["extra"] == {"epoch": 3}


def test_opening_path_that_is_no_checkpoint_raises(tmp_path: Path):
    save(tmp_path / "1", state())
    for path, words in (
        (tmp_path / "2", "does not exist"),
        (tmp_path / "1" / "manifest.json", "is a file; a checkpoint is a folder"),
        (tmp_path, "holds checkpoints and is none itself"),
    ):
        with pytest.raises(PlanningError, match=words):
            Checkpoint.open(path)
    (tmp_path / "1" / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(CheckpointError, match="was not written by dtensor, or its first bytes"):
        Checkpoint.open(tmp_path / "1")
    assert latest(tmp_path / "3") is None
