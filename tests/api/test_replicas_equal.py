"""`dt.check_replicas`: copies of a value on several ranks are bitwise equal, or the error names the
value and the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.runtime.transfer.digests import digests
from tests.testing.gpus.matrix import without_kernels
from tests.testing.gpus.needed import skip_without_compiler
from tests.training import Run, batches, sgd

skip_without_compiler()


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    with without_kernels():
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(steps: int = 2) -> Run:
    run = Run.of("tp2", make=sgd)
    for each in batches(steps):
        float(run.step(*each))
    return run


def on_gpus(**given: Any) -> Any:
    return dt.testing.simulated_gpus(2, 1, **given)


def launched() -> Any:
    return dt.launch(dt.Mesh(tp=2), "ray", device="cuda")


@pytest.mark.slow
def test_check_replicas_names_values_that_differ_between_ranks(tmp_path: Path) -> None:
    with on_gpus(varies=True), launched():
        run = trained()
        with pytest.raises(dt.ReplicasDiffer) as caught:
            dt.check_replicas(run.model, run.optimizer)
        text = str(caught.value)
        assert "positions.weight" in caught.value.names
        assert "momentum_buffer of positions.weight" in caught.value.names
        assert "  positions.weight: rank 0 and rank 1 differ in " in text
        assert " elements, by up to 1" in text and "use_deterministic_algorithms" in text
        assert not any("qkv.weight" in name for name in caught.value.names)  # it is split
        with pytest.warns(RuntimeWarning, match=r"positions.weight: ranks 0, 1"):
            dt.gather_state_dict(run.model, run.optimizer)
        with pytest.warns(RuntimeWarning, match=r"positions.weight: ranks 0, 1"):
            dt.save(tmp_path / "1", run.model, run.optimizer).get()
        dt.load(tmp_path / "1", run.model, run.optimizer)  # as the fix says
        assert dt.check_replicas(run.model, run.optimizer) > 10


@pytest.mark.slow
def test_deterministic_kernels_keep_replicas_equal(deterministic: None, tmp_path: Path) -> None:
    with on_gpus(varies=True) as gpus, launched(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = trained()
        num = dt.check_replicas(run.model, run.optimizer)
        assert num > dt.check_replicas(run.model) > 10
        dt.save(tmp_path / "1", run.model, run.optimizer).get()
        dt.gather_state_dict(run.model, run.optimizer)
        assert not gpus.report().races


@pytest.mark.parametrize("name", ["tp2_pp2", "dp2"])
def test_cpu_training_keeps_replicas_equal(name: str) -> None:
    run = Run.of(name, make=sgd)
    with pytest.raises(dt.PlanningError, match="no rank holds a value"):
        dt.check_replicas(run.model)
    with dt.launch(run.mesh):
        float(run.step(*batches(1)[0]))
        assert dt.check_replicas(run.model, run.optimizer) > 10


def test_check_replicas_finds_changed_copy_with_ranks_and_elements() -> None:
    run = Run.of("tp2", make=sgd)
    with dt.launch(run.mesh) as _:
        float(run.step(*batches(1)[0]))
        from dtensor.api.store.session import existing_session

        session = existing_session(run.mesh)
        assert session is not None
        stored = session.model_home(run.model).owner.stored["norm.weight"]
        value = session.cluster.get([(stored.label,), ()]).get()[0][0]
        value[3] = float("nan")
        session.cluster.put([{stored.label: value}, {}])
        with pytest.raises(
            dt.ReplicasDiffer, match=r"norm.weight: rank 0 and rank 1 differ in 1 of 16 .*nan"
        ):
            dt.check_replicas(run.model)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128],
)
def test_digest_depends_on_each_bit_and_position(dtype: torch.dtype) -> None:
    x = torch.arange(24).remainder(2 if dtype == torch.bool else 24).to(dtype).reshape(4, 6)
    before = digests(x, x.T, x[:0])[0]
    assert before.shape == (3, 2) and before[2].tolist() == [0, 0]
    assert torch.equal(before, digests(x.clone(), x.T.contiguous(), x[:0])[0])
    assert before[0].tolist() != before[1].tolist()  # the same words elsewhere
    for at in range(24):
        for bit in range(8 if dtype != torch.bool else 1):
            other = x.clone()
            other.view(torch.uint8).reshape(-1)[at * x.itemsize] ^= 1 << bit
            assert digests(other)[0].tolist() != before[:1].tolist()


def test_digest_computed_in_parts_equals_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtensor.runtime.transfer import digests as module

    x = torch.randn(1000)
    whole = digests(x)[0]
    monkeypatch.setattr(module, "_WORDS_AT_ONCE", 7)
    assert torch.equal(digests(x)[0], whole)
