"""Tests the optimizer of one rank: the bits do not depend on how tensors are cut, and the numbers
are torch's.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.runtime.optimizer.flat_buffers import SMALL
from dtensor.runtime.optimizer.shard_optimizer import (
    ELEMENTWISE,
    FUSED,
    MASTER,
    ShardOptimizer,
    Updated,
    absent,
    has_kernel,
    hyperparameters,
    is_absent,
    keys_of,
)
from tests.training import assert_same_bits

O = torch.optim  # noqa: E741
BF16 = torch.bfloat16
VARIANTS: dict[str, tuple[type[O.Optimizer], dict[str, Any]]] = {
    "sgd": (O.SGD, dict(lr=0.1)),
    "momentum": (O.SGD, dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)),
    "nesterov": (O.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True)),
    "adam": (O.Adam, dict(lr=0.01, weight_decay=0.1)),
    "adamw": (O.AdamW, dict(lr=0.01)),
    "amsgrad": (O.AdamW, dict(lr=0.01, amsgrad=True, maximize=True)),
    "tensor_lr": (O.AdamW, dict(lr=torch.tensor(0.01))),
    "nadam": (O.NAdam, dict(weight_decay=0.1)),
    "radam": (O.RAdam, dict(lr=0.01)),
    "adamax": (O.Adamax, dict(weight_decay=0.1)),
    "adagrad": (O.Adagrad, dict(lr_decay=0.1, weight_decay=0.1)),
    "adadelta": (O.Adadelta, dict(lr=0.5, weight_decay=0.1)),
    "rmsprop": (O.RMSprop, dict(momentum=0.9, centered=True, weight_decay=0.1)),
    "rprop": (O.Rprop, {}),
    "asgd": (O.ASGD, dict(t0=2, weight_decay=0.1)),
}
SIZES = {"scalar": (), "seven": (7,), "rows": (37, 3), "none": (0, 4), "large": (SMALL + 5,)}


def values(seed: int, shapes: Mapping[str, tuple[int, ...]] = SIZES) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def options_of(kind: type[O.Optimizer], given: Mapping[str, Any]) -> tuple:
    return hyperparameters(kind([torch.zeros(1)], **given))  # type: ignore[call-arg]


def by_torch(
    kind: type[O.Optimizer],
    given: Mapping[str, Any],
    start: Mapping[str, Tensor],
    gradients: Sequence[Mapping[str, Tensor]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    held = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = kind(list(held.values()), **given)  # type: ignore[call-arg]
    for step in gradients:
        for name, parameter in held.items():
            parameter.grad = step[name].clone() if name in step else None
        optimizer.step()
    state = {name: dict(optimizer.state[parameter]) for name, parameter in held.items()}
    return {name: parameter.detach() for name, parameter in held.items()}, state


class Rank:
    """The optimizer of one rank and the values of its table."""

    def __init__(
        self,
        kind: type[O.Optimizer],
        groups: Sequence[Sequence[str]],
        state: Mapping[str, Mapping[str, Any]] | None = None,
        masters: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.own, self.device = ShardOptimizer(kind, masters), device
        self.groups = tuple(map(tuple, groups))
        self.table = {(n, k): v for n, entry in (state or {}).items() for k, v in entry.items()}

    def step(
        self,
        shards: Mapping[str, Tensor],
        options: Sequence[Mapping[str, Any]],
        gradients: Mapping[str, Tensor],
        clip: Tensor | None = None,
        **more: Any,
    ) -> None:
        names: list[tuple[str, str]] = []
        for group, given in zip(self.groups, options, strict=True):
            for name in (n for n in group if n in gradients):
                narrow = self.own.masters and shards[name].dtype == BF16
                keys = (*keys_of(self.own.kind, given), *([MASTER] if narrow else []))
                names += [(name, key) for key in keys]
        for which in names:
            self.table.setdefault(which, absent(self.device))
        values = tuple(map(self.table.__getitem__, names))
        what = Updated(self.groups, tuple(gradients), tuple(names))
        self.own.step(what, shards, options, gradients, values, clip, **more)

    def export(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {n: {} for group in self.groups for n in group}
        for (name, key), value in self.table.items():
            if not is_absent(value):
                found[name][key] = value.clone()
        return found


def run(
    optimizer: Rank,
    shards: dict[str, Tensor],
    options: Sequence[Mapping[str, Any]],
    gradients: Sequence[Mapping[str, Tensor]],
    **more: Any,
) -> dict[str, Tensor]:
    for step in gradients:
        given = {name: gradient.clone() for name, gradient in step.items()}
        optimizer.step({name: shards[name] for name in step}, options, given, **more)
    return shards


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow), BF16], ids=str
)
def test_update_bits_do_not_depend_on_cuts_and_match_torch(
    variant: str, dtype: torch.dtype
) -> None:
    """Compares whole tensors with pieces of 37 and 7 elements, and the state with torch's."""
    kind, given = VARIANTS[variant]
    start = {name: value.to(dtype) for name, value in values(0).items()}
    gradients = [{n: g.to(dtype) for n, g in values(1 + i).items()} for i in range(4)]
    options = options_of(kind, given)
    whole = Rank(kind, (tuple(start),))
    found = run(whole, copy.deepcopy(start), options, gradients)
    for cut in (37, 7):

        def pieces(tensors: Mapping[str, Tensor], cut: int = cut) -> dict[str, Tensor]:
            return {
                f"{name} {i}": piece.clone()
                for name, value in tensors.items()
                for i, piece in enumerate(value.reshape(-1).split(cut))
            }

        shards = pieces(start)
        optimizer = Rank(kind, (tuple(shards),))
        run(optimizer, shards, options, [pieces(step) for step in gradients])
        state = optimizer.export()
        for name, value in found.items():
            own = [n for n in shards if n.startswith(f"{name} ")]
            assert_same_bits(torch.cat([shards[n] for n in own]).view_as(value), value, name)
            for key, entry in whole.export()[name].items():
                parts = [state[n][key] for n in own]
                if entry.shape == value.shape != ():
                    assert_same_bits(torch.cat(parts).view_as(value), entry, f"{name} {key}")
    if dtype != BF16:  # the fused kernels round 16 bits less often
        expected, entries = by_torch(kind, given, start, gradients)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
        exported = whole.export()
        for name, entry in entries.items():
            assert exported[name].keys() == entry.keys()
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    assert exported[name][key].dtype == value.dtype
                    torch.testing.assert_close(exported[name][key], value, rtol=1e-5, atol=1e-5)


def test_this_file_tests_every_elementwise_optimizer() -> None:
    assert {kind for kind, _ in VARIANTS.values()} == ELEMENTWISE.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_foreach_false_gives_bits_of_torch_loop(variant: str) -> None:
    kind, given = VARIANTS[variant]
    given = {**given, "foreach": False}
    start, gradients = values(0), [values(1), values(2)]
    optimizer = Rank(kind, (tuple(start),))
    found = run(optimizer, copy.deepcopy(start), options_of(kind, given), gradients)
    assert_same_bits(found, by_torch(kind, given, start, gradients)[0])
    assert optimizer.own.optimizer is not None
    assert not any(group.get("fused") for group in optimizer.own.optimizer.param_groups)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_without_gradient_is_not_updated(variant: str) -> None:
    """Neither its value (in spite of weight decay) nor its step count changes, as in torch."""
    kind, given = VARIANTS[variant]
    shapes = {f"p{i}": (5 + i,) for i in range(5)}
    start = values(0, shapes)
    present = ("13", "01234", "12", "01234", "23", "04", "01234")
    gradients = [
        {name: g for name, g in values(1 + i, shapes).items() if name[1] in numbers}
        for i, numbers in enumerate(present)
    ]
    optimizer = Rank(kind, (tuple(start),))
    found = run(optimizer, copy.deepcopy(start), options_of(kind, given), gradients)
    expected, entries = by_torch(kind, given, start, gradients)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    for name, entry in optimizer.export().items():
        assert entry.keys() == entries[name].keys()
        torch.testing.assert_close(entry, entries[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masters", [False, True])
def test_exported_optimizer_state_resumes_bitwise(variant: str, masters: bool) -> None:
    """The parameters have different step counts."""
    kind, given = VARIANTS[variant]
    start = {n: v.to(BF16) if n != "seven" else v for n, v in values(0).items()}
    gradients = [
        {n: g.to(start[n].dtype) for n, g in values(1 + i).items() if i != 1 or n != "rows"}
        for i in range(4)
    ]
    options = options_of(kind, given)
    groups = (tuple(start),)
    straight = Rank(kind, groups, masters=masters)
    expected = run(straight, copy.deepcopy(start), options, gradients)
    first = Rank(kind, groups, masters=masters)
    shards = run(first, copy.deepcopy(start), options, gradients[:2])
    second = Rank(kind, groups, first.export(), masters)
    shards = {name: value.clone() for name, value in shards.items()}
    assert_same_bits(run(second, shards, options, gradients[2:]), expected)
    assert_same_bits(second.export(), straight.export())
    assert all(
        (MASTER in entry) == (masters and start[name].dtype == BF16)
        for name, entry in straight.export().items()
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("foreach", [None, False])
def test_skipped_step_changes_no_bit_of_shards_and_state(
    variant: str, masters: bool, foreach: bool | None
) -> None:
    """Steps 0, 1 and 3 of 5, with gradients that are NaN, are skipped by a tensor."""
    kind, given = VARIANTS[variant]
    given = {**given, "foreach": foreach}
    start = {n: v.to(BF16) if n != "seven" else v for n, v in values(0).items()}
    gradients = [{n: g.to(start[n].dtype) for n, g in values(1 + i).items()} for i in range(5)]
    options, groups = options_of(kind, given), (tuple(start),)
    plain = Rank(kind, groups, masters=masters)
    expected = run(plain, copy.deepcopy(start), options, [gradients[2], gradients[4]])
    optimizer, shards = Rank(kind, groups, masters=masters), copy.deepcopy(start)
    if given.get("dampening"):
        with pytest.raises(ValueError, match="dampening cannot be skipped"):
            run(optimizer, shards, options, gradients[:1], skip=torch.zeros(()))
        return
    for number, step in enumerate(gradients):
        skipped = number in (0, 1, 3)
        step = {n: g * float("nan") for n, g in step.items()} if skipped else step
        run(optimizer, shards, options, [step], skip=torch.tensor(float(skipped)))
        if number == 1:
            assert_same_bits(shards, start)
    assert_same_bits(shards, expected)
    assert_same_bits(optimizer.export(), plain.export())


ON_GPU = {v: VARIANTS[v] for v in VARIANTS if v not in ("momentum", "adagrad")}
"""Without those that read values on the host (`host_reads`)."""


@pytest.mark.parametrize("variant", [*ON_GPU, "foreach"])
def test_update_on_gpu_does_not_wait_and_skips_steps(variant: str) -> None:
    """Step 1 of 4 is skipped. The first step may copy numbers to the GPU."""
    kind, given = {**ON_GPU, "foreach": (O.AdamW, dict(lr=0.01, foreach=True))}[variant]
    start, gradients = values(0), [values(1 + i) for i in range(4)]
    options = options_of(kind, given)
    plain = run(Rank(kind, (tuple(start),)), copy.deepcopy(start), options, [*gradients[::2]])
    with dt.testing.simulated_gpus(seed=2) as gpus:
        device = torch.device("cuda")
        shards = {name: value.to(device) for name, value in start.items()}
        optimizer = Rank(kind, (tuple(start),), device=device)
        steps = [
            (
                {n: g.to(device) for n, g in step.items()},
                torch.full((), float(i % 2), device=device),
            )
            for i, step in enumerate(gradients)
        ]
        optimizer.step(shards, options, steps[0][0], skip=steps[0][1])
        before = gpus.report()
        for step, skip in steps[1:]:
            optimizer.step(shards, options, step, skip=skip)
        after = gpus.report()
        assert after.host_waits == before.host_waits
        for name, value in shards.items():
            torch.testing.assert_close(value.cpu(), plain[name], rtol=2e-6, atol=2e-6)
        assert not (gpus.report().races or gpus.report().early_frees)


@pytest.mark.parametrize("kind", [O.AdamW, O.SGD])
def test_fused_update_on_gpu_is_one_launch_for_each_group_and_dtype(
    kind: type[O.Optimizer],
) -> None:
    """AdamW has one more launch for all step counts, and one for the number to add to them."""
    keys = [[f"{dtype}{size}{i}" for dtype in "ab" for size in (SMALL, 2 * SMALL)] for i in "01"]
    options = 2 * options_of(kind, dict(lr=0.01))
    with dt.testing.simulated_gpus() as gpus:
        shards = {
            n: torch.ones(int(n[1:-1]), dtype=BF16 if n[0] == "a" else torch.float32, device="cuda")
            for group in keys
            for n in group
        }
        gradients = {n: value.clone() for n, value in shards.items()}
        skip = torch.zeros((), device="cuda")
        optimizer = Rank(kind, keys, device="cuda")
        launches: list[int] = []
        for _ in range(3):
            optimizer.step(shards, options, gradients, skip=skip)
            launches.append(gpus.report().launches)
    assert launches[2] - launches[1] == 4 + (2 if kind is O.AdamW else 0)


def test_update_of_strided_columns_equals_update_of_contiguous_copies() -> None:
    """Covers columns of a small and of a large tensor."""
    wholes = {"small": torch.randn(6, 8), "large": torch.randn(2 * SMALL, 4)}
    start = {name: value[:, 1:3].clone() for name, value in wholes.items()}
    before = copy.deepcopy(wholes)
    options = options_of(O.AdamW, {})
    gradients = [{n: torch.randn_like(v) for n, v in start.items()} for _ in range(3)]
    expected = run(Rank(O.AdamW, (tuple(start),)), start, options, gradients)
    optimizer = Rank(O.AdamW, (tuple(start),))
    for step in gradients:
        parts = {name: value[:, 1:3] for name, value in wholes.items()}
        optimizer.step(parts, options, step, parts=tuple(parts))
    for name, value in wholes.items():
        assert_same_bits(value[:, 1:3], expected[name], name)
        assert_same_bits(value[:, 3:], before[name][:, 3:], name)
        assert value.untyped_storage().nbytes() == value.nbytes  # still in the same storage


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_clipping_divides_gradients_without_changing_borrowed_ones(kind: type[O.Optimizer]) -> None:
    """The division in the kernel and the division before it give the same bits. Only gradients in
    `own` may be written."""
    shapes = {"a": (16,), "large": (SMALL,), "odd": (SMALL + 1,)}
    start, options = values(0, shapes), options_of(kind, {})
    clip = torch.tensor(1.7)
    found: list[Any] = []
    for own in ((), tuple(shapes)):
        gradients = values(1, shapes)
        optimizer = Rank(kind, (tuple(shapes),))
        shards = copy.deepcopy(start)
        for _ in range(2):
            optimizer.step(shards, options, gradients, clip, writable=own)
            kept = all(torch.equal(g, values(1, shapes)[n]) for n, g in gradients.items())
            assert kept == (not own or kind not in FUSED)
            gradients = values(1, shapes)
        found.append((shards, optimizer.export()))
    assert_same_bits(found[0], found[1])
    divided = {n: g / clip for n, g in values(1, shapes).items()}
    plain = Rank(kind, (tuple(shapes),))
    expected = run(plain, copy.deepcopy(start), options, [divided] * 2)
    assert_same_bits(found[0], (expected, plain.export()))


def test_loaded_state_of_wrong_shape_is_refused() -> None:
    entry = dict(step=torch.tensor(1.0), exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1))
    optimizer = Rank(O.AdamW, (("w",),), {"w": entry})
    with pytest.raises(ValueError, match=r"exp_avg of w has the shape \[1\], .* \[3\]"):
        run(optimizer, {"w": torch.ones(3)}, options_of(O.AdamW, {}), [{"w": torch.ones(3)}])


def test_incorrect_torch_fused_kernel_is_not_used() -> None:
    """torch's fused SGD is wrong for 16 bits on the CPU. A user who asks for it gets an error."""
    start = {"w": torch.randn(64).to(BF16)}
    gradients = [{"w": torch.randn(64).to(BF16)} for _ in range(4)]
    given = dict(lr=0.1, momentum=0.9)
    found = run(Rank(O.SGD, (("w",),)), copy.deepcopy(start), options_of(O.SGD, given), gradients)
    expected, _ = by_torch(O.SGD, {**given, "foreach": False}, start, gradients)
    assert_same_bits(found, expected)
    stated = options_of(O.SGD, {**given, "fused": True})
    with pytest.raises(ValueError, match="fused SGD is not right for torch.bfloat16 on cpu"):
        run(Rank(O.SGD, (("w",),)), copy.deepcopy(start), stated, gradients)
    masters = Rank(O.SGD, (("w",),), masters=True)
    run(masters, copy.deepcopy(start), stated, gradients)


def test_has_kernel_knows_torch_fused_kernels_by_device_and_dtype() -> None:
    """Fused Adagrad exists for CPUs only: on CUDA torch refuses to construct the optimizer."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert has_kernel("Adagrad", torch.float32, cpu) and not has_kernel(
        "Adagrad", torch.float32, cuda
    )
    assert has_kernel("AdamW", torch.bfloat16, cuda) and has_kernel("SGD", torch.bfloat16, cuda)
    assert not has_kernel("SGD", torch.bfloat16, cpu)


WITHOUT_THE_COMPILER = """
import sys
import torch
from dtensor.private_torch import without_compiler

weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
with without_compiler():
    optimizer = torch.optim.AdamW([weight], 0.5, weight_decay=0.0)
    optimizer.step()
print("torch._dynamo" in sys.modules, [round(x, 3) for x in weight.tolist()])
weight.grad = torch.ones(2)
optimizer.step()
double = torch.compile(lambda x: 2 * x, backend="eager")
print("torch._dynamo" in sys.modules, double(torch.ones(2)).tolist())
"""


@pytest.mark.slow
def test_update_does_not_import_torch_compiler() -> None:
    """The compiler still works when it is used afterwards."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_COMPILER], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["False [0.5, 0.5]", "True [2.0, 2.0]"]
