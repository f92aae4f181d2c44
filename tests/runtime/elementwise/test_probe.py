"""Tests the probe that decides whether an optimizer class is elementwise: what passes, the
report, and what is refused and why.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.runtime.optimizer.elementwise import probe as probes
from dtensor.runtime.optimizer.elementwise.optimizer_rule import (
    known_class,
    owned_costs,
    rule_of,
    state_elementwise,
)
from dtensor.runtime.optimizer.optimizer_kind import StateEntry
from dtensor.sharding.plan.request import UpdateCost
from tests import optimizers as own


def stated(optimizer: torch.optim.Optimizer, masters: bool = False) -> Any:
    state_elementwise(optimizer)
    return rule_of(optimizer, masters)


def over(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return kind(nn.Linear(3, 2, dtype=dtype).parameters(), **options)


REFUSED = [
    *(
        pytest.param(k, why, True, id=f"{k.__name__}-stated")
        for k, why in own.REFUSED.items()
        if why
    ),
    *(pytest.param(k, why, False, id=k.__name__) for k, why in own.UNACCEPTED.items()),
]


@pytest.mark.parametrize("kind, reason, is_stated", REFUSED)
def test_refused_optimizer_gets_reason_and_line(kind: Any, reason: str, is_stated: bool) -> None:
    """With ``elementwise=True`` the update must be elementwise, otherwise also per parameter. The
    random states of torch and Python are unchanged."""
    optimizer = over(kind)
    before = torch.get_rng_state(), random.getstate()
    threads = torch.get_num_threads()
    with pytest.raises(dt.PlanningError, match=reason) as raised:
        stated(optimizer) if is_stated else rule_of(optimizer)
    assert kind.__name__ in str(raised.value) and "\nfix: " in str(raised.value)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
def test_non_elementwise_torch_optimizer_is_refused_if_stated(kind: str) -> None:
    cls = getattr(torch.optim, kind)
    optimizer = cls([nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(dt.PlanningError, match=kind) as raised:
        stated(optimizer)
    is_owned = kind in ("Adafactor", "Muon")
    assert ("fix: leave out elementwise=True" in str(raised.value)) == is_owned


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("kind", [own.Lion, own.Counted, own.Doubled])
def test_elementwise_optimizer_passes_probe(kind: Any, dtype: torch.dtype) -> None:
    if dtype.is_complex and kind is own.Lion:
        pytest.skip("a complex number has no sign")
    stated(over(kind, dtype, lr=0.05))


def test_probe_report_lists_state_options_and_lines() -> None:
    rule = stated(over(own.Counted))
    report = rule.report
    assert report.optimizer == "tests.optimizers.Counted"
    assert report.changed == ("k", "lr_max", "num_steps", "weight_sum")
    assert set(report.ops) >= {"aten.lerp_", "aten.mul_", "aten.sub_"}
    assert "step (int)" in str(report) and "m (like the parameter)" in str(report)
    assert report.unreached == ()
    assert rule.keys(over(own.Counted).param_groups[0]) == ("step", "seen", "m")
    entries = rule.probed.kind.entries
    assert entries["step"] == StateEntry(number=True, python=int)
    assert entries["seen"].python is float and entries["prior"].late
    wide = stated(over(own.Wide, torch.bfloat16)).probed.kind.entries
    assert wide["m"].dtype(torch.bfloat16) == torch.float32
    assert (wide["count"].shape, wide["count"].number) == ((1,), True)
    text = str(stated(over(own.Amsgrad)).report)
    assert 'v = torch.maximum(state.setdefault("most"' in text and "lines not run    2" in text


def test_probe_runs_once_per_class_and_kind_of_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probed: list[str] = []
    probe = probes._ElementwiseTrial.run

    def counted(self: Any) -> Any:
        probed.append(self.name)
        return probe(self)

    class Fresh(own.Amsgrad):
        pass

    monkeypatch.setattr(probes._ElementwiseTrial, "run", counted)
    first, second = over(Fresh), over(Fresh, lr=0.5)
    rule, same = stated(first), stated(second)
    assert rule_of(first) is rule and rule_of(second) is same and len(probed) == 1
    first.param_groups[0]["lr"] = 0.25
    assert rule_of(first) is rule and len(probed) == 1
    first.param_groups[0]["amsgrad"] = True
    other = rule_of(first)
    assert other.keys(first.param_groups[0]) == ("v", "most") and len(probed) == 2
    assert rule_of(second) is same and rule_of(first) is other and len(probed) == 2


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_decay_that_depends_on_ndim_is_refused_only_if_decay_is_nonzero(decay: float) -> None:
    class Decays(own.Each):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.mul_(1 - group["lr"] * group["decay"] * (p.ndim > 1)).sub_(g, alpha=group["lr"])

    optimizer = over(Decays, lr=1e-3, decay=decay)
    if decay:
        with pytest.raises(dt.PlanningError, match="on shards the value differs"):
            stated(optimizer)
    else:
        stated(optimizer)
        optimizer.param_groups[0]["decay"] = 0.1
        with pytest.raises(dt.PlanningError, match="on shards the value differs"):
            rule_of(optimizer)


def test_update_that_reads_first_group_passes_probe() -> None:
    """The update takes the learning rate of the first group for all parameters. Every rank has
    all groups in their order, so this is correct."""

    class First(own.Each):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=self.param_groups[0]["lr"])

    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.1, 0.2), strict=True)]
    stated(First(groups))  # as torch does: the ranks have all groups, in their order


# -- which class it is -----------------------------------------------------------------------------


def test_subclass_that_overrides_only_init_is_known_as_its_parent() -> None:
    assert known_class(over(own.Renamed)) is torch.optim.AdamW
    assert known_class(over(torch.optim.AdamW)) is torch.optim.AdamW
    assert known_class(over(own.Mixed)) is None
    assert known_class(over(own.Doubled)) is None


def test_scheduler_keeps_optimizer_known_but_replaced_step_does_not() -> None:
    optimizer = over(own.Renamed)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer) and known_class(optimizer) is torch.optim.AdamW
    optimizer = over(torch.optim.SGD, lr=0.1)
    optimizer.step = lambda closure=None: None
    assert known_class(optimizer) is None


# -- per parameter ---------------------------------------------------------------------------------

MATRICES = [nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(4, 8))]


@pytest.mark.parametrize("kind", [*own.PER_PARAMETER, torch.optim.Adafactor, torch.optim.Muon])
def test_optimizer_that_needs_whole_parameters_is_per_parameter(kind: Any) -> None:
    rule = rule_of(kind(MATRICES))
    assert rule.owned and rule.keys({}) == ("state",) and rule.entry("state").packed
    assert rule.report is not None and rule.report.updates == "per parameter"
    assert rule.report.dtypes == (torch.float32, torch.float64)


def test_number_of_dims_of_the_users_parameters_are_probed() -> None:
    """Muon takes no 1-D parameter, so only an optimizer over matrices passes."""

    class Matrices(own.Each):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            assert p.ndim == 2, "a matrix, please"
            p.sub_(g @ g.T @ g, alpha=group["lr"])

    assert rule_of(Matrices(MATRICES)).owned
    with pytest.raises(dt.PlanningError, match="raised in its probe.*a matrix, please"):
        rule_of(over(Matrices))
    scalars = [nn.Parameter(torch.ones(shape)) for shape in ((4,), (), ())]
    assert rule_of(own.SkipsNotFinite(scalars)).owned


def test_class_that_takes_the_users_shapes_only_is_probed_with_parts_of_them() -> None:
    """Groups with other names that run the same lines are represented by two. An attribute that
    the step does not read (a generator) is left out, and refused where the step reads it."""
    module = nn.ModuleDict({f"{n}{i}": nn.Linear(16, 16) for n in "qo" for i in range(8)})
    rule = rule_of(own.Named(module.named_parameters()))
    assert rule.owned and rule.probed.exact and rule.report.changed == ("begun",)
    with pytest.raises(dt.PlanningError, match=r"named is a generator.*\n  its line: .*self.named"):
        rule_of(own.Models(module.named_parameters()))


def test_cost_of_an_owned_update_is_counted_on_meta_or_scaled() -> None:
    """Muon in float32: 5 iterations of three products, in bfloat16. LAMB reads numbers, so it is
    counted on a small tensor."""

    class Reads(own.Normed):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            state.setdefault("row", g.new_zeros(g.shape[-1]))
            if float(g.norm()) > 0:
                super().update(p, g @ g.T @ g, state.setdefault("m", torch.zeros_like(p)), group)

    up = nn.Parameter(torch.empty(64, 32))
    muon = owned_costs(torch.optim.Muon([up]), {"up": up})
    products = 2 * 32 * 64 * 32 + 2 * 32**3 + 2 * 32 * 32 * 64
    assert muon == {"up": UpdateCost(5 * products, 4 * 64 * 32)}
    narrow = nn.Parameter(up.detach().bfloat16())
    with_masters = torch.optim.Muon([narrow])
    rule_of(with_masters, True)  # the plan counts the masters themselves
    assert owned_costs(with_masters, {"up": narrow}) == muon
    cost = owned_costs(Reads([up]), {"up": up})
    assert cost is not None and cost["up"].state_bytes == 4 * (64 * 32 + 32)
    assert 0.5 <= cost["up"].flops / (4 * 64 * 64 * 32) <= 2
    assert owned_costs(over(own.Lion), {}) is None
