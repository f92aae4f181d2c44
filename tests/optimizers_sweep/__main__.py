r"""Compare optimizers of other packages with torch: `python -m tests.optimizers_sweep`.

    pip install --target more --no-deps lion-pytorch schedulefree pytorch_optimizer \
        torch_optimizer pytorch_ranger
    PYTHONPATH=.:more python -m tests.optimizers_sweep                # writes the table
    PYTHONPATH=.:more python -m tests.optimizers_sweep --only '*Lion' # some, printed

Every class of the installed packages is built with defaults and trains a small net for 6 steps,
with tensor parallelism over two ranks and with ZeRO-1. *Right*: losses, values, states, options and
attributes equal torch's, in float32 or, for an update per parameter, in float64 (decompositions of
matrices enlarge the rounding of gradients); *refused*: the probe says that it is neither
elementwise nor per parameter; *wrong*: a number differs. Exit status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
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

    def muon(m: nn.Module) -> Any:
        parts: tuple[list[Any], list[Any]] = ([], [])
        for p in m.parameters():
            parts[p.ndim > 1].append(p)
        return cls([dict(params=own, use_muon=bool(i)) for i, own in enumerate(parts)])

    return [
        lambda m: cls(m.parameters()),
        lambda m: cls(m.parameters(), lr=1e-3),
        muon,
        lambda m: cls(torch.optim.SGD(m.parameters(), lr=0.1)),
        lambda m: cls(m.parameters(), torch.optim.SGD),
        lambda m: cls(m.parameters(), torch.optim.SGD, lr=0.1),
        lambda m: cls(m.parameters(), num_iterations=STEPS),
        lambda m: cls(m.parameters(), 1e-3, STEPS),
        lambda m: cls(m),
        lambda m: cls(m, lr=1e-3),
        lambda m: cls([p for p in m.parameters() if p.ndim == 2]),
    ]


def built(cls: Any) -> Callable[[nn.Module], torch.optim.Optimizer] | str:
    """Return the first way whose optimizer steps in torch, or else the first that builds one, or
    the error of the first."""
    errors: list[str] = []
    builds: list[Callable[[nn.Module], torch.optim.Optimizer]] = []
    for way in ways(cls):
        module = net(torch.float32)
        try:
            optimizer = way(module)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            continue
        builds.append(way)
        try:
            mode(optimizer)
            loss_fn(module, batches(torch.float32)[0]).backward()
            optimizer.step()
        except Exception:
            continue
        return way
    return builds[0] if builds else errors[0]


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batches(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(6, 8, generator=draw, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def mode(optimizer: Any) -> None:
    """Set the mode that schedulefree needs before a step."""
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        optimizer.train()


def by_torch(make: Callable[[nn.Module], Any], dtype: torch.dtype) -> tuple[Net, Any, list[float]]:
    module = net(dtype)
    optimizer = make(module)
    mode(optimizer)
    losses: list[float] = []
    for x in batches(dtype):
        optimizer.zero_grad()
        loss = loss_fn(module, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return module, optimizer, losses


def judge(name: str, cls: type[torch.optim.Optimizer]) -> Found:
    make = built(cls)
    if isinstance(make, str):
        return Found(name=name, verdict="not built", why=make)
    found = trained(name, make, torch.float32)
    if found.verdict == "wrong" and found.updates == "per parameter":
        exact = trained(name, make, torch.float64)
        found = exact if exact.verdict == "right" else found
    return found


def trained(name: str, make: Callable[[nn.Module], Any], dtype: torch.dtype) -> Found:
    """Compare training in ``dtype`` with torch's, in each placement."""
    report: Any = None
    for how, (mesh, placements, options) in PLACED.items():
        module = net(dtype)
        optimizer = make(module)
        mode(optimizer)
        model = dt.parallelize(module, mesh, placements, **options)
        inputs = dict(dp=dt.Row()) if "dp" in mesh.shape else None
        try:
            step = dt.train_step(model, loss_fn, optimizer, inputs=inputs)
        except dt.PlanningError as error:
            first, _, rest = str(error).partition("\n")
            line = rest.partition("its line: ")[2].partition("\n")[0]
            return Found(name=name, verdict="refused", why=f"{first} {line}".strip())
        report = step.elementwise
        expected, plain, wanted = by_torch(make, dtype)
        with dt.launch(mesh):
            losses = [float(step(x)) for x in batches(dtype)]
        why = difference(expected, plain, wanted, module, optimizer, losses)
        if why:
            updates = "" if report is None else report.updates
            return Found(name=name, verdict="wrong", why=f"{how}: {why}", updates=updates)
    if report is None:
        return Found(name=name, verdict="right", state="as its parent")
    return Found(
        name=name,
        verdict="right",
        updates=report.updates,
        state=", ".join(report.state),
        changed=", ".join(report.changed),
    )


def difference(
    expected: Net, plain: Any, wanted: list[float], module: Net, optimizer: Any, losses: list[float]
) -> str:
    """Return what differs from torch, or ""."""
    for number, (a, b) in enumerate(zip(losses, wanted, strict=True)):
        if not abs(a - b) <= 1e-4 * max(1.0, abs(b)):
            return f"loss {number + 1} is {a:.6g}, in torch {b:.6g}"
    for (label, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
        if not torch.allclose(p, q, rtol=1e-4, atol=1e-5):
            return f"{label} differs by {float((p - q).abs().max()):.2g}"
        one, other = optimizer.state.get(p, {}), plain.state.get(q, {})
        for key in one.keys() | other.keys():
            if not is_close(one.get(key), other.get(key)):
                return f"{key} of the state of {label} differs: {one.get(key)}, {other.get(key)}"
    for one, other in zip(optimizer.param_groups, plain.param_groups, strict=True):
        if not plain_equal(copy_plain(options_of(one)), copy_plain(options_of(other))):
            return "options of a group differ"
    ours, theirs = plain_attributes(optimizer), plain_attributes(plain)
    return "" if plain_equal(ours, theirs) else "attributes differ"


def is_close(x: Any, y: Any) -> bool:
    """Return whether the tensors in two states are close, and all else is equal."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        is_alike = (x.shape, x.dtype) == (y.shape, y.dtype)
        return is_alike and torch.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(is_close(x[k], y[k]) for k in x)
    if isinstance(x, list | tuple | deque) and isinstance(y, list | tuple | deque):
        return type(x) is type(y) and len(x) == len(y) and all(map(is_close, x, y))
    if type(x) is type(y) and hasattr(x, "__dict__") and not isinstance(x, type):
        return is_close(vars(x), vars(y))
    if isinstance(x, float) and isinstance(y, float):
        return math.isclose(x, y, rel_tol=1e-3, abs_tol=1e-5) or plain_equal(x, y)
    return plain_equal(x, y)


def table(found: Sequence[Found]) -> str:
    def elementwise(f: Found) -> bool:
        return f.verdict == "right" and f.updates != "per parameter"

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
