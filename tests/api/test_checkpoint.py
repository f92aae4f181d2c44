"""Checkpoints: state saved under one placement loads bitwise equal under any other, a resumed run
equals an uninterrupted one, and a failed save or load changes nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.checkpoint.async_save import Saved, WriterLost
from dtensor.api.store.session import session_for
from dtensor.runtime.checkpoint import Checkpoint, CheckpointError, saving
from dtensor.sharding.spec.stored import StoredTensor
from tests.api import tied
from tests.api.tied import batch, loss_fn
from tests.extras import missing
from tests.training import assert_same_bits


class Net(tied.Net):
    """A model with dropout and a buffer that forward changes."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied, dropout=0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(tokens)


TP: dict[str, Any] = {
    "*.up.weight": dict(tp=dt.Row()),
    "*.up.bias": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
}
STAGES = {"pp": [["embed*", "blocks.0.*", "seen"], ["blocks.1.*", "head*"]]}
PLACES: dict[str, tuple[dt.Mesh, dict[str, Any]]] = {
    "one": (dt.Mesh(), {}),
    "tp2": (dt.Mesh(tp=2), {"placements": TP}),
    "dp2, ZeRO-3": (dt.Mesh(dp=2), {"zero": {"dp": 3}}),
    "pp2": (dt.Mesh(pp=2), {"stages": STAGES}),
    "pp2 tp2": (dt.Mesh(pp=2, tp=2), {"stages": STAGES, "placements": TP}),
    "tp3, uneven": (dt.Mesh(tp=3), {"placements": TP}),
    "tp2, sizes": (dt.Mesh(tp=2), {"placements": {**TP, "*.up.*": dict(tp=dt.Row(sizes=(0, 22)))}}),
}


class Run:
    """A model, its optimizer and its step under a placement."""

    def __init__(self, place: str, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.mesh, stated = PLACES[place]
        self.module = Net()
        self.model = dt.parallelize(self.module, self.mesh, **stated)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-2)
        self.step = dt.train_step(self.model, loss_fn, self.optimizer, **options)

    def state(self) -> dict[str, Any]:
        return dt.gather_state_dict(self.model, self.optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any], float]]:
    """By placement: a checkpoint after two steps, the state at that time, and the next loss."""
    found: dict[str, tuple[str, dict[str, Any], float]] = {}
    for place in PLACES:
        dt.manual_seed(11)
        run = Run(place)
        path = str(tmp_path_factory.mktemp("ckpt") / "2")
        with dt.launch(run.mesh):
            run.step(*batch(0))
            run.step(*batch(1))
            future = dt.save(path, run.model, run.optimizer)
            state = run.state()
            found[place] = future.get(), state, float(run.step(*batch(2)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_checkpoint_of_any_placement_loads_bitwise_equal_under_any_other(
    place: str, saved: dict[str, tuple[str, dict[str, Any], float]]
) -> None:
    run = Run(place, seed=5)
    with dt.launch(run.mesh):
        for source, (path, state, next_loss) in saved.items():
            dt.manual_seed(0)  # and the checkpoint's again
            dt.load_state_dict(run.model, run.optimizer, state)
            dt.manual_seed(11)
            run.model.steps.restore(2)
            expected = float(run.step(*batch(2)))
            after = run.state()
            dt.manual_seed(0)
            loaded = dt.load(path, run.model, run.optimizer)
            assert loaded.step == 2
            assert_same_bits(run.state(), state, source)
            assert float(run.step(*batch(2))) == expected, source
            assert_same_bits(run.state(), after, source)
            assert expected == pytest.approx(next_loss, rel=1e-5)
            if source == place:
                assert expected == next_loss


# -- a run that goes on ----------------------------------------------------------------------------


@pytest.mark.default("pp2")
@pytest.mark.parametrize("place", ["pp2", "dp2, ZeRO-3"])
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(place: str, tmp_path: Path) -> None:
    options = dict(clip_grad_norm=0.5, schedule=dt.OneFOneB(microbatches=2))

    def make(seed: int) -> tuple[Run, Any, Any]:
        run = Run(place, seed, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, T_max=7)
        noise = dt.compile(lambda x: F.dropout(x, 0.5), run.mesh)
        return run, scheduler, noise

    def steps(run: Run, scheduler: Any, noise: Any, numbers: range) -> list[Any]:
        found: list[Any] = []
        for i in numbers:
            found += [float(run.step(*batch(i))), noise(torch.ones(8)).full_tensor()]
            scheduler.step()
        return found

    dt.manual_seed(3)
    run, scheduler, noise = make(0)
    with dt.launch(run.mesh):
        steps(run, scheduler, noise, range(3))
        extra = {"scheduler": scheduler.state_dict(), "next": 3}
        dt.save(tmp_path / "3", run.model, run.optimizer, step=3, extra=extra)
        expected = steps(run, scheduler, noise, range(3, 6))
    state, options_then = run.module.state_dict(), run.optimizer.state_dict()

    del noise
    dt.manual_seed(99)
    run, scheduler, noise = make(1)
    with dt.launch(run.mesh):
        found = dt.resume(tmp_path, run.model, run.optimizer)
        assert found is not None and (found.step, found.extra) == (3, extra)
        scheduler.load_state_dict(found.extra["scheduler"])
        assert_same_bits(steps(run, scheduler, noise, range(found.extra["next"], 6)), expected)
    assert_same_bits(run.module.state_dict(), state)
    assert_same_bits(run.optimizer.state_dict(), options_then)


def test_save_contains_earlier_steps_and_no_later_steps(
    tmp_path: Path,
) -> None:
    run = Run("tp2")
    with dt.launch(run.mesh):
        run.step(*batch(0))
        future = dt.save(tmp_path / "1", run.model, run.optimizer)
        run.step(*batch(1))
        run.step(*batch(2))
        assert future.get() == str(tmp_path / "1") and future.done()
        after = run.state()
        dt.load(tmp_path / "1", run.model, run.optimizer)
        run.step(*batch(1))
        run.step(*batch(2))
        assert_same_bits(run.state(), after)


def test_weights_written_by_user_are_saved_and_loaded_weights_are_readable(tmp_path: Path) -> None:
    run = Run("tp2")
    with dt.launch(run.mesh):
        run.step(*batch(0))
        with torch.no_grad():
            run.module.embed.weight.fill_(0.25)
        dt.save(tmp_path / "1", run.model).get()
        run.step(*batch(1))
        dt.load(tmp_path / "1", run.model)
        assert bool((run.module.embed.weight == 0.25).all())
    assert bool((run.module.head.weight == 0.25).all())


def test_save_load_and_resume_work_outside_launch(tmp_path: Path) -> None:
    run, other = Run("tp2"), Run("pp2", seed=1)
    dt.save(tmp_path / "0", run.model, run.optimizer, step=7).get()
    dt.load(tmp_path / "0", other.model, other.optimizer)
    assert_same_bits(other.module.state_dict(), run.module.state_dict())
    run.step(*batch(0))  # in the implicit launch
    dt.save(tmp_path / "1", run.model, run.optimizer).get()
    loaded = dt.resume(tmp_path, other.model, other.optimizer)
    assert loaded == dt.Loaded(1, None, str(tmp_path / "1"))
    assert_same_bits(other.state(), run.state())
    assert dt.resume(tmp_path) == loaded
    assert dt.resume(tmp_path / "none") is None


def test_load_into_meta_device_model_restores_saved_state(tmp_path: Path) -> None:
    run = Run("tp2")
    dt.save(tmp_path / "0", run.model).get()
    dt.manual_seed(2)
    expected = float(run.step(*batch(0)))
    mesh, stated = PLACES["dp2, ZeRO-3"]
    for inside in (False, True):
        with torch.device("meta"):
            module = Net()
        model = dt.parallelize(module, mesh, **stated)
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-2)
        step = dt.train_step(model, loss_fn, optimizer)
        if not inside:
            dt.load(tmp_path / "0", model, dtype="saved")
        dt.manual_seed(2)
        with dt.launch(mesh, bring_home=False):
            if inside:
                dt.load(tmp_path / "0", model)
            dt.manual_seed(2)
            assert float(step(*batch(0))) == pytest.approx(expected, rel=1e-6)
            dt.save(tmp_path / f"1 {inside}", model, optimizer).get()
            state = dt.gather_state_dict(model)["model"]
        dt.load(tmp_path / f"1 {inside}", model, optimizer)  # what the launch has lost
        with dt.launch(mesh, bring_home=False):
            step(*batch(1))
            dt.load(tmp_path / f"1 {inside}", model, optimizer)
            assert_same_bits(dt.gather_state_dict(model)["model"], state)


# -- what is in the files --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_dtensor_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run = Run("pp2 tp2")
    with dt.launch(run.mesh):
        run.step(*batch(0))
        dt.save(tmp_path / "1", run.model, run.optimizer, step=1, extra={"a": 1}).get()
    plain = run.module.state_dict()
    held = {"model": {name: torch.zeros_like(value) for name, value in plain.items()}}
    dcp.load(held, checkpoint_id=tmp_path / "1", no_dist=True)
    assert_same_bits(dict(held["model"]), dict(plain))
    dcp_to_torch_save(tmp_path / "1", tmp_path / "1.pt")
    found = torch.load(tmp_path / "1.pt", weights_only=True)
    assert_same_bits(found["model"], dict(plain))
    names = {id(p): name for name, p in run.module.named_parameters()}
    state = {names[id(p)]: entries for p, entries in run.optimizer.state.items()}
    assert_same_bits(found["optimizer"]["state"], state)
    assert found["optimizer"]["param_groups"][0]["lr"] == 3e-2
    assert (found["step"], found["extra"]) == (1, {"a": 1})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_load_reads_checkpoint_written_by_torch_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    loss_fn(module, *batch(0)).backward()
    optimizer.step()
    names = {id(p): name for name, p in module.named_parameters()}
    state = {names[id(p)]: entries for p, entries in optimizer.state.items()}
    groups = optimizer.state_dict()["param_groups"]
    groups[0]["params"] = list(names.values())
    theirs = {"state": state, "param_groups": groups}
    whole = {"model": module.state_dict(), "optimizer": theirs}
    dcp.save(whole, checkpoint_id=tmp_path / "theirs", no_dist=True)
    dcp.save(module.state_dict(), checkpoint_id=tmp_path / "flat", no_dist=True)
    each = [f"param_groups.{name}.{key}" for name in names.values() for key in groups[0]]
    options = {n: groups[0][n.rpartition(".")[2]] for n in each if not n.endswith(".params")}
    entries = {f"state.{n}.{k}": v for n, own in state.items() for k, v in own.items()}
    flattened = {"model": module.state_dict(), "optimizer": entries | options}
    dcp.save(flattened, checkpoint_id=tmp_path / "flattened", no_dist=True)
    run = Run("tp3, uneven", seed=4)
    with dt.launch(run.mesh):
        dt.load(tmp_path / "flat", run.model)
        assert_same_bits(dict(run.module.state_dict()), dict(module.state_dict()))
        for name in ("theirs", "flattened"):
            run.step(*batch(0))
            loaded = dt.load(tmp_path / name, run.model, run.optimizer)
            assert (loaded.step, loaded.extra) == (None, None)
            assert_same_bits(dict(run.module.state_dict()), dict(module.state_dict()))
            held = run.optimizer.state_dict()
            assert_same_bits(held["state"], optimizer.state_dict()["state"])
            assert held["param_groups"][0]["lr"] == 1e-3


@pytest.mark.default("one")
@pytest.mark.parametrize("place", PLACES)
def test_save_writes_each_element_once_and_ranks_read_only_their_shards(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(place)
    read: dict[str, int] = {}
    whole_read = Checkpoint.read

    def counted(checkpoint: Checkpoint, name: str, *where: Any) -> Tensor:
        value = whole_read(checkpoint, name, *where)
        read[name] = read.get(name, 0) + value.nbytes
        return value

    with dt.launch(run.mesh):
        run.step(*batch(0))
        dt.save(tmp_path / "1", run.model).get()
        monkeypatch.setattr(Checkpoint, "read", counted)
        dt.load(tmp_path / "1", run.model)
        model_home = session_for(run.mesh).model_home(run.model)
        for label, own in model_home.stored.items():
            shards = (own.spec.local_nbytes(run.mesh.coordinates(r)) for r in own.at)
            assert read[f"model.{label}"] == sum(shards)
    checkpoint = Checkpoint.open(tmp_path / "1")
    unique = {id(t): t for t in run.module.state_dict(keep_vars=True).values()}.values()
    places = {(p.file, p.data_at) for t in checkpoint.tensors.values() for p in t.pieces}
    stored = [p for t in checkpoint.tensors.values() for p in t.pieces]
    assert sum({(p.file, p.data_at): p.nbytes for p in stored}.values()) == sum(
        t.nbytes for t in unique
    )
    ours = sum(n for file, n in checkpoint.files.items() if not file.startswith("__values"))
    assert ours < sum(t.nbytes for t in unique) + 1700 * len(places)  # what torch.save puts around


def test_replicas_divide_elements_to_write_evenly() -> None:
    spec = dt.spec("f32[1024,1024]", dt.Mesh(dp=4))
    small = dt.spec("f32[64]", dt.Mesh(dp=4))
    values = {("w",): StoredTensor.of("w", spec, range(4), range(4))} | {
        (f"b{i}",): StoredTensor.of(f"b{i}", small, range(4), range(4)) for i in range(8)
    }
    own = saving.shares(values, 4)
    assert [sum(torch.Size(share.sizes).numel() for share in mine) for mine in own] == [
        256 * 1024 + 128
    ] * 4


def test_repeated_saves_hard_link_unchanged_files_and_keep_newest(tmp_path: Path) -> None:
    run = Run("tp2")
    with dt.launch(run.mesh):
        run.step(*batch(0))
        dt.save(tmp_path / "export 1", run.model, format="hf", keep=1)
        for i in range(4):
            dt.save(tmp_path / str(i), run.model, run.optimizer, keep=2)
        dt.save(tmp_path / "export 2", run.model, format="hf", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "export 2"]
    assert dt.resume(tmp_path, run.model, run.optimizer) == dt.Loaded(1, None, f"{tmp_path}/3")
    linked = [p for p in (tmp_path / "3").glob("__[0-9]*.distcp") if p.stat().st_nlink == 2]
    assert len(linked) == len(list((tmp_path / "3").glob("__[0-9]*.distcp"))) > 0


def config(**changed: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason=missing("transformers"))
    sizes = dict(vocab_size=37, hidden_size=16, intermediate_size=22, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.LlamaConfig(**sizes, **heads, **changed)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_and_dtensor_read_each_others_checkpoints(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=missing("transformers"))
    module = transformers.LlamaForCausalLM(config(tie_word_embeddings=tied))
    mesh = dt.Mesh(tp=2)
    tokens = torch.arange(12).view(2, 6)
    placements = dt.placements.for_model(module, (tokens,))
    model = dt.parallelize(module, mesh, placements)
    logits = dt.compile(lambda model, tokens: model(tokens).logits, mesh)
    with dt.launch(mesh):
        expected = logits(model, tokens).full_tensor()
        dt.save(tmp_path / "hf", model, format="hf", extra={"epoch": 2}).get()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same_bits(dict(theirs.state_dict()), dict(module.state_dict()))
    theirs.save_pretrained(tmp_path / "theirs")

    for name, extra in (("theirs", None), ("hf", {"epoch": 2})):
        other = transformers.LlamaForCausalLM(config(tie_word_embeddings=tied))
        again = dt.parallelize(other, mesh, placements)
        with dt.launch(mesh):
            assert dt.load(tmp_path / name, again).extra == extra
            assert torch.equal(logits(again, tokens).full_tensor(), expected)

    narrow = dt.parallelize(
        transformers.LlamaForCausalLM(config(tie_word_embeddings=tied)).to(torch.bfloat16), mesh
    )
    with pytest.raises(dt.PlanningError, match=r"(?s)other dtypes.*f32.*bf16.*dtype=\"model\""):
        dt.load(tmp_path / "theirs", narrow)
    with dt.launch(mesh):
        dt.load(tmp_path / "theirs", narrow, dtype="model")
    for key, value in module.state_dict().items():
        assert torch.equal(narrow.module.state_dict()[key], value.to(torch.bfloat16))
    bare = dt.parallelize(transformers.LlamaModel(config(tie_word_embeddings=tied)), mesh)
    before = {key: value.clone() for key, value in bare.module.state_dict().items()}
    with pytest.raises(dt.PlanningError, match=r'begin with "model\."'):
        dt.load(tmp_path / "theirs", bare)
    assert_same_bits(dict(bare.module.state_dict()), before)


# -- what fails ------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """When set, writes of the second rank fail as on a full disk."""
    ready, write = threading.Event(), saving.write_part

    def write_part(folder: str, rank: int, *rest: Any) -> Any:
        if rank == 1:
            assert ready.wait(600)
            raise CheckpointError("no space left on the device")
        return write(folder, rank, *rest)

    monkeypatch.setattr(saving, "write_part", write_part)
    yield ready
    ready.set()


def test_failed_write_names_rank_and_leaves_older_checkpoints_intact(
    failing: threading.Event, tmp_path: Path
) -> None:
    run = Run("tp2")
    said = r"rank 1 could not write.*no space left"
    with pytest.raises(CheckpointError, match=said), dt.launch(run.mesh):
        run.step(*batch(0))
        future = dt.save(tmp_path / "1", run.model, run.optimizer)
        with pytest.raises(TimeoutError):
            future.get(timeout=0.01)
        assert not future.done()
        failing.set()
        for _ in range(2):
            with pytest.raises(CheckpointError, match=said):
                future.get()
        assert future.done()
        dt.save(tmp_path / "2", run.model, run.optimizer)
        with pytest.raises(CheckpointError, match=said):  # the next one raises what nobody read
            dt.save(tmp_path / "3", run.model, run.optimizer)
        dt.save(tmp_path / "4", run.model, run.optimizer)  # as the launch does that ends
    assert os.listdir(tmp_path) == []
    failing.set()
    with pytest.raises(ZeroDivisionError) as caught, dt.launch(run.mesh):
        run.step(*batch(0))
        future = dt.save(tmp_path / "5", run.model, run.optimizer)
        raise ZeroDivisionError
    assert any(f"the save to {tmp_path}/5" in note for note in caught.value.__notes__)
    with pytest.raises(CheckpointError, match=said):  # else the end of the process says it
        future.get()


def test_save_and_load_wait_for_pending_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, write = Run("one"), saving.write_part
    order: list[str] = []

    def slow(folder: str, *rest: Any) -> Any:
        order.append(f"begin {Path(folder).name.split('-')[1]}")
        threading.Event().wait(0.05)
        made = write(folder, *rest)
        order.append(f"end {Path(folder).name.split('-')[1]}")
        return made

    monkeypatch.setattr(saving, "write_part", slow)
    with dt.launch(run.mesh):
        run.step(*batch(0))
        dt.save(tmp_path / "1", run.model)
        dt.save(tmp_path / "2", run.model)
        assert dt.load(tmp_path / "2", run.model).step == 1
        run.step(*batch(1))
    assert order == ["begin 1", "end 1", "begin 2", "end 2"]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.mark.default("one")
@pytest.mark.parametrize("place", ["tp2", "one"])
def test_damaged_file_fails_load_and_changes_no_state(place: str, tmp_path: Path) -> None:
    run = Run(place)
    with dt.launch(run.mesh):
        run.step(*batch(0))
        dt.save(tmp_path / "1", run.model, run.optimizer).get()
        run.step(*batch(1))
        before = run.state()
        file = next(iter(sorted((tmp_path / "1").glob("__0_*.distcp"))))
        record = Checkpoint.open(tmp_path / "1").tensors["model.blocks.1.up.weight"].pieces[-1]
        file = tmp_path / "1" / record.file
        content = bytearray(file.read_bytes())
        content[record.data_at] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises((CheckpointError, dt.daft.DaftError), match="checksum"):
            dt.load(tmp_path / "1", run.model, run.optimizer)
        assert_same_bits(run.state(), before)
    with pytest.raises(CheckpointError, match="checksum"):
        dt.load(tmp_path / "1", run.model, run.optimizer)
    assert_same_bits(run.state(), before)


def wrong(run: Run, path: Path) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return mistakes of users with their expected errors."""
    model, optimizer, there = run.model, run.optimizer, str(path / "1")
    untied = dt.parallelize(Net(tied=False), dt.Mesh())
    wide = dt.parallelize(nn.Linear(3, 4), dt.Mesh())
    taller = dt.parallelize(nn.Linear(3, 5), dt.Mesh())
    dt.save(path / "wide", wide).get()
    dt.save(path / "untied", untied).get()
    groups = [list(run.module.blocks.parameters()), [run.module.embed.weight]]
    grouped = torch.optim.AdamW([{"params": own} for own in groups])
    sgd = torch.optim.SGD(run.module.parameters(), lr=0.1)
    return {
        "there already": (lambda: dt.save(there, model), r"exists already.*fix: save to another"),
        "swapped": (
            lambda: dt.save(model, there),
            r'the path is .*not a path.*dt\.save\("ckpt/100"',
        ),  # type: ignore[arg-type]
        "not parallelized": (lambda: dt.save(path / "x", run.module), r"dt\.parallelize"),  # type: ignore[arg-type]
        "keep": (lambda: dt.save(path / "x", model, keep=0), r"keep=0 is not a whole number.*1"),
        "step": (lambda: dt.save(path / "x", model, step=-1), r"step=-1"),
        "format": (
            lambda: dt.save(path / "x", model, format="safetensors"),
            r"format='safetensors'.*\"hf\", safetensors",
        ),
        "extra": (lambda: dt.save(path / "x", model, extra={"f": print}), r"extra\['f'\]"),
        "hf with state": (
            lambda: dt.save(path / "x", model, optimizer, format="hf"),
            r"no place for an optimizer",
        ),
        "no such path": (lambda: dt.load(path / "none", model), r"does not exist"),
        "a folder of them": (lambda: dt.load(path, model), r"holds checkpoints.*dt\.load"),
        "no optimizer in it": (
            lambda: dt.load(path / "wide", wide, torch.optim.SGD(wide.parameters())),
            r"no state of an optimizer",
        ),
        "other shapes": (
            lambda: dt.load(path / "wide", taller),
            r"other shapes.*weight: f32\[4,3\] in the checkpoint, f32\[5,3\] in the model",
        ),
        "other names": (
            lambda: dt.load(path / "wide", model),
            r"only in the model: .*only in the checkpoint: bias, weight",
        ),
        "another optimizer": (lambda: dt.load(there, model, sgd), r"state of AdamW.*this is SGD"),
        "other groups": (lambda: dt.load(there, model, grouped), r"groups: 1 in the .*2 here"),
        "dtype": (lambda: dt.load(there, model, dtype="bf16"), r'"saved" or "model"'),
        "a tie": (lambda: dt.load(path / "untied", model), r"one tensor in the model"),
        "a file": (lambda: dt.resume(path / "file", model), r"is a file"),
    }


def test_checkpoint_mistakes_raise_at_once_and_change_nothing(tmp_path: Path) -> None:
    run = Run("tp2")
    dt.save(tmp_path / "1", run.model, run.optimizer).get()
    (tmp_path / "file").touch()
    cases = wrong(run, tmp_path)
    with dt.launch(run.mesh):
        run.step(*batch(0))
        before = run.state()
        for case, (call, said) in cases.items():
            with pytest.raises(dt.PlanningError, match=f"(?s){said}"):
                call()
            assert_same_bits(run.state(), before, case)
    assert sorted(os.listdir(tmp_path)) == ["1", "file", "untied", "wide"]


def test_settle_ignores_lost_writer_but_get_raises():
    def lost() -> None:
        raise WriterLost("rank 1 could not write its part of ckpt/9: the process ... is gone")

    def full() -> None:
        raise CheckpointError("rank 1 could not write its part of ckpt/9: No space left")

    saved = Saved("ckpt/9", lost)
    with pytest.warns(RuntimeWarning, match="rank 1 .* is gone\nckpt/9 was not written"):
        saved.settle()
    saved.settle()  # it was said
    with pytest.raises(WriterLost):
        saved.get()
    with pytest.raises(CheckpointError, match="No space left"):
        Saved("ckpt/9", full).settle()


def test_truncated_optimizer_file_fails_load_before_parameters_change(tmp_path: Path):
    """In a launch, optimizer state is read later than the parameters, so the load must check the
    file first."""
    mesh, torn = dt.Mesh(dp=2), tmp_path / "9"
    net = nn.Linear(4, 4)
    model, opt = dt.parallelize(net, mesh, {}), torch.optim.Adam(net.parameters())
    step = dt.train_step(model, lambda m, x: m(x).square().sum(), opt, inputs=dict(dp=dt.Row()))
    with dt.launch(mesh):
        float(step(torch.ones(2, 4)))
        dt.save(torn, model, opt).get()
        before = float(step(torch.ones(2, 4)))
        weight = net.weight.detach().clone()
        for file in torn.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="bytes, and .* were written"):
            dt.load(torn, model, opt)
        assert torch.equal(net.weight, weight)
        assert float(step(torch.ones(2, 4))) < before
