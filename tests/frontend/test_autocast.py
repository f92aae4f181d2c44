"""Tests that capture honours torch.autocast wherever it is entered, and refuses uses that it
cannot honour.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.api.store.session import planning_for
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.cuda_casts import cuda_casts
from dtensor.frontend.graph import Graph
from tests.models import MLP

BF16, F32 = torch.bfloat16, torch.float32


class Twice(nn.Module):
    """A model with one weight in two products, and one product outside autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.exact = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(F.relu(self.shared(x)))
        with torch.autocast("cpu", enabled=False):
            return self.exact(h.float())


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def within(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=BF16):
        return plain(model, x)


def ops(graph: Graph) -> list[tuple[str, str, str]]:
    """Return (op, dtype, phase) of each node, in order."""
    return [
        (str(n.target), str(getattr(n.meta["val"], "dtype", "")), n.meta["phase"])
        for n in graph.nodes
        if n.op == "call_function"
    ]


def test_autocast_around_capture_gives_same_ops_as_autocast_inside_function() -> None:
    args = (Twice(), torch.randn(4, 8))
    with torch.autocast("cpu", dtype=BF16):
        around = capture(plain, args, grads="loss")
        assert torch.is_autocast_enabled("cpu")
    assert ops(around) == ops(capture(within, args, grads="loss"))
    assert ops(around) != ops(capture(plain, args, grads="loss"))
    decorated = torch.autocast("cpu", dtype=BF16)(plain)
    assert ops(around) == ops(capture(decorated, args, grads="loss"))


def test_backward_of_region_with_autocast_disabled_is_float32() -> None:
    """Autocast is enabled around the call and disabled in one layer: the backward of that layer
    is float32 too."""
    with torch.autocast("cpu", dtype=BF16):
        graph = capture(plain, (Twice(), torch.randn(4, 8)), grads="loss")
    products = [o[1:] for o in ops(graph) if "mm" in o[0]]
    assert products == [
        ("torch.bfloat16", "forward"),
        ("torch.bfloat16", "forward"),
        ("torch.float32", "forward"),
        ("torch.float32", "backward"),  # of the weight, of the input
        ("torch.float32", "backward"),
        *[("torch.bfloat16", "backward")] * 3,  # x needs no gradient
    ]


def test_shared_weight_is_cast_once_and_its_gradients_are_summed_in_float32() -> None:
    graph = capture(within, (Twice(), torch.randn(4, 8)), grads="loss")
    casts = Counter(n.args[0].name for n in graph.nodes if "_to_copy" in str(n.target))
    assert (casts["shared_weight"], casts["shared_bias"], casts["exact_weight"]) == (1, 1, 0)
    added = [o for o in ops(graph) if "aten.add.Tensor" in o[0]]
    assert added == [("aten.add.Tensor", "torch.float32", "backward")] * 2


@pytest.mark.parametrize(("dtype", "whole"), [(BF16, 2), (torch.float16, 2), (F32, 0)])
def test_16_bit_linear_keeps_addmm_so_that_bias_is_added_before_rounding(
    dtype: torch.dtype, whole: int
) -> None:
    """A 16-bit addmm rounds once; a product followed by a sum would round twice."""
    graph = capture(plain, (MLP().to(dtype), torch.randn(2, 3, 16).to(dtype)), grads="loss")
    found = Counter(op for op, _, phase in ops(graph) if phase == "forward")
    assert (found["aten.addmm.default"], found["aten.mm.default"]) == (whole, 2 - whole)


# -- what is refused -----------------------------------------------------------------------------


def refused(fn: Callable[..., Any]) -> str:
    with pytest.raises(PlanningError) as caught:
        capture(fn, (torch.randn(2, 2),), grads="none")
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def on_xpu(x: Tensor) -> Tensor:
    with torch.autocast("xpu", dtype=torch.float16):
        return x @ x


def ends_nothing(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cuda", enabled=False):
        return x @ x


def two_lists(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cuda", dtype=BF16):
        return x @ x


def test_autocast_for_unsupported_device_or_two_devices_is_refused() -> None:
    assert_expected_inline(
        refused(on_xpu),
        """\
torch.autocast("xpu", dtype=torch.float16) would change no op: a program is captured for the CPU or for CUDA.
  test_autocast.py:N: with torch.autocast("xpu", dtype=torch.float16):
fix: torch.autocast("cpu", dtype=torch.float16) or torch.autocast("cuda", dtype=torch.float16), whose lists of ops differ""",  # noqa: E501
    )
    assert 'fix: torch.autocast("cpu", enabled=False)' in refused(ends_nothing)
    assert "two lists of ops at once" in refused(two_lists)


def test_disabled_cuda_autocast_in_cpu_program_has_no_effect() -> None:
    def idle(x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ x

    assert [o[1] for o in ops(capture(idle, (torch.randn(2, 2),), grads="none"))] == [str(F32)]


def test_capture_leaves_torch_autocast_and_fake_tensors_unpatched() -> None:
    before = (torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__)
    device = vars(FakeTensor)["device"]
    refused(two_lists)
    capture(within, (MLP(), torch.randn(2, 16)), grads="loss")
    with planning_for("cuda"):
        capture(within, (MLP(), torch.randn(2, 16)), grads="loss")
    now = (torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__)
    assert now == before
    assert vars(FakeTensor)["device"] is device
    assert not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


# -- CUDA's list ---------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A model of ops that the lists of the CPU and of CUDA treat differently, and of ops that
    they treat alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.layer, self.group, self.rms = nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.softmax(self.up(self.layer(x)), -1)
        x = self.conv(x.view(2, 8, 4)).relu()
        x = F.gelu(self.group(x).view(2, 4, 8))
        x = self.up(x)
        x = self.rms(x) * x.norm(dim=-1, keepdim=True)
        x = x + x.pow(2).cumsum(1) / x.exp().mean(-1, keepdim=True)
        return self.head(F.normalize(x, dim=-1) + F.softplus(x))


def smoothed(model: nn.Module, ids: Tensor) -> Tensor:
    y = model(ids).flatten(0, 1)
    loss = F.cross_entropy(y, ids.flatten(), label_smoothing=0.1)
    return loss + F.smooth_l1_loss(y.softmax(-1), y) + F.layer_norm(y, [16]).square().mean()


def on_cuda(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=BF16):
        return smoothed(model, ids)


COMPARED = {
    "embedding", "addmm", "_softmax", "_log_softmax", "convolution", "relu", "gelu", "pow", "mean",
    "native_layer_norm", "native_group_norm", "rsqrt", "linalg_vector_norm", "cumsum", "exp",
    "clamp_min", "softplus", "smooth_l1_loss",
}  # fmt: skip


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ops.append(named_dtypes(func, made))
        return made


def named_dtypes(op: Any, made: Any) -> tuple[str, list[torch.dtype]]:
    leaves = pytree.tree_leaves(made)
    name = op._schema.name.removeprefix("aten::")
    return name, [x.dtype for x in leaves if isinstance(x, Tensor)]


def as_torch_runs_it(model: nn.Module) -> list[tuple[str, list[torch.dtype]]]:
    """Return the forward's ops on torch's own fake CUDA tensors under torch's own autocast."""
    with FakeTensorMode():
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, x in held.items():
                    held[name] = None if x is None else torch.empty(x.shape, device="cuda")
        torch.set_autocast_enabled("cuda", True)  # torch.autocast does not if there is no GPU
        torch.set_autocast_dtype("cuda", BF16)
        try:
            with torch.no_grad(), Seen() as seen:  # a build without CUDA aborts with gradients
                smoothed(model, torch.empty(2, 4, dtype=torch.int64, device="cuda"))
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)
    return seen.ops


@pytest.mark.slow
def test_captured_cuda_autocast_dtypes_equal_torchs_on_fake_cuda_tensors() -> None:
    """The reference is torch itself on fake CUDA tensors, not a table of this project."""
    graph = capture(on_cuda, (Mixed(), torch.zeros(2, 4, dtype=torch.int64)), grads="loss")
    assert graph.autocast == ("cuda, bf16",)
    forward = [n for n in graph.nodes if n.meta["phase"] == "forward"]
    ours = [named_dtypes(n.target, n.meta["val"]) for n in forward if hasattr(n.target, "_schema")]
    theirs = as_torch_runs_it(Mixed())
    wanted = [op for op in theirs if op[0] in COMPARED]
    assert [op for op in ours if op[0] in COMPARED] == wanted
    assert {BF16, F32} == {dtypes[0] for _, dtypes in wanted}
    assert {name for name, _ in wanted} == COMPARED


def test_cpu_and_cuda_autocast_differ_for_softmax_norms_and_powers() -> None:
    """The CPU list keeps softmax, norms and powers in 16 bits; the CUDA list runs them in
    float32."""

    def forward(x: Tensor, name: str) -> list[Tensor]:
        with torch.autocast(name, dtype=BF16):
            y = x @ x
            return [y, y.softmax(-1), F.layer_norm(y, [2]), y.sum(), y**2, y.norm(), y.mean()]

    for name, second in (("cpu", [BF16] * 6), ("cuda", [F32] * 5 + [BF16])):
        graph = capture(forward, (torch.randn(2, 2), name), grads="none")
        assert [n.meta["val"].dtype for n in graph.output_nodes] == [BF16, *second]


class Normed(nn.Module):
    """A norm of a sum; both are fused into one op if their dtypes are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8).to(BF16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + x.flip(0))


def bag(x: Tensor) -> Tensor:
    return F.embedding_bag(torch.zeros(3, 2, dtype=torch.int64), x, mode="sum")


def written_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * x[0]


def written_gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1 + torch.tanh(inner))


def dropped(x: Tensor) -> Tensor:
    q = x.float()[None, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4), dropout_p=0.5)


def resized(x: Tensor) -> Tensor:
    q = F.interpolate(x[None, None], scale_factor=2)  # float32, which attention casts
    return F.scaled_dot_product_attention(q, q, q)


def drawn(x: Tensor) -> Tensor:
    return torch.empty_like(x).exponential_()


def rows_of_loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(4, dtype=torch.int64), reduction="none")


@pytest.mark.default("rows_of_loss-dtype7")
@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (Normed(), F32),
        (bag, BF16),
        (written_norm, F32),
        (written_gelu, F32),
        (dropped, BF16),
        (resized, BF16),
        (drawn, BF16),
        (rows_of_loss, F32),
    ],
)
def test_recognised_patterns_keep_dtypes_of_cuda_autocast(fn: Any, dtype: torch.dtype) -> None:
    def program(x: Tensor, fn: Any) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return fn(x)

    x = torch.rand(4, 8, dtype=BF16)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        with cuda_casts():
            assert fn(x).dtype == dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    graph = capture(program, (x, fn), grads="none")
    assert [node.meta["val"].dtype for node in graph.output_nodes] == [dtype]


@pytest.mark.slow
def test_cuda_autocast_around_capture_gives_same_ops_as_inside_function() -> None:
    args = (Mixed(), torch.zeros(2, 4, dtype=torch.int64))
    torch.set_autocast_enabled("cuda", True)  # what torch.autocast("cuda") does with a GPU
    torch.set_autocast_dtype("cuda", BF16)
    try:
        around = capture(smoothed, args, grads="loss")
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert ops(around) == ops(capture(on_cuda, args, grads="loss"))


def test_cuda_autocast_object_created_before_capture_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it disables autocast
        region = torch.autocast("cuda", dtype=BF16)
    x = torch.randn(2, 2)

    @region
    def decorated(x: Tensor) -> Tensor:
        return x @ x

    def inner(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return decorated(x)

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU, and leaves it on")
    assert [o[1] for o in ops(capture(decorated, (x,), grads="none"))] == [str(F32)]
    assert "made before the program ran" in refused(inner)
    with planning_for("cuda"):
        assert "made before the program ran" in refused(decorated)


def test_captured_program_sees_device_it_is_planned_for() -> None:
    def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        model.to(x.device)
        weight = next(model.parameters())
        seen = (str(x.device), x.is_cuda, weight.is_cpu, weight.get_device(), x.type())
        with torch.autocast(x.device.type, dtype=BF16):
            y = model(x.to("cuda" if x.is_cuda else "cpu")) + torch.zeros(16, device=x.device)
            with torch.autocast(weight.device.type, enabled=False):
                return (y.float() @ torch.ones(16, 1).to(y.float())).softmax(-1), seen

    args = (MLP(), torch.randn(2, 16))
    here = capture(forward, args, grads="tangents")
    with planning_for("cuda"):
        there = capture(forward, args, grads="tangents")
    assert here.out_tree.leaves[1:] == ("cpu", False, True, -1, "torch.FloatTensor")
    assert there.out_tree.leaves[1:] == ("cuda:0", True, False, 0, "torch.cuda.FloatTensor")
    assert (here.autocast, there.autocast) == (("cpu, bf16",), ("cuda, bf16",))
    devices = {str(value) for n in there.nodes for value in n.kwargs.values()}
    assert "cuda:0" not in devices


def test_disabling_autocast_for_program_device_disables_cuda_autocast() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            with torch.autocast(x.device.type, enabled=False):
                y = x @ x
            return y @ y

    found = ops(capture(forward, (torch.randn(2, 2),), grads="none"))
    assert [dtype for name, dtype, _ in found if "mm" in name] == [str(F32), str(BF16)]


def test_lstm_under_cuda_autocast_is_refused() -> None:
    lstm = nn.LSTM(2, 2)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return lstm(x)[0]

    for p in lstm.parameters():
        p.requires_grad_(False)
    assert 'Under torch.autocast("cuda"), lstm is a cuDNN op' in refused(forward)
