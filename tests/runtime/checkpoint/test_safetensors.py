"""Tests Hugging Face folders: transformers reads what several ranks wrote, and ranks read what
transformers wrote.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    TensorPiece,
    Writing,
    latest,
    write_hf_part,
)
from dtensor.runtime.checkpoint.assembly import Assembly, cat, inverted, read_block, stack
from dtensor.runtime.checkpoint.safetensors import runs
from tests.extras import missing
from tests.runtime.checkpoint.saving import block, save, state

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason=missing("transformers"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    return transformers.LlamaForCausalLM(config).float()


def pieces(values: dict[str, torch.Tensor], rank: int, dim: int) -> list[TensorPiece]:
    """Return the rank's part of three uneven parts along a dim, if the tensor has that dim."""
    own: list[TensorPiece] = []
    for name, full in values.items():
        along = min(dim, full.dim() - 1)
        size = full.shape[along]
        cuts = [0, size // 4, size // 2, size]
        where = [(0, n) for n in full.shape]
        where[along] = cuts[rank], cuts[rank + 1]
        own.append(block((name,), full, *where))
    return own


def write(path: Path, values: dict[str, torch.Tensor], dim: int, **options: Any) -> None:
    told = {name: (full.dtype, tuple(full.shape)) for name, full in values.items()}
    writing = Writing.begin_hf(path, told, **options)
    parts = [write_hf_part(writing.folder, rank, pieces(values, rank, dim)) for rank in range(3)]
    assert sum(part.bytes_written for part in parts) == sum(t.nbytes for t in values.values())
    writing.finish(parts)


@pytest.mark.default("20000-0")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000])
def test_transformers_loads_saved_hf_folder(tmp_path: Path, dim: int, shard_bytes: int):
    from transformers import AutoModelForCausalLM

    model = llama()
    values = {name: v for name, v in model.state_dict().items() if name not in TIED}
    path = tmp_path / "hf"
    write(path, values, dim, tied=TIED, model=model, shard_bytes=shard_bytes, step=3, extra=[1])
    files = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if shard_bytes > 1_000_000:
        assert files == ["model.safetensors"]
    else:
        assert files[0] == f"model-00001-of-0000{len(files)}.safetensors" and len(files) > 3
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(values) and set(index["weight_map"].values()) == {*files}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in values.values())
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"

    read = AutoModelForCausalLM.from_pretrained(path)
    for (name, a), (other, b) in zip(model.state_dict().items(), read.state_dict().items()):
        assert name == other and a.dtype == b.dtype and a.equal(b), name
    saved = Checkpoint.open(path)
    assert (saved.layout, saved.step, saved.extra, saved.tied) == ("hf", 3, [1], TIED)
    for name, full in values.items():
        assert saved.read(name).equal(full)
    assert latest(tmp_path) == str(path)


def test_safetensors_library_reads_saved_files_of_every_dtype(tmp_path: Path):
    load_file = pytest.importorskip("safetensors.torch", reason=missing("safetensors")).load_file
    values = {
        f"{i}": torch.randn(5, 3, 2).mul(50).to(dtype)
        for i, dtype in enumerate(
            [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.uint16]
        )
    }
    values["f8"] = torch.randn(5, 3).to(torch.float8_e4m3fn)
    values["none"] = torch.zeros(0, 3)
    values["number"] = torch.tensor(3)
    told = {name: (full.dtype, tuple(full.shape)) for name, full in values.items()}
    writing = Writing.begin_hf(tmp_path / "hf", told)
    assert writing.previous is None
    own = [block((name,), full) for name, full in values.items()]
    writing.finish([write_hf_part(writing.folder, 0, own)])
    read = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(read) == set(values)
    for name, full in values.items():
        assert read[name].dtype == full.dtype
        assert read[name].view(torch.uint8).equal(full.view(torch.uint8)) if full.dim() else True


def test_weights_saved_by_transformers_are_read_by_byte_range(tmp_path: Path):
    model = llama()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")  # pyright: ignore
    saved = Checkpoint.open(tmp_path / "hf")
    assert (saved.layout, saved.step, saved.extra) == ("hf", None, None)
    assert set(saved.tensors) == set(model.state_dict()) - set(TIED)
    for name in saved.tensors:
        full = model.state_dict()[name]
        before = saved.bytes_read
        half = (full.shape[0] // 2, *full.shape[1:])
        assert saved.read(name, (half[0], *[0] * (full.dim() - 1)), half).equal(full[half[0] :])
        assert saved.bytes_read - before == full.nbytes // 2


def test_reading_columns_of_long_rows_skips_other_bytes(tmp_path: Path):
    full = torch.randn(4, 8_192)
    write(tmp_path / "hf", {"w": full}, 1)
    saved = Checkpoint.open(tmp_path / "hf")
    assert saved.read("w", (0, 4_096), (4, 4_096)).equal(full[:, 4_096:])
    assert saved.bytes_read == full.nbytes // 2


class Files(dict[str, torch.Tensor]):
    """Tensors that are read by block, as a checkpoint's."""

    def read(self, name: str, offsets: Any = None, sizes: Any = None) -> torch.Tensor:
        return self[name][tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]


def test_assembly_and_its_inverse_have_elements_of_assembled_tensors() -> None:
    files = Files({name: torch.randn(4, 6) for name in "abcdef"})
    a, b, c, d, e, f = (Assembly.of(n, full.dtype, full.shape) for n, full in files.items())
    assembly = cat([stack([a, b, c], 0), stack([d, e, f], 0)], 1).transpose(0, 2)
    full = torch.cat([torch.stack([files[n] for n in names]) for names in ("abc", "def")], 1)
    full = full.transpose(0, 2)
    assert read_block(files, assembly).equal(full)
    assert read_block(files, assembly, (1, 3, 0), (4, 3, 2)).equal(full[1:5, 3:6, :2])
    assert len(assembly.within((0, 0, 1), (6, 4, 1)).parts) == 1
    expert = assembly.narrow(2, 1, 1).squeeze(2)
    assert read_block(files, expert).equal(full[:, :, 1])
    for name, parts in inverted({"full": assembly}).items():
        (part,) = parts
        apart = part.arranged(Files(full=full).read("full", part.begin, part.block_sizes))
        assert apart.equal(files[name])
    with pytest.raises(ValueError, match="dtypes differ"):
        stack([a, Assembly.of("a", torch.int8, a.shape)], 0)


def test_runs_lists_contiguous_ranges_of_block():
    assert list(runs((2, 0), (3, 5), (9, 5))) == [(10, 15)]
    assert list(runs((2, 1), (2, 3), (9, 5))) == [(11, 3), (16, 3)]
    assert list(runs((1, 0, 1), (2, 2, 1), (3, 2, 4))) == [(9, 1), (13, 1), (17, 1), (21, 1)]
    assert list(runs((), (), ())) == [(0, 1)]
    assert list(runs((0, 0), (0, 5), (9, 5))) == []
    full = torch.arange(4 * 3 * 5).view(4, 3, 5)
    for where in ((slice(1, 3), slice(0, 3), slice(0, 5)), (slice(0, 4), slice(1, 3), slice(2, 4))):
        part = full[where]
        offsets = tuple(s.start for s in where)
        found = [
            x for at, n in runs(offsets, tuple(part.shape), (4, 3, 5)) for x in range(at, at + n)
        ]
        assert found == part.reshape(-1).tolist()


def test_hf_save_with_missing_or_extra_tensor_is_not_published(tmp_path: Path):
    told = {name: (torch.float32, (4, 4)) for name in ("a", "b")}
    for own, words in (
        ([block(("a",), torch.ones(4, 4))], r"not written: \['b'\]"),
        (
            [block((n,), torch.ones(4, 4), (0, 3 if n == "b" else 4)) for n in ("a", "b")],
            r"pieces of b \(4, 4\) lack",
        ),
    ):
        writing = Writing.begin_hf(tmp_path / "hf", told)
        with pytest.raises(ValueError, match=words):
            writing.finish([write_hf_part(writing.folder, 0, own)])
        assert os.listdir(tmp_path) == []
    with pytest.raises(PlanningError, match="a is of dtype torch.complex128"):
        Writing.begin_hf(tmp_path / "hf", {"a": (torch.complex128, (4,))})
    assert os.listdir(tmp_path) == []


def test_damaged_safetensors_file_or_index_is_named_in_error(tmp_path: Path):
    write(tmp_path / "hf", {"w": torch.ones(4, 4), "v": torch.ones(4)}, 0)
    file = tmp_path / "hf" / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])

    def with_header(**changed: Any) -> bytes:
        text = json.dumps({**header, **changed}).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    for bad, words in (
        (content[:-1], "bytes, and its header states"),
        (content + b"\0", "bytes, and its header states"),
        (content[:4], "its header would have"),
        ((1 << 40).to_bytes(8, "little") + content[8:], "its header would have"),
        (content[:9] + b"\xff" + content[10:], "is not a whole safetensors file"),
        (with_header(v={**header["v"], "shape": [5]}), "header states 16 bytes for v"),
        (with_header(v={**header["v"], "data_offsets": [16, 32]}), "overlap or leave a hole"),
        (with_header(v={**header["v"], "dtype": "F4"}), "dtype F4"),
        (with_header(v=3), "is not a whole safetensors file"),
    ):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=f"model.safetensors .*{words}"):
            Checkpoint.open(tmp_path / "hf")
    file.write_bytes(content)
    (tmp_path / "hf" / "manifest.json").unlink()
    assert Checkpoint.open(tmp_path / "hf").read("v").equal(torch.ones(4))
    index = tmp_path / "hf" / "model.safetensors.index.json"
    for text, words in (
        ("{}", "is not an index"),
        ('{"weight_map": {"v": "../model.safetensors"}}', "does not lie in the checkpoint"),
        ('{"weight_map": {"u": "model.safetensors"}}', "names u in model.safetensors, which does"),
        ('{"weight_map": {"v": "model-2.safetensors"}}', "model-2.safetensors cannot be read"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(tmp_path / "hf")


def test_hf_save_on_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path / "1", state())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="No space left on device.*\nfix: make room"):
        Writing.begin_hf(tmp_path / "2", {"a": (torch.float32, (4,))})
    assert os.listdir(tmp_path) == ["1"]


def test_hf_save_writes_config_if_model_provides_one(tmp_path: Path):
    class Config:
        def to_json_file(self, path: Any) -> None:
            Path(path).write_text('{"width": 4}')

    model = nn.Linear(4, 4).bfloat16()
    for name, config, said in (
        ("a", Config(), {"architectures": ["Linear"], "dtype": "bfloat16", "width": 4}),
        ("b", {"width": 4}, None),
    ):
        model.config = config  # pyright: ignore[reportAttributeAccessIssue]
        write(tmp_path / name, {"w": torch.ones(4)}, 0, model=model)
        path = tmp_path / name / "config.json"
        assert (json.loads(path.read_text()) if path.exists() else None) == said
