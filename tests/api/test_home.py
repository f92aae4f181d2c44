"""Weights have one current value: every way in which plain torch reads or writes a module
gives what plain torch gives, between steps inside a launch, outside one, after one and in a
second one."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

import dtensor as dt
from dtensor.api.store.session import session_for
from dtensor.api.values.lazy_parameters import LazyTensor
from dtensor.daft import CommunicationError, Failure
from tests.extras import missing

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")


class Net(nn.Module):
    """A model with uneven rows, a scalar, a parameter with other strides, a tied one, and buffers
    that change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("mean", torch.zeros(4, 2).t(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        h = self.down(self.up(x @ self.turned).tanh()) * self.scale
        return self.second(self.first(h).tanh())


def loss_fn(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


def grad_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the parameter's `.grad`: None, as after `zero_grad` in torch; reading it gives a
    warning if the ranks used the parameter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the parameter's .grad is None")
        return parameter.grad


PINS = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Optimizer = torch.optim.Optimizer


@dataclass
class Twins:
    """A parallelized module and the same module in plain torch, trained together."""

    mesh: dt.Mesh
    net: Net
    model: dt.ParallelModule
    optimizer: Optimizer
    step: dt.TrainStep
    plain: Net
    plain_optimizer: Optimizer

    @staticmethod
    def of(mesh: dt.Mesh | None = None, **options: Any) -> Twins:
        torch.manual_seed(0)
        net, mesh = Net(), mesh or dt.Mesh(tp=2)
        plain = copy.deepcopy(net)

        def adam(of: nn.Module) -> Optimizer:
            return torch.optim.AdamW(of.parameters(), lr=1e-2, eps=1e-3)

        model = dt.parallelize(net, mesh, PINS if "tp" in mesh.axes else {}, **options)
        optimizer = adam(net)
        step = dt.train_step(model, loss_fn, optimizer)
        return Twins(mesh, net, model, optimizer, step, plain, adam(plain))

    def train(self, times: int = 1) -> None:
        for seed in range(times):
            x, y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(seed))
            loss = self.step(x, y)
            self.plain_optimizer.zero_grad()
            expected = loss_fn(self.plain, x, y)
            expected.backward()
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad()
            assert abs(float(loss) - float(expected)) < 1e-5

    def do(self, way: Way, name: str) -> None:
        """Apply the same access to both and compare the results."""
        expected = way(self.plain, self.plain_optimizer)
        same(way(self.net, self.optimizer), expected, name)

    def check(self, when: str) -> None:
        """Compare parameters, buffers and optimizer state."""
        same(tensors_of(self.net), tensors_of(self.plain), when)
        same(self.optimizer.state_dict(), self.plain_optimizer.state_dict(), when)


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def same(found: Any, expected: Any, what: str) -> None:
    (a, one), (b, other) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert one == other, what
    for x, y in zip(a, b, strict=True):
        if isinstance(y, Tensor):
            text = what
            torch.testing.assert_close(
                x, y, rtol=1e-5, atol=1e-5, msg=lambda m, t=text: f"{t}: {m}"
            )
        elif isinstance(y, float | np.ndarray):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=what)
        else:
            assert x == y, what


# -- ways of reading and writing -------------------------------------------------------------------

Way = Callable[[Any, Optimizer], Any]


def stored(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def averaged(net: nn.Module, _: Optimizer) -> Any:
    ema = AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    ema.update_parameters(net)
    return ema.module.state_dict()


def averaged_by_hand(net: nn.Module, _: Optimizer) -> Any:
    ema = {name: torch.zeros(p.shape) for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        ema[name].mul_(0.9).add_(p.detach(), alpha=0.1)
    return ema


def with_a_hook(net: nn.Module, _: Optimizer) -> Any:
    seen: dict[str, Tensor] = {}
    handle = net.register_state_dict_post_hook(lambda m, state, prefix, meta: seen.update(state))
    net.state_dict()
    handle.remove()
    return seen


READS: dict[str, Way] = {
    "item": lambda net, _: net.scale.item(),
    "float": lambda net, _: float(net.scale),
    "format": lambda net, _: f"{net.count:.3f}",
    "sum": lambda net, _: net.up.weight.sum(),
    "norm": lambda net, _: net.up.weight.norm().item(),
    "detach": lambda net, _: net.up.weight.detach(),
    "data": lambda net, _: net.up.weight.data,
    "clone": lambda net, _: net.up.weight.clone(),
    "tolist": lambda net, _: net.up.bias.tolist(),
    "index": lambda net, _: net.up.weight[1, 2],
    "iterate": lambda net, _: [row.sum() for row in net.up.weight],
    "transpose": lambda net, _: net.turned.T,
    "view": lambda net, _: net.first.weight.view(-1),
    "numpy": lambda net, _: net.up.weight.detach().numpy(),
    "asarray": lambda net, _: np.asarray(net.mean),
    "from_dlpack": lambda net, _: torch.from_dlpack(net.up.weight.detach()),
    "storage": lambda net, _: bytes(net.count.untyped_storage())[:3],
    "compare": lambda net, _: (net.up.weight > 0.1).sum(),
    "equal": lambda net, _: torch.equal(net.first.weight, net.second.weight),
    "matmul": lambda net, _: X @ net.turned,
    "stack": lambda net, _: torch.stack([p.norm() for p in net.parameters()]),
    "cat": lambda net, _: torch.cat([p.flatten() for p in net.parameters()]),
    "foreach": lambda net, _: torch._foreach_norm(list(net.parameters())),
    "parameters_to_vector": lambda net, _: parameters_to_vector(net.up.parameters()),
    "state_dict": lambda net, _: net.state_dict(),
    "state_dict keep_vars": lambda net, _: net.state_dict(keep_vars=True),
    "state_dict hook": with_a_hook,
    "named_parameters": lambda net, _: dict(net.named_parameters()),
    "named_buffers": lambda net, _: dict(net.named_buffers()),
    "buffer": lambda net, _: float(net.count),
    "deepcopy": lambda net, _: copy.deepcopy(net).state_dict(),
    "deepcopy of a parameter": lambda net, _: copy.deepcopy(net.up.weight),
    "deepcopy of a buffer": lambda net, _: copy.deepcopy(net.mean),
    "deepcopy of the state": lambda net, _: copy.deepcopy(net.state_dict()),
    "copy": lambda net, _: copy.copy(net.up.weight),
    "pickle": lambda net, _: pickle.loads(pickle.dumps(net)).state_dict(),
    "save the module": lambda net, _: stored(net).state_dict(),
    "save the state": lambda net, _: stored(net.state_dict()),
    "AveragedModel": averaged,
    "EMA by hand": averaged_by_hand,
    "forward": lambda net, _: net(X),
    "forward without gradients": lambda net, _: torch.no_grad()(net)(X),
    "forward in inference mode": lambda net, _: torch.inference_mode()(net)(X).clone(),
    "gradient": lambda net, _: torch.autograd.grad(net(X).sum(), net.up.weight)[0],
    "functional_call": lambda net, _: torch.func.functional_call(
        net, {n: p * 2 for n, p in net.named_parameters()}, (X,)
    ),
    "vmap": lambda net, _: torch.func.vmap(lambda row: row * 2)(net.up.weight),
    "out": lambda net, _: torch.add(net.up.weight.detach(), 1, out=torch.empty(5, 4)),
    "grad": lambda net, _: grad_of(net.up.weight),
    "shapes": lambda net, _: [(p.shape, p.dtype, p.requires_grad) for p in net.parameters()],
    "print": lambda net, _: repr(net.count),
    "opt.state": lambda net, opt: opt.state[net.up.weight]["exp_avg"],
    "opt.state items": lambda net, opt: [len(entry) for entry in opt.state.values()],
    "opt.state_dict": lambda net, opt: opt.state_dict(),
    "deepcopy of the optimizer": lambda net, opt: copy.deepcopy(opt).state_dict(),
    "pickle of the optimizer": lambda net, opt: pickle.loads(pickle.dumps(opt)).state_dict(),
    "both in one pickle": lambda net, opt: stored([net, opt])[1].state_dict(),
}


def in_place(change: Callable[[Any], object]) -> Way:
    """Apply the change without gradients and return nothing."""

    def way(net: Any, _: Optimizer) -> None:
        with torch.no_grad():
            change(net)

    return way


def step_of_torch(net: nn.Module, _: Optimizer) -> None:
    """Step a fused optimizer, whose writes `_version` does not show."""
    torch.manual_seed(4)
    fused = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    net(X).square().mean().backward()
    fused.step()
    fused.zero_grad()


def swap_and_back(net: nn.Module, _: Optimizer) -> Any:
    """Evaluate with averaged weights, then restore the original weights."""
    own = copy.deepcopy(net.state_dict())
    net.load_state_dict({name: value * 0.5 for name, value in own.items()})
    found = net(X).detach()
    net.load_state_dict(own)
    return found


def reset(net: Any) -> None:
    torch.manual_seed(3)
    net.down.reset_parameters()
    nn.init.normal_(net.up.weight, std=0.3)


def prune(net: Any) -> None:
    net.down.weight.data[net.down.weight.data.abs() < 0.1] = 0


def write_buffers(net: Any) -> None:
    net.count.fill_(40.0)
    net.mean[0] = 3.0


def reload_state(_: nn.Module, opt: Optimizer) -> None:
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].mul_(0.5)
    opt.load_state_dict(state)


def cool(_: nn.Module, opt: Optimizer) -> None:
    opt.param_groups[0]["lr"] *= 0.9


WRITES: dict[str, Way] = {
    "no_grad mul_": in_place(lambda net: [p.mul_(0.5) for p in net.parameters()]),
    "a row": in_place(lambda net: net.up.weight[0].mul_(2)),
    "data.mul_": lambda net, _: net.up.weight.data.mul_(0.5),
    "data.copy_": lambda net, _: net.up.weight.data.copy_(torch.ones(5, 4) / 3),
    "data =": in_place(lambda net: setattr(net.up.weight, "data", net.up.weight.data * 0.9)),
    "data[...] =": in_place(prune),
    "renorm_": in_place(lambda net: net.up.weight.data.renorm_(2, 0, 0.5)),
    "numpy": in_place(lambda net: net.up.weight.detach().numpy()[1].fill(0.25)),
    "foreach": in_place(lambda net: torch._foreach_mul_([p.data for p in net.parameters()], 0.9)),
    "vector_to_parameters": lambda net, _: vector_to_parameters(
        parameters_to_vector(net.up.parameters()) * 0.9, net.up.parameters()
    ),
    "load_state_dict": in_place(
        lambda net: net.load_state_dict({n: value * 1.1 for n, value in net.state_dict().items()})
    ),
    "load_state_dict of a part": in_place(
        lambda net: net.load_state_dict({"up.bias": torch.arange(5.0) / 9}, strict=False)
    ),
    "init": in_place(reset),
    "a fused step of torch": step_of_torch,
    "an average and back": swap_and_back,
    "buffers": in_place(write_buffers),
    "data = of a buffer": in_place(lambda net: setattr(net.count, "data", torch.tensor(7.0))),
    "half and float": in_place(lambda net: net.half().float()),
    "opt.state": lambda net, opt: opt.state[net.up.weight]["exp_avg"].zero_(),
    "opt.load_state_dict": reload_state,
    "opt.state.clear": lambda net, opt: opt.state.clear(),
    "lr": cool,
}
WAYS = {**READS, **WRITES}


# -- when ------------------------------------------------------------------------------------------


STAGES = {"pp": [["up*", "turned", "mean", "count"], ["down*", "scale", "first*"]]}
PLACED: dict[str, tuple[dt.Mesh, dict[str, Any], str]] = {
    "tp2": (dt.Mesh(tp=2), {}, "inprocess"),
    "zero3": (dt.Mesh(dp=2), dict(zero={"dp": 3}), "inprocess"),
    "zero1_tp2": (dt.Mesh(dp=2, tp=2), dict(zero={"dp": 1}), "inprocess"),
    "pp2": (dt.Mesh(pp=2), dict(stages=STAGES), "inprocess"),
    "tp2 on Ray": (dt.Mesh(tp=2), {}, "ray"),
    "zero3 on Ray": (dt.Mesh(dp=2), dict(zero={"dp": 3}), "ray"),
}


@pytest.mark.default("pp2")
@pytest.mark.parametrize(
    "placed",
    [pytest.param(name, marks=[pytest.mark.ray] * name.endswith("Ray")) for name in PLACED],
)
def test_module_access_between_steps_inside_launch_matches_torch(
    placed: str, request: pytest.FixtureRequest
) -> None:
    mesh, options, backend = PLACED[placed]
    if backend == "ray":
        request.getfixturevalue("ray_session")
    twins = Twins.of(mesh, **options)
    with dt.launch(mesh, backend=backend):  # type: ignore[arg-type]
        for name, way in WAYS.items():
            twins.train(1)
            twins.do(way, name)
        twins.train(2)
        twins.check("inside")
        twins.train(1)
    twins.check("after")
    twins.train(1)
    twins.check("outside")


def test_torch_gradient_clipping_between_steps_inside_launch_is_refused() -> None:
    """Parameters have no `.grad` on the controller, so torch's functions would silently clip
    nothing."""
    twins = Twins.of()
    with dt.launch(twins.mesh):
        twins.train(1)
        parameters = list(twins.net.parameters())
        with pytest.raises(
            dt.PlanningError, match=r"clip_grad_norm_ finds .*(.|\n)*clip_grad_norm="
        ):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        with pytest.raises(dt.PlanningError, match="clip_grad_value_ finds"):
            torch.nn.utils.clip_grad_value_(parameters, 1.0)
        assert [grad_of(p) for p in parameters] == [None] * len(parameters)
        twins.train(1)
    twins.check("after")


def test_module_access_between_steps_outside_launch_matches_torch() -> None:
    twins = Twins.of()
    for name, way in WAYS.items():
        twins.train(1)
        twins.do(way, name)
    twins.train(2)
    twins.check("outside")


@pytest.mark.slow
@pytest.mark.parametrize("second", ["inside", "at its start", "outside"])
def test_module_access_after_launch_and_in_second_launch_matches_torch(second: str) -> None:
    twins = Twins.of()
    for name, way in WAYS.items():
        with dt.launch(twins.mesh):
            twins.train(1)
            if second == "inside":
                twins.do(way, name)
        if second == "at its start":
            with dt.launch(twins.mesh):
                twins.do(way, name)
                twins.train(1)
        elif second == "outside":
            assert not any(isinstance(t, LazyTensor) for t in tensors_of(twins.net).values())
            twins.do(way, name)
    twins.train(1)
    twins.check("at the end")


# -- what is kept ----------------------------------------------------------------------------------


def test_launch_preserves_tensor_objects_memory_and_aliases() -> None:
    twins = Twins.of()
    net = twins.net
    before = {name: (t, t.data_ptr()) for name, t in tensors_of(net).items()}
    view, array = net.turned.detach().t(), net.mean.numpy()
    with dt.launch(twins.mesh):
        twins.train(3)
        float(net.scale)
        twins.train(1)
    for name, tensor in tensors_of(net).items():
        assert tensor is before[name][0] and tensor.data_ptr() == before[name][1]
        assert type(tensor) is (nn.Parameter if name in dict(net.named_parameters()) else Tensor)
    assert net.second.weight is net.first.weight
    same(view, twins.plain.turned.detach().t(), "a view")
    same(array, twins.plain.mean.numpy(), "an array")


def test_dtensor_and_metadata_reads_fetch_no_values() -> None:
    twins = Twins.of()
    scheduler = torch.optim.lr_scheduler.StepLR(twins.optimizer, 1)
    with dt.launch(twins.mesh) as session:
        x, y = torch.randn(2, 6, 4)
        twins.step(x, y)
        for _ in range(3):
            calls = session.cluster.calls
            twins.step(x, y)
            scheduler.step()  # warnings are errors here
            twins.step.plan(x, y)
            assert session.cluster.calls == calls + twins.mesh.size
        assert all(isinstance(t, LazyTensor) for t in tensors_of(twins.net).values())
        shapes = [(p.shape, p.requires_grad, p.device) for p in twins.net.parameters()]
        assert len(shapes) == 7 and isinstance(twins.net.up.weight, LazyTensor)


def test_only_touched_tensors_are_fetched_and_only_written_ones_sent() -> None:
    twins = Twins.of()
    with dt.launch(twins.mesh):
        twins.train(1)
        float(twins.net.scale)
        away = {name for name, t in tensors_of(twins.net).items() if isinstance(t, LazyTensor)}
        assert set(tensors_of(twins.net)) - away == {"scale"}
        home = session_for(twins.mesh).model_home(twins.model)
        put: list[Any] = []
        session_for(twins.mesh).cluster.put = put.append  # type: ignore[method-assign]
        twins.train(1)
        assert not put and not home.read_copies  # it was not written, so it was not sent
        with torch.no_grad():
            twins.net.scale.add_(1)
        del session_for(twins.mesh).cluster.put
        twins.plain.scale.data.add_(1)
        twins.train(1)


def test_several_parallelized_wrappers_of_one_module_share_its_weights() -> None:
    twins = Twins.of()
    here, there = (
        dt.parallelize(twins.net, twins.mesh, {}),
        dt.parallelize(twins.net, dt.Mesh(), {}),
    )
    inside = dt.compile(lambda net, x: net(x), twins.mesh)
    outside = dt.compile(lambda net, x: net(x), dt.Mesh())
    for _ in range(2):
        with dt.launch(twins.mesh):
            twins.train(2)
            same(inside(here, X).full_tensor(), twins.plain(X).detach(), "in the launch")
            twins.train(1)
        same(outside(there, X).full_tensor(), twins.plain(X).detach(), "on another mesh")
        twins.train(1)
        same(outside(there, X).full_tensor(), twins.plain(X).detach(), "after a step outside")
    twins.check("at the end")


def test_parallelized_wrapper_reads_current_values_as_module_does() -> None:
    twins = Twins.of()
    with dt.launch(twins.mesh):
        twins.train(2)
        same(twins.model.state_dict(), twins.plain.state_dict(), "state_dict")
        twins.train(1)
        same(copy.deepcopy(twins.model).module.state_dict(), twins.plain.state_dict(), "deepcopy")
        twins.train(1)
        same(float(twins.model.scale), float(twins.plain.scale), "an attribute")


def test_parameters_as_arguments_and_eager_operands_have_current_values() -> None:
    twins = Twins.of()
    times = dt.compile(lambda x, w: x @ w, twins.mesh)
    with dt.launch(twins.mesh):
        twins.train(2)
        same(times(X, twins.net.turned).full_tensor(), (X @ twins.plain.turned).detach(), "arg")
        twins.train(1)
        rows = dt.distribute(twins.net.up.weight, twins.mesh, tp=dt.Row())
        same(rows.full_tensor().detach(), twins.plain.up.weight.detach(), "distribute")
        twins.train(1)
        product = dt.distribute(X, twins.mesh) * twins.net.scale.item()
        same(product.full_tensor(), X * twins.plain.scale.item(), "a number")


def test_optimizer_hook_sees_updated_weights() -> None:
    twins = Twins.of()
    seen: list[Tensor] = []
    twins.optimizer.register_step_post_hook(
        lambda opt, args, kwargs: seen.append(twins.net.up.weight.detach().clone())
    )
    with dt.launch(twins.mesh):
        for _ in range(3):
            twins.train(1)
            same(seen[-1], twins.plain.up.weight.detach(), "in the hook")


def test_controller_optimizer_steps_only_for_schedulers_and_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Schedulers warn if the optimizer has not stepped, and warnings are errors here. A user's
    replacement of `step` is called too."""
    twins, stepped = Twins.of(), list[object]()
    step = type(twins.optimizer).step

    def noted(self: torch.optim.Optimizer, *args: Any) -> object:
        stepped.append(self)
        return step(self, *args)

    monkeypatch.setattr(type(twins.optimizer), "step", noted)

    def seen() -> bool:
        stepped.clear()
        twins.train(1)
        return twins.optimizer in stepped

    with dt.launch(twins.mesh):
        assert not seen() and not seen()
        hook = twins.optimizer.register_step_post_hook(lambda *_: None)
        assert seen()
        hook.remove()
        assert not seen()
        own = twins.optimizer.step
        twins.optimizer.step = lambda *args: own(*args)  # type: ignore[method-assign]
        assert seen()
        del twins.optimizer.step
        assert not seen()
        schedulers = torch.optim.lr_scheduler
        for kind in (
            lambda opt: schedulers.StepLR(opt, 1),
            lambda opt: schedulers.ReduceLROnPlateau(opt),
            lambda opt: schedulers.OneCycleLR(opt, 0.1, 10, cycle_momentum=False),
            lambda opt: schedulers.SequentialLR(
                opt, [schedulers.ConstantLR(opt), schedulers.LinearLR(opt)], [1]
            ),
            lambda opt: schedulers.ChainedScheduler([schedulers.ConstantLR(opt)]),
        ):
            pair = kind(twins.optimizer), kind(twins.plain_optimizer)
            for _ in range(2):
                twins.train(1)
                for scheduler in pair:
                    late = isinstance(scheduler, schedulers.ReduceLROnPlateau)
                    scheduler.step(1.0) if late else scheduler.step()  # type: ignore[call-arg]
        assert seen()
    twins.check("with schedulers")


def test_other_thread_reads_weights_while_steps_run() -> None:
    twins, stop, seen = Twins.of(), threading.Event(), set[float]()

    def read() -> None:
        while not stop.is_set():
            seen.add(float(twins.net.scale.detach()))

    reader = threading.Thread(target=read)
    with dt.launch(twins.mesh):
        twins.train(1)
        reader.start()
        twins.train(20)
        while len(seen) < 2 and reader.is_alive():  # until it has had its turn
            twins.train(1)
        stop.set()
        reader.join()
    twins.check("after")
    assert len(seen) > 1


def test_tensor_replaced_by_new_object_is_used_by_next_step() -> None:
    twins = Twins.of()
    with dt.launch(twins.mesh):
        twins.train(1)
        old = twins.net.count
        for net in (twins.net, twins.plain):
            net.count = torch.tensor(9.0)
        twins.train(1)
        assert float(old) == 1.0 and float(twins.net.count) == 10.0
        twins.net.load_state_dict(copy.deepcopy(twins.plain.state_dict()), assign=True)
        evaluate = dt.compile(lambda net, x: net(x), twins.mesh)
        same(evaluate(twins.model, X).full_tensor(), twins.plain(X).detach(), "assigned")


@pytest.mark.parametrize("when", ["before", "inside"])
def test_parameters_outside_optimizer_stay_unchanged(when: str) -> None:
    twins = Twins.of()
    if when == "inside":
        twins.train(1)
    for net in (twins.net, twins.plain):
        net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
        net.second.weight = net.first.weight
    twins.train(2)
    twins.check("with an optimizer of others")
    twins.optimizer = torch.optim.AdamW(twins.net.parameters(), lr=1e-2, eps=1e-3)
    twins.step = dt.train_step(twins.model, loss_fn, twins.optimizer)
    twins.plain_optimizer = torch.optim.AdamW(twins.plain.parameters(), lr=1e-2, eps=1e-3)
    twins.train(2)
    twins.check("with an optimizer of its own")


# -- what is not seen, and what is gone ------------------------------------------------------------


def test_write_through_view_is_sent_if_memory_is_current_else_refused() -> None:
    twins = Twins.of()
    view = twins.net.up.weight.detach()
    with pytest.raises(dt.PlanningError, match=r"up\.weight was written through a view"):  # noqa: SIM117
        with dt.launch(twins.mesh):
            evaluate = dt.compile(lambda net, x: net.up(x), twins.mesh)
            evaluate(twins.model, X)
            for weight in (view, twins.plain.up.weight.detach()):
                weight.mul_(0.5)  # its memory is current: nothing was trained yet
            same(evaluate(twins.model, X).full_tensor(), twins.plain.up(X).detach(), "a view")
            twins.train(2)
            view.mul_(0.5)
            twins.step(X, X)
    twins.check("all but that write came home")


def test_parameters_with_overlapping_memory_are_refused() -> None:
    twins = Twins.of()
    twins.net.first.weight.data = twins.net.turned.data.t()
    with pytest.raises(dt.PlanningError, match="share memory without being one tensor"):
        twins.step(X, X)
    flat = torch.randn(20 + 5)  # parts of one memory that do not overlap are fine
    twins.net.first.weight.data = torch.randn(4, 4)
    twins.net.up.weight.data, twins.net.up.bias.data = flat[:20].view(5, 4), flat[20:]
    float(twins.step(X, X))


LEFT = r"up\.weight is not here: its value was on mesh\(tp=2\)(.|\n)*fix: leave bring_home out"


def test_values_not_brought_home_raise_until_others_are_loaded() -> None:
    twins = Twins.of()
    start = copy.deepcopy(dt.gather_state_dict(twins.model, twins.optimizer))
    with dt.launch(twins.mesh, bring_home=False):
        twins.train(1)
    net = twins.net
    for name in ("sum", "clone", "detach", "tolist"):
        with pytest.raises(RuntimeError, match=LEFT):
            getattr(net.up.weight, name)()
    for read in (net.state_dict, lambda: copy.deepcopy(net), lambda: net(X)):
        with pytest.raises(RuntimeError, match="is not here"):
            read()
    for read in (twins.optimizer.state_dict, lambda: twins.optimizer.state[net.up.weight]):
        with pytest.raises(RuntimeError, match="the state of AdamW is not here"):
            read()
    with pytest.raises(RuntimeError, match="is not here"):
        dt.gather_state_dict(twins.model, twins.optimizer)
    with pytest.raises(RuntimeError, match="is not here"):
        twins.step(X, X)
    with pytest.raises(RuntimeError, match="is not here"), dt.launch(twins.mesh):
        twins.step(X, X)
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict({**start["model"], "up.weight": torch.ones(3)})
    with pytest.raises(RuntimeError, match=LEFT):
        net.up.weight.sum()
    dt.load_state_dict(twins.model, twins.optimizer, start)
    net.mean.zero_()  # no part of a state
    again = Twins.of()
    with dt.launch(twins.mesh):
        for one, other in zip(range(2), range(2), strict=True):
            x = X * (one + 1)
            assert float(twins.step(x, x)) == float(again.step(x, X * (other + 1)))


def test_gathered_state_survives_launch_without_bring_home() -> None:
    twins = Twins.of()
    with dt.launch(twins.mesh, bring_home=False):
        twins.train(2)
        dt.gather_state_dict(twins.model, twins.optimizer)
        assert isinstance(twins.net.up.weight, LazyTensor)  # that is no touch
    twins.check("after")
    with dt.launch(twins.mesh):
        twins.train(1)
    twins.check("after the second")


def test_values_come_home_after_exception_in_launch() -> None:
    twins = Twins.of()
    with pytest.raises(KeyError, match="mine"), dt.launch(twins.mesh):
        twins.train(2)
        raise KeyError("mine")
    twins.check("after")


def test_users_exception_is_not_hidden_by_unread_failure_or_lost_values() -> None:
    twins = Twins.of()
    with pytest.raises(KeyError, match="mine") as caught, dt.launch(twins.mesh) as session:
        twins.train(1)
        get = session.cluster.get

        def lost(names: Any) -> Any:
            session.cluster.failure = CommunicationError(Failure(rank=0, reason="gone"))  # type: ignore[attr-defined]
            return get(names)

        session.cluster.get = lost  # type: ignore[method-assign]
        raise KeyError("mine")
    assert "not all weights came home: rank 0: gone" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"is lost(.|\n)*which failed \(rank 0: gone\)"):
        twins.net.state_dict()


def test_bring_home_must_be_bool() -> None:
    with (
        pytest.raises(dt.PlanningError, match="bring_home is 'no'"),
        dt.launch(
            dt.Mesh(),
            bring_home="no",  # type: ignore[arg-type]
        ),
    ):
        pass


# -- masters, meta ---------------------------------------------------------------------------------


@pytest.mark.default("zero")
@pytest.mark.parametrize("placed", ["tp2", "zero"])
def test_writing_parameter_resets_its_master_weight(placed: str) -> None:
    """The master weights of the other parameters are kept."""
    losses: list[list[float]] = []
    for parted in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).bfloat16()
        mesh, zero = (dt.Mesh(tp=2), None) if placed == "tp2" else (dt.Mesh(dp=2), {"dp": 3})
        pins = {"0.weight": dict(tp=dt.Row())} if placed == "tp2" else {}
        model = dt.parallelize(net, mesh, pins, zero=zero)
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        step = dt.train_step(model, lambda m, x: m(x).square().mean(), opt, master_weights=True)
        x = X.bfloat16()
        found: list[float] = []
        with dt.launch(mesh):
            found += [float(step(x)) for _ in range(3)]
            with torch.no_grad():
                net[0].weight.mul_(0.5)
            wanted = net[0].weight.detach().clone()
            if parted:  # through a state, which makes masters anew where they do not fit
                state = dt.gather_state_dict(model, opt)
                dt.load_state_dict(model, opt, state)
            float(step(x * 0))
            assert (net[0].weight - wanted).abs().max() < 0.02
            found += [float(step(x)) for _ in range(3)]
        losses.append(found)
        assert opt.state[net[0].weight]["master_param"].dtype == torch.float32
    assert losses[0] == losses[1]


def test_meta_device_model_keeps_values_on_ranks_until_loaded() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(net, mesh, {"weight": dict(tp=dt.Row())}, init="reset")
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    step = dt.train_step(model, lambda m, x: m(x).square().mean(), opt)
    with dt.launch(mesh):  # nothing changed: nothing is lost
        dt.compile(lambda m, x: m(x), mesh)(model, X)
    first = float(step(X))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dt.launch(mesh):  # goes on from the implicit session's
            second = float(step(X))
            state = dt.gather_state_dict(model, opt)
            third = float(step(X))
    assert first > second > third
    assert [("not gathered" in str(w.message), w.filename) for w in caught] == [(True, __file__)]
    for read in (lambda: dt.gather_state_dict(model), lambda: step(X), opt.state_dict):
        with pytest.raises(RuntimeError, match=r"launch that has ended(.|\n)*load_state_dict"):
            read()
    dt.load_state_dict(model, opt, state)
    assert float(step(X)) == third
    with dt.launch(mesh):
        assert float(step(X)) < third
        dt.gather_state_dict(model, opt)


@pytest.mark.slow
def test_transformers_model_saves_and_generates_between_steps(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=missing("transformers"))
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(config)
    plain = copy.deepcopy(net)
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(net, mesh, {"*.c_fc.weight": dict(tp=dt.Column())})
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (net, plain)]
    step = dt.train_step(model, lambda m, x: m(input_ids=x, labels=x).loss, opts[0])
    tokens = torch.arange(16).view(2, 8)

    def train() -> None:
        step(tokens)
        plain(input_ids=tokens, labels=tokens).loss.backward()
        opts[1].step()
        opts[1].zero_grad()

    def check(folder: Path) -> None:
        net.save_pretrained(folder)
        read = transformers.GPT2LMHeadModel.from_pretrained(folder)
        same(read.state_dict(), plain.state_dict(), folder.name)
        train()
        found = [
            m.generate(tokens[:1, :2], max_new_tokens=4, do_sample=False) for m in (net, plain)
        ]
        assert torch.equal(*found)

    with dt.launch(mesh):
        train()
        check(tmp_path / "inside")
        train()
    same(net.state_dict(), plain.state_dict(), "after")
    with dt.launch(mesh):
        train()
        check(tmp_path / "in a second")
