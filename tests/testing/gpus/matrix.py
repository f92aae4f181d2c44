"""What runs on CUDA, on simulated GPUs under many seeds, against ranks on the CPU.

    python -m tests.testing.gpus.matrix                     # all cases, 20 seeds: `make gpus`
    python -m tests.testing.gpus.matrix --seeds 3 zero      # those whose names begin so

Each case runs in this process on CPU tensors, and under each seed with a rank or several on each
simulated GPU. A seed draws the order of kernels, and whether some run early. A line for each case
says what was seen: seeds, kernels, races, early frees, how far a number is off, waits of the host.
Built-in kernels of Triton's are left out, as its interpreter takes a second for each: the cases
whose names begin with "kernels" have them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.kernels import built_in, registry
from tests.api import test_schedules as chains
from tests.api.training import SIX, Run, adamw, batches, sgd
from tests.models import MLP, DropoutGPT

Body: TypeAlias = Callable[[str], Mapping[str, Any]]
"""Of a device; its numbers by name."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num: int
    body: Body
    tolerance: float = 2e-6
    has_kernels: bool = False


@dataclass(slots=True)
class Seen:
    seeds: int = 0
    races: int = 0
    early_frees: int = 0
    most: float = 0.0
    kernels: int = 0
    waits: dict[str, int] = field(default_factory=dict[str, int])


def backend(device: str) -> dt.daft.Backend:
    """Of a rank on each GPU."""
    return "inprocess" if device == "cpu" else "ray"


def training(
    placed: str, make: Any = sgd, *, per_gpu: int = 1, steps: int = 2, **given: Any
) -> Body:
    data = batches(steps)

    def body(device: str) -> Mapping[str, Any]:
        # AdamW makes a whole step of the rounding of a gradient that is zero: its losses alone
        run = Run.of(placed, make=make, **given)
        with dt.launch(run.mesh, backend(device), device=device, ranks_per_actor=per_gpu):
            losses = run.losses(data)
            return {"losses": losses, **({} if make is adamw else run.state()["model"])}

    return body


def in_process(device: str) -> Mapping[str, Any]:
    run = Run.of("tp2_pp2", make=sgd)
    with dt.launch(run.mesh, device=device):
        return {"losses": run.losses(batches(2)), **run.state()["model"]}


def schedule(make: Callable[[int], dt.Schedule], p: int, v: int) -> Body:
    """The first step, and one more."""

    def body(device: str) -> Mapping[str, Any]:
        mesh = dt.Mesh(pp=p)
        with dt.launch(mesh, backend(device), device=device):
            step = chains.step_of(p * v, mesh, make(2 * p))
            losses = [float(step(*chains.data(8 * p))) for _ in range(2)]
            state = dt.gather_state_dict(step.model, step.optimizer)
            return {"losses": losses, **state["model"]}

    return body


def zero(level: int) -> Body:
    def body(device: str) -> Mapping[str, Any]:
        mesh = dt.Mesh(dp=2)
        torch.manual_seed(0)
        module = MLP()
        model = dt.parallelize(module, mesh, {}, zero={"dp": level} if level else {})
        optimizer = adamw(module)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        given: dict[str, Any] = dict(inputs=dict(dp=dt.Row()), clip_grad_norm=1.0)
        step = dt.train_step(model, _square, optimizer, **given)
        with dt.launch(mesh, backend(device), device=device):
            losses = [float(step(x)) for _ in range(3)]
            return {"losses": losses, **dt.gather_state_dict(model, optimizer)["model"]}

    return body


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def bad_data(device: str) -> Mapping[str, Any]:
    """An index that is out of range undoes its step, and no other."""
    run, (good, other) = Run.of("tp2", make=sgd), batches(2)
    bad = (other[0].clone().fill_(1000), other[1])
    with dt.launch(run.mesh, backend(device), device=device):
        losses = [float(run.step(*good))]
        try:
            float(run.step(*bad))
            raise AssertionError("an index of 1000 was taken")
        except dt.daft.TaskError as error:
            assert "IndexError" in str(error) or "index" in str(error), error
        losses += [float(run.step(*good)), float(run.step(*other))]
        return {"losses": losses, **run.state()["model"]}


def saved(device: str) -> Mapping[str, Any]:
    """Saved beside steps, and loaded into another placement."""
    data = batches(4)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.of("dp2", make=sgd)
        with dt.launch(run.mesh, backend(device), device=device):
            losses = run.losses(data[:2])
            going = dt.save(f"{folder}/at", run.model, run.optimizer)
            losses += run.losses(data[2:3])
            going.get()
        run = Run.of("tp2", make=sgd)
        with dt.launch(run.mesh, backend(device), device=device):
            dt.load(f"{folder}/at", run.model, run.optimizer)
            losses += run.losses(data[2:])
            return {"losses": losses, **run.state()["model"]}


def eager(device: str) -> Mapping[str, Any]:
    mesh = dt.Mesh(tp=2)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with dt.launch(mesh, backend(device), device=device):
        rows, columns = (
            dt.distribute(x, mesh, tp=dt.Row()),
            dt.distribute(x.T, mesh, tp=dt.Column()),
        )
        whole = dt.distribute(x, mesh)
        made: dict[str, Any] = {
            "sum": rows.sum(),
            "softmax": (rows * 2).softmax(-1),
            "product": whole @ columns,
            "positive": whole.relu(),
        }
        return {name: value.full_tensor() for name, value in made.items()}


def switched(device: str) -> Mapping[str, Any]:
    """Placements change between steps of one launch."""
    run, other = Run.of("tp2", make=sgd), Run.of("dp2", make=sgd)
    data = batches(2)
    with dt.launch(dt.Mesh(tp=2), backend(device), device=device):
        losses = run.losses(data)
    with dt.launch(dt.Mesh(dp=2), backend(device), device=device):
        losses += other.losses(data)
    return {"losses": losses}


def dropout(device: str) -> Mapping[str, Any]:
    dt.manual_seed(3)
    torch.manual_seed(0)
    run = Run.of("tp2", module=DropoutGPT(), make=sgd)
    with dt.launch(run.mesh, backend(device), device=device):
        return {"losses": run.losses(batches(2)), **run.state()["model"]}


def cases() -> Iterator[Case]:
    for name, placed in SIX.items():
        num = placed.mesh.size
        yield Case(f"train {name}", num, training(name))
        yield Case(f"train {name}, AdamW", num, training(name, adamw), 1e-4)
    yield Case("train dp4", 4, training("dp4", schedule=dt.GPipe(microbatches=1)))
    yield Case("train tp4", 4, training("tp4", schedule=dt.GPipe(microbatches=1)))
    yield Case("two ranks a GPU, dp2_tp2", 2, training("dp2_tp2", per_gpu=2))
    yield Case("all ranks on a GPU, tp2_pp2", 1, training("tp2_pp2", per_gpu=4))
    yield Case("in this process, tp2_pp2", 1, in_process)
    for make, v in chains.SCHEDULES:
        schedule_name = getattr(make, "__name__", "Searched").replace("<lambda>", "Searched")
        for p in (2, 4):
            yield Case(f"schedule {schedule_name}, p={p}", p, schedule(make, p, v))
    for level in range(4):
        yield Case(f"zero {level}", 2, zero(level), 1e-4)
    yield Case("bad data", 2, bad_data)
    yield Case("checkpoint", 2, saved, 1e-4)
    yield Case("eager", 2, eager)
    yield Case("two placements", 2, switched, 1e-4)
    yield Case("dropout", 2, dropout)
    yield Case("kernels tp2", 2, training("tp2", steps=1), has_kernels=True)


@contextmanager
def without_kernels() -> Iterator[None]:
    cached: Any = registry._built_in
    with patch.object(built_in, "TRITON", {}):
        cached.cache_clear()
        try:
            yield
        finally:
            cached.cache_clear()


def difference(found: Any, expected: Any) -> float:
    """The largest, of numbers and tensors by name."""
    most = 0.0
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, right in expected.items():
        a, b = (torch.as_tensor(x).double() for x in (found[name], right))
        assert a.shape == b.shape, name
        error = (a - b).abs().max().item() if a.numel() else 0.0
        assert error == error, f"{name} is NaN"
        most = max(most, error)
    return most


def check(case: Case, seeds: Sequence[int]) -> Seen:
    """AssertionError where a number is off, and whatever a run raises."""
    seen = Seen()
    expected = case.body("cpu")
    for seed in seeds:
        early = (0.0, 0.3, 0.0, 0.9)[seed % 4]
        with dt.testing.simulated_gpus(case.num, seed, early=early) as gpus:
            found = case.body("cuda")
            report = gpus.report()
        off = difference(found, expected)
        assert off <= case.tolerance, f"{case.name}, seed {seed}: {off}"
        seen.seeds += 1
        seen.races += len(report.races)
        seen.early_frees += len(report.early_frees)
        seen.most = max(seen.most, off)
        seen.kernels += report.kernels
        seen.waits = {str(wait): times for wait, times in report.host_waits.items()}
    return seen


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="how names of cases begin")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--waits", action="store_true", help="list waits of the host, by line")
    options = parser.parse_args(given)
    bad = 0
    for case in cases():
        if options.names and not case.name.startswith(tuple(options.names)):
            continue
        began = time.process_time()
        try:
            if case.has_kernels:
                seen = check(case, range(min(2, options.seeds)))
            else:
                with without_kernels():
                    seen = check(case, range(options.seeds))
        except Exception as error:
            bad += 1
            print(f"{case.name:<32} {type(error).__name__}: {error}", flush=True)
            continue
        bad += seen.races > 0 or seen.early_frees > 0
        took = time.process_time() - began
        print(
            f"{case.name:<32} seeds {seen.seeds:>2}  kernels {seen.kernels:>7}  "
            f"races {seen.races}  early frees {seen.early_frees}  off by {seen.most:.1e}  "
            f"host waits {sum(seen.waits.values())}  {took:.0f} s",
            flush=True,
        )
        if options.waits:
            for what, times in seen.waits.items():
                print(f"    {times:>4} x {what}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
