"""Small optimizers for tests: elementwise ones, ones that need whole parameters, and ones that no
step takes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer


class Each(Optimizer):
    """Base class: subclasses define the update of one parameter from its gradient, state and
    group."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"])


# -- elementwise -----------------------------------------------------------------------------------


class Lion(Each):
    """Replaces a state tensor at each step, and writes to the gradient."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.get("exp_avg", torch.zeros_like(p))
        p.sub_((0.9 * m + 0.1 * g).sign_(), alpha=group["lr"])
        state["exp_avg"] = 0.99 * m + g.mul_(0.01)


class Counted(Optimizer):
    """Keeps Python numbers in a parameter's state, in the group and on the object."""

    def __init__(self, params: Any, lr: float = 0.05, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "k": 0, "lr_max": -1.0})
        self.num_steps = 0
        self.scale: Callable[[int], float] = lambda k: 1 / (1 + k)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            group["lr_max"] = max(group["lr"], group["lr_max"])
            weight = group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr_max"] ** 2
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, seen=0.0, m=torch.zeros_like(p), prior=None)
                state["step"] += 1
                state["seen"] += group["lr"]
                state["m"].lerp_(p.grad, 0.1)
                by = self.scale(group["k"]) / (state["seen"] + state["step"]) + 0.01 * weight
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(state["m"], alpha=by * self.num_steps)
            group["k"] += 1


class ByText(Counted):
    """Keeps numbers in the state under text keys, as MADGRAD and EmoNavi."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        state: Any = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0])
        state["rates"]["sum"] = state["rates"].get("sum", 0.0) + 0.5
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.mul_(1 - 0.01 * state["rates"]["sum"] * float(state["k"] + 1))
        super().step()
        state["k"].add_(1)


class Amsgrad(Each):
    """Has a state entry that an option adds."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, amsgrad=False)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        v = state.setdefault("v", torch.zeros_like(p))
        v.lerp_(g.square(), 0.1)
        if group["amsgrad"]:
            v = torch.maximum(state.setdefault("most", torch.zeros_like(p)), v)
            state["most"] = v
        p.addcdiv_(g, v.sqrt().add_(1e-3), value=-group["lr"])


class Wide(Each):
    """Keeps float32 state for any parameter dtype, and a number as a tensor of one element."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros_like(p, dtype=torch.float32)
            state["count"] = torch.zeros(1, dtype=torch.int64)
        state["count"] += 1
        state["m"].lerp_(g.float(), 0.5)
        p.sub_((state["m"] / state["count"]).to(p.dtype), alpha=group["lr"])


class Begun(Each):
    """Has state from the start, as MADGRAD, and a cache shared by all groups."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, cache=[None, None])
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].update(v=torch.full_like(p, 0.1), first=p.detach().clone(), n=0)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["n"] += 1
        if group["cache"][0] != state["n"]:
            group["cache"][:] = state["n"], 1 / state["n"]
        state["v"].addcmul_(g, g)
        p.sub_(g / state["v"].sqrt() * group["cache"][1], alpha=group["lr"])
        p.lerp_(state["first"], 0.01)


class Renamed(torch.optim.AdamW):
    """Differs from its parent only in its `__init__`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.02, betas=(0.8, 0.9))


class Hook:
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody calls it")


class Mixed(Hook, torch.optim.AdamW):
    """Inherits from another class beside AdamW, so it must be probed, though it updates as
    AdamW."""


class Doubled(torch.optim.SGD):
    """Differs from its parent: it steps twice."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        super().step()


# -- what is not elementwise -----------------------------------------------------------------------


class Normed(Each):
    """Uses the norm of a parameter, as LAMB and LARS."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * (p.norm() / g.norm()), alpha=group["lr"])


class RootMeanSquare(Each):
    """Uses the root mean square of an update, as StableAdamW."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / g.square().mean().sqrt().clamp(min=1), alpha=group["lr"])


class SkipsNotFinite(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if torch.isfinite(g).all():
            p.sub_(g, alpha=group["lr"])


class DecayByDim(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.ndim > 1:
            p.mul_(1 - 1e-3 * group["lr"])
        p.sub_(g, alpha=group["lr"])


class ByNumel(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / p.numel() ** 0.5)


class Reads(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["lr"] = min(group["lr"], g.reshape(-1).tolist()[0] ** 2)
        p.sub_(g, alpha=group["lr"])


class Indexes(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g.view(-1)[0] = 0
        p.sub_(g, alpha=group["lr"])


class Multiplies(Each):
    """Multiplies matrices, as Muon, SOAP and Shampoo."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if g.ndim == 2:
            g = g @ (g.t() @ g)
        p.sub_(g, alpha=group["lr"])


class Draws(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g + 0.01 * torch.randn_like(g), alpha=group["lr"])


class DrawsInPython(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * random.random())


class Factored(Each):
    """Keeps a row in place of a matrix, as Adafactor."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if g.ndim > 1:
            state["row"] = g.new_zeros(g.shape[:-1])
        p.sub_(g, alpha=group["lr"])


class KeepsRows(Each):
    """Keeps the number of rows in the state, and changes an attribute, as Adam-mini."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.began = False

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.began = True
        rows = state.setdefault("rows", p.shape[0])
        p.sub_(g / g.view(rows, -1).abs().mean(), alpha=group["lr"])


class InBlocks(Each):
    """Keeps 8-bit state: codes, with a scale for each block."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("codes", torch.zeros(p.numel() // 2, dtype=torch.uint8))
        p.sub_(g, alpha=group["lr"])


class Queues(Each):
    """Keeps older gradients, as AdaShift."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("queue", deque(maxlen=3)).append(g.clone())
        p.sub_(state["queue"][0], alpha=group["lr"])


class SharedState(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.state["all"]["mask"] = torch.ones(2)  # type: ignore[index]
        p.sub_(g, alpha=group["lr"])


class CountsElements(Each):
    """Keeps a number in the group that would differ on shards."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["elements"] = group.get("elements", 0) + p.numel()
        p.sub_(g, alpha=group["lr"])


class Wrapper(Each):
    """Contains another optimizer, as SAM and Lookahead."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(params, lr)


class Holds(Each):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.mask = torch.ones(3)


class Raises(Each):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise ValueError("not today")


class Named(Each):
    """Has a group for each parameter with its name, the generator that gave them, and a class of
    helper; cuts "q" into heads, as Adam-mini."""

    def __init__(self, named: Any, lr: float = 0.05) -> None:
        self.named, self.helper = named, Helper(8)
        super().__init__([{"params": [p], "name": name} for name, p in named], lr)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.begun = True
        g = self.helper.heads(g) if "q" in group["name"] else g
        p.sub_((g / g.square().mean(-1, keepdim=True).sqrt()).view_as(p), alpha=group["lr"])


class Helper:
    def __init__(self, size: int) -> None:
        self.size = size

    def heads(self, x: Tensor) -> Tensor:
        return x.view(-1, self.size)


class Models(Named):
    """Reads an attribute that ranks do not have."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if list(self.named):
            p.sub_(g, alpha=group["lr"])


class GlobalNorm(Optimizer):
    """Divides by the norm of all gradients, as LAMB does in some packages."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        total = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = total + p.grad.double().square().sum()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / total.sqrt().to(p.dtype), alpha=group["lr"])


class Closes(Each):
    """Needs a closure, as LBFGS."""

    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class Hessian(Each):
    """Needs a second backward, as AdaHessian."""

    @torch.enable_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            torch.autograd.grad(grads, group["params"], grads)


REFUSED: dict[type[Optimizer], str] = {
    Normed: r"aten.linalg_vector_norm.*\n  its line: .*p.norm\(\) / g.norm\(\)",
    RootMeanSquare: r"aten.mean.*\n  its line: .*g.square\(\).mean\(\)",
    SkipsNotFinite: r"aten.all.*\n  its line: .*if torch.isfinite\(g\).all\(\)",
    DecayByDim: r"on shards the value differs in .* elements, by up to .*\n  a parameter of shape",
    ByNumel: "on shards the value differs",
    Reads: r"Tensor.tolist reads elements of a parameter to Python.*\n.*g.reshape",
    Indexes: r"aten.select.*\n.*g.view\(-1\)\[0\] = 0",
    Multiplies: r"aten.(t|mm).*\n.*g @ \(g.t\(\) @ g\)",
    Draws: r"aten.randn_like.* draws random numbers.*\n.*randn_like",
    DrawsInPython: "draws from Python's random",
    Factored: r"keeps a tensor of shape \[6\] for a parameter of \[6, 5\] under 'row'",
    InBlocks: "keeps a tensor of shape .* under 'codes'",
    Queues: "keeps a deque under 'queue'",
    SharedState: "keeps a state that is of no parameter under 'all'",
    CountsElements: "a step changes its 'elements' of a group depending on the parameters",
    Wrapper: "its attribute inner is another optimizer, a SGD",
    Holds: r"its attribute mask is a tensor of shape \[3\]",
    Raises: r"raised in its probe, on whole parameters: ValueError: not today\n  its line: .*today",
    Doubled: "",  # elementwise, and in no table: it needs the statement
}
"""Optimizers that are stated elementwise, and the error of each."""

PER_PARAMETER = (
    *(Normed, RootMeanSquare, SkipsNotFinite, DecayByDim, ByNumel, Indexes, Multiplies, Factored),
    *(InBlocks, KeepsRows, Queues),
)
"""Optimizers that need whole parameters."""

_PAIR = r"parameter \d of group 0 \(of shape .*parameter \d of group 0 \(of shape "
UNACCEPTED: dict[type[Optimizer], str] = {
    GlobalNorm: rf"GlobalNorm couples parameters: with other values and gradients of {_PAIR}.*"
    r"\n  its line: .*total = total \+ p.grad",
    Reads: rf"Reads couples parameters: .*{_PAIR}",
    Draws: r"aten.randn_like.* draws random numbers.*\n  its line: .*randn_like",
    DrawsInPython: "draws from Python's random",
    SharedState: "keeps a state that is of no parameter under 'all'",
    CountsElements: r"a step changes its 'elements' of a group depending on .*\d",
    Wrapper: "its attribute inner is another optimizer, a SGD",
    Holds: r"its attribute mask is a tensor of shape \[3\]",
    Raises: r"raised in its probe, on whole parameters: ValueError: not today\n  its line: .*today",
    Closes: r"needs a closure that computes the loss again.*\n  its line: .*def step",
    Hessian: r"needs a second backward.*\n  its line: .*autograd.grad",
    torch.optim.SparseAdam: r"needs sparse gradients.*\n  its line: .*sparse_adam",
    torch.optim.LBFGS: r"LBFGS needs a closure",
}
"""Optimizers that no step takes, and the error of each."""
