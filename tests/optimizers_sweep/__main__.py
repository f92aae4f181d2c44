r"""Compare optimizers of other packages with torch: `python -m tests.optimizers_sweep`.

    pip install --target more --no-deps lion-pytorch schedulefree pytorch_optimizer \
        torch_optimizer pytorch_ranger
    PYTHONPATH=.:more python -m tests.optimizers_sweep                # writes the table
    PYTHONPATH=.:more python -m tests.optimizers_sweep --only '*Lion' # some, printed

Every class of the installed packages is built with defaults and trains a small net for 6 steps,
with tensor parallelism over two ranks and with ZeRO-1. *Right*: losses, values, states, options and
attributes equal torch's. For an update per parameter it suffices that they have the bits of torch's
steps from the same gradients, since decompositions of matrices enlarge the rounding of gradients.
*Refused*: the probe says that it is neither elementwise nor per parameter; *wrong*: a number
differs. Exit status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.runtime.optimizer.elementwise.per_parameter import same
from dtensor.runtime.optimizer.optimizer_kind import (
    copy_plain,
    options_of,
    plain_attributes,
    plain_equal,
)
from dtensor.runtime.optimizer.shard_optimizer import ELEMENTWISE

PACKAGES = {  # module -> distribution
    "torch.optim": "torch",
    "lion_pytorch": "lion-pytorch",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch_optimizer",
}
ROOT = Path(__file__).parents[2]
STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


PLACED: dict[str, tuple[dt.Mesh, dict[str, Any], dict[str, Any]]] = {
    "tp2": (
        dt.Mesh(tp=2),
        {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())},
        {},
    ),
    "ZeRO-1": (dt.Mesh(dp=2), {}, {"zero": {"dp": 1}}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a class. ``verdict``: right, refused, wrong or not built."""

    name: str
    verdict: str
    why: str = ""
    updates: str = ""
    state: str = ""
    changed: str = ""


def classes() -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    """Return the optimizer classes of the installed packages, by name."""
    seen: set[type] = set()
    for module in PACKAGES:
        try:
            package = importlib.import_module(module)
        except ModuleNotFoundError:
            print(f"{module} is not installed", file=sys.stderr)
            continue
        for name, cls in sorted(vars(package).items()):
            if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
                continue
            if cls is torch.optim.Optimizer or cls in ELEMENTWISE or cls in seen:
                continue
            seen.add(cls)
            yield f"{module}.{name}", cls


def ways(cls: Any) -> list[Callable[[nn.Module], torch.optim.Optimizer]]:
    """Return ways to build an optimizer: with defaults, a learning rate, Muon's groups, around
    another optimizer, with the number of steps, with the model, or over matrices only."""
    sgd = torch.optim.SGD

    def muon(m: nn.Module) -> Any:
        parts: tuple[list[Any], list[Any]] = ([], [])
        for p in m.parameters():
            parts[p.ndim > 1].append(p)
        return cls([dict(params=own, use_muon=bool(i)) for i, own in enumerate(parts)])

    return [
        lambda m: cls(m.parameters()),
        lambda m: cls(m.parameters(), lr=1e-3),
        muon,
        lambda m: cls(sgd(m.parameters(), lr=0.1)),
        lambda m: cls(m.parameters(), sgd),
        lambda m: cls(m.parameters(), sgd, lr=0.1),
        lambda m: cls(m, m.parameters(), sgd, lr=0.1),
        lambda m: cls(m.parameters(), sgd(m.parameters(), lr=0.1), m, None),
        lambda m: cls(m.parameters(), num_iterations=STEPS),
        lambda m: cls(m.parameters(), 1e-3, STEPS),
        lambda m: cls(m),
        lambda m: cls(m, lr=1e-3),
        lambda m: cls([p for p in m.parameters() if p.ndim == 2]),
    ]


def built(cls: Any) -> Callable[[nn.Module], torch.optim.Optimizer] | str:
    """Return the first way whose optimizer steps in torch, or else the first that builds one, or
    an error: that there is no process group, or the error of the first way."""
    errors: list[str] = []
    builds: list[Callable[[nn.Module], torch.optim.Optimizer]] = []
    for way in ways(cls):
        module = net()
        try:
            optimizer = way(module)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            continue
        builds.append(way)
        try:
            mode(optimizer)
            loss_fn(module, batches()[0]).backward()
            optimizer.step()
        except Exception:
            continue
        return way
    without_group = [error for error in errors if "process group" in error]
    return builds[0] if builds else (without_group or errors)[0]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(6, 8, generator=draw) for _ in range(STEPS)]


def mode(optimizer: Any) -> None:
    """Set the mode that schedulefree needs before a step."""
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        optimizer.train()


def by_torch(
    make: Callable[[nn.Module], Any], gradients: Sequence[Mapping[str, Tensor]] | None
) -> tuple[Net, Any, list[float]]:
    """Return torch's module, optimizer and losses. ``gradients``: take the steps from these."""
    module = net()
    optimizer = make(module)
    mode(optimizer)
    losses: list[float] = []
    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_fn(module, x)
        loss.backward()
        for label, p in module.named_parameters():
            if gradients is not None:
                p.grad = gradients[number].get(label)
        optimizer.step()
        losses.append(loss.item())
    return module, optimizer, losses


def judge(name: str, cls: type[torch.optim.Optimizer]) -> Found:
    make = built(cls)
    if isinstance(make, str):
        return Found(name=name, verdict="not built", why=make)
    found = trained(name, make)
    if found.verdict == "wrong" and found.updates == "per parameter":
        return trained(name, make, same_gradients=True)
    return found


def trained(name: str, make: Callable[[nn.Module], Any], same_gradients: bool = False) -> Found:
    """Compare training with torch's, in each placement. ``same_gradients``: the bits of torch's
    steps from the same gradients."""
    report: Any = None
    for how, (mesh, placements, options) in PLACED.items():
        module = net()
        optimizer = make(module)
        mode(optimizer)
        model = dt.parallelize(module, mesh, placements, **options)
        inputs = dict(dp=dt.Row()) if "dp" in mesh.shape else None
        try:
            step = dt.train_step(
                model, loss_fn, optimizer, inputs=inputs, keep_gradients=same_gradients
            )
        except dt.PlanningError as error:
            first, _, rest = str(error).partition("\n")
            line = rest.partition("its line: ")[2].partition("\n")[0]
            return Found(name=name, verdict="refused", why=f"{first} {line}".strip())
        report = step.elementwise
        losses: list[float] = []
        gradients: list[Mapping[str, Tensor]] = []
        with dt.launch(mesh):
            for x in batches():
                losses.append(float(step(x)))
                gradients += [step.gradients()] if same_gradients else []
        expected, plain, wanted = by_torch(make, gradients or None)
        why = difference(expected, plain, wanted, module, optimizer, losses, same_gradients)
        if why:
            updates = "" if report is None else report.updates
            return Found(name=name, verdict="wrong", why=f"{how}: {why}", updates=updates)
    if report is None:
        return Found(name=name, verdict="right", state="as its parent")
    return Found(
        name=name,
        verdict="right",
        updates=report.updates + (", from the same gradients" if same_gradients else ""),
        state=", ".join(report.state),
        changed=", ".join(report.changed),
    )


def difference(
    expected: Net,
    plain: Any,
    wanted: list[float],
    module: Net,
    optimizer: Any,
    losses: list[float],
    exact: bool,
) -> str:
    """Return what differs from torch, or ""."""
    for number, (a, b) in enumerate(zip(losses, wanted, strict=True)):
        if not (exact or abs(a - b) <= 1e-4 * max(1.0, abs(b))):
            return f"loss {number + 1} is {a:.6g}, in torch {b:.6g}"
    for (label, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
        if not (torch.equal(p, q) if exact else torch.allclose(p, q, rtol=1e-4, atol=1e-5)):
            return f"{label} differs by {float((p - q).abs().max()):.2g}"
        one, other = optimizer.state.get(p, {}), plain.state.get(q, {})
        for key in one.keys() | other.keys():
            if not is_close(one.get(key), other.get(key), exact):
                return f"{key} of the state of {label} differs: {one.get(key)}, {other.get(key)}"
    for one, other in zip(optimizer.param_groups, plain.param_groups, strict=True):
        if not plain_equal(copy_plain(options_of(one)), copy_plain(options_of(other))):
            return "options of a group differ"
    ours, theirs = plain_attributes(optimizer), plain_attributes(plain)
    return "" if plain_equal(ours, theirs) else "attributes differ"


def is_close(x: Any, y: Any, exact: bool) -> bool:
    """Return whether the tensors in two states are close, or equal if ``exact``, and all else is
    equal."""
    if exact:
        return same(x, y)
    match x:
        case Tensor() if isinstance(y, Tensor):
            is_alike = (x.shape, x.dtype) == (y.shape, y.dtype)
            return is_alike and torch.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True)
        case dict() if isinstance(y, dict):
            return x.keys() == y.keys() and all(is_close(x[k], y[k], exact) for k in x)
        case list() | tuple() | deque() if type(x) is type(y):
            pairs = zip(x, y, strict=False)
            return len(x) == len(y) and all(is_close(a, b, exact) for a, b in pairs)
        case float() if isinstance(y, float):
            return math.isclose(x, y, rel_tol=1e-3, abs_tol=1e-5) or plain_equal(x, y)
        case _ if hasattr(x, "__dict__") and type(x) is type(y):
            return is_close(vars(x), vars(y), exact)
        case _:
            return plain_equal(x, y)


def table(found: Sequence[Found]) -> str:
    def elementwise(f: Found) -> bool:
        return f.verdict == "right" and not f.updates.startswith("per")

    counts = {
        v: sum(f.verdict == v for f in found) for v in ("right", "refused", "wrong", "not built")
    }
    versions = ", ".join(
        f"{name} {version(name)}"
        for m, name in PACKAGES.items()
        if any(f.name.startswith(m) for f in found)
    )
    lines = [
        "# Optimizers that are not torch's, or not known",
        "",
        f"`python -m tests.optimizers_sweep`, {versions}. Each class trains a small net for "
        f"{STEPS} steps with its defaults, at tp=2 and at dp=2 with ZeRO-1, beside plain torch.",
        "",
        f"{len(found)} classes: {counts['right']} are right ({sum(map(elementwise, found))} "
        f"elementwise), {counts['refused']} are refused, {counts['wrong']} are wrong; "
        f"{counts['not built']} want arguments that the command does not know.",
        "",
    ]
    for verdict, columns in (
        ("wrong", ("class", "what differs")),
        ("right", ("class", "updates", "state of a parameter", "what a step changes besides")),
        ("refused", ("class", "why")),
        ("not built", ("class", "what it says")),
    ):
        mine = [f for f in found if f.verdict == verdict]
        if not mine:
            continue
        lines += [
            f"## {verdict.capitalize()}",
            "",
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
        ]
        for f in mine:
            cells = (f.updates, f.state, f.changed) if verdict == "right" else (f.why,)
            text = " | ".join(cell.replace("|", "\\|").replace(".py:", ":") for cell in cells)
            lines.append(f"| `{f.name}` | {text} |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.optimizers_sweep", description=__doc__)
    parser.add_argument("--only", action="append", help="a glob over names; may be repeated")
    default = ROOT / "benchmarks" / "results" / "optimizers.md"
    parser.add_argument("--table", type=Path, default=default)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    found: list[Found] = []
    for name, cls in classes():
        if options.only and not any(fnmatch.fnmatchcase(name, glob) for glob in options.only):
            continue
        try:
            one = judge(name, cls)
        except Exception as error:  # the class, or what was to carry it
            one = Found(name=name, verdict="wrong", why=f"{type(error).__name__}: {error}"[:300])
        found.append(one)
        print(f"{one.verdict:9} {name}  {one.why.partition(chr(10))[0][:200]}", flush=True)
    text = table(found)
    if options.only:
        print(text)
    else:
        options.table.write_text(text)
    return int(any(one.verdict == "wrong" for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
