"""Extension points: a rule, a reduction, a kernel, a transport and a schedule defined outside
dtensor work in process and on Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft.run.transport import TRANSPORTS
from dtensor.numerics import REDUCTIONS, Reduction, register_reduction
from dtensor.sharding.rules import registry
from tests import outsiders

Backend = Literal["inprocess", "ray"]
BACKENDS = ["inprocess", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
MESH = dt.Mesh(tp=3)


@pytest.fixture(autouse=True)
def _begins_ray(request: pytest.FixtureRequest) -> None:
    if "ray" in request.keywords:
        request.getfixturevalue("ray_session")


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the reductions and the rules for one test."""
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    for reduction in (outsiders.XOR, outsiders.ARGMAX):
        monkeypatch.setitem(REDUCTIONS, reduction.name, reduction)
    dt.rule("outsiders::parity", "n d -> d", reduce="xor")
    dt.rule("outsiders::largest", "n d, n -> d k!", reduce="argmax")


def parity(x: Tensor) -> Tensor:
    return torch.ops.outsiders.parity(x)


def by_rows(x: Tensor) -> dt.DTensor:
    return dt.distribute(x, MESH, tp=dt.Shard(0))


def integers(columns: int = 9000) -> Tensor:
    """Return more than 64 KiB for each rank, so that three members fold it in pieces."""
    return torch.randint(0, 1 << 60, (6, columns))


@pytest.mark.parametrize("backend", BACKENDS)
def test_user_defined_rule_and_reductions_give_right_values(backend: Backend, stated: None) -> None:
    x, at = integers(), torch.arange(6.0, dtype=torch.float64)
    both = dt.compile(lambda x, at: (parity(x), torch.ops.outsiders.largest(x.double(), at)), MESH)
    with dt.launch(MESH, backend=backend):
        given = by_rows(x), by_rows(at)
        plan = str(both.plan(*given))
        assert "{xor@tp}" in plan and "{argmax@tp}" in plan
        found, pairs = both(*given)
        assert torch.equal(found.full_tensor(), outsiders.parity(x))
        assert torch.equal(pairs.full_tensor(), outsiders.largest(x.double(), at))


@pytest.mark.parametrize("backend", BACKENDS)
def test_user_defined_kernel_is_used(backend: Backend, stated: None) -> None:
    x = integers(columns=4)
    fn = dt.compile(parity, MESH)
    kernel = dt.kernel("outsiders::parity", "cpu").using(outsiders.parity_of_bits)
    with kernel, dt.launch(MESH, backend=backend):
        assert torch.equal(fn(by_rows(x)).full_tensor(), outsiders.parity(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_user_defined_transport_carries_collectives(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtensor.daft.ray.transports import connect  # has those of hosts

    assert TRANSPORTS["cpu", "hosts"] is connect.connect_cpu
    where = "process" if backend == "inprocess" else "hosts"
    monkeypatch.setitem(TRANSPORTS, ("cpu", where), partial(outsiders.connect, str(tmp_path)))
    model = nn.Linear(6, 4)
    x = torch.randn(6, 6)
    fn = dt.compile(lambda x, w: (x @ w.T).relu().sum(0), MESH)
    with dt.launch(MESH, backend=backend):
        found = fn(by_rows(x), model.weight.detach()).full_tensor()
    torch.testing.assert_close(found, (x @ model.weight.T).relu().sum(0).detach())
    assert len(list(tmp_path.iterdir())) == (1 if backend == "inprocess" else 3)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("backend", BACKENDS)
def test_user_defined_schedule_trains_as_gpipe(backend: Backend) -> None:
    x = torch.randn(6, 4)
    losses: list[list[float]] = []
    for schedule in (outsiders.OneByOne(3), dt.GPipe(3)):
        torch.manual_seed(0)
        mesh, stages = dt.Mesh(pp=2), {"pp": [["first.*"], ["second.*"]]}
        model = dt.parallelize(Two(), mesh, {}, stages=stages)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dt.train_step(
            model, lambda model, x: model(x).square().mean(), optimizer, schedule=schedule
        )
        with dt.launch(mesh, backend=backend):
            losses.append([float(step(x)) for _ in range(3)])
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


# -- what they may not be --------------------------------------------------------------------------


def test_reduction_name_cannot_be_registered_twice(stated: None) -> None:
    assert register_reduction(outsiders.XOR) is outsiders.XOR
    with pytest.raises(ValueError, match="There is a reduction 'xor' already"):
        register_reduction(replace(outsiders.XOR, identity=None))
    with pytest.raises(ValueError, match="the name is a word"):
        Reduction(name="x or", fold=torch.bitwise_xor)
    with pytest.raises(dt.PlanningError, match=r'"argmax"\) needs values f64\[...,2\]; this one'):
        dt.spec("f64[4,3]{argmax@tp}", MESH)


def test_user_defined_rule_with_own_reduction_is_certified(stated: None) -> None:
    found = dt.testing.certify("outsiders::parity", integers(columns=3))
    assert found.wrong == () and found.checked > 2


class Short(outsiders.OneByOne):
    def grid(self, num_stages: int, num_ranks: int) -> outsiders.Grid:
        return outsiders.OneByOne(1).grid(num_stages, num_ranks)


def test_schedule_with_wrong_grid_size_is_refused() -> None:
    model = dt.parallelize(Two(), dt.Mesh(pp=2), {}, stages={"pp": [["first.*"], ["second.*"]]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dt.PlanningError, match=r"Short gives a grid of \(2, 2, 1\) stages"):
        dt.train_step(model, lambda model, x: model(x).sum(), optimizer, schedule=Short(3))


# -- in a script -----------------------------------------------------------------------------------

SCRIPT = """
import torch

import dtensor as dt
from dtensor import daft
from dtensor.numerics import Reduction, register_reduction


def both(total, part):
    return total & part


def all_bits(x):
    return torch.full_like(x, -1)


register_reduction(Reduction(name="both", fold=both, identity=all_bits))


@torch.library.custom_op("script::every", mutates_args=())
def every(x: torch.Tensor) -> torch.Tensor:
    total = all_bits(x[0])
    for row in x:
        total = total & row
    return total


every.register_fake(lambda x: x.new_empty(x.shape[1:]))
dt.rule("script::every", "n d -> d", reduce="both")
mesh = dt.Mesh(tp=2)
x = torch.randint(0, 1 << 60, (4, 5))

fn = dt.compile(torch.ops.script.every.default, mesh)


class Holder:
    def row(self, i):
        return x[i]


for backend in ("inprocess", "ray"):
    with daft.launch(backend):
        holders = daft.WorkerGroup(Holder, 2)
        rows = daft.all_reduce(holders.row(daft.Scatter([0, 1])), "both")
        assert all(torch.equal(row.get(), x[0] & x[1]) for row in rows)
    with dt.launch(mesh, backend=backend):
        rows = dt.distribute(x, mesh, tp=dt.Shard(0))
        assert torch.equal(fn(rows).full_tensor(), every(x))
print("equal")
"""


@pytest.mark.slow
@pytest.mark.ray
def test_reduction_defined_in_script_works_on_ray(tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(dt.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout.endswith("equal\n"), done.stderr
