r"""Compare optimizers that need whole parameters with torch.

    PYTHONPATH=.:more python -m tests.optimizers_sweep.owned              # writes the table
    PYTHONPATH=.:more python -m tests.optimizers_sweep.owned --only 'Muon*' --placed dp2 tp2

Each optimizer trains a small GPT for 5 steps on each placement, plainly, with clipping and with
gradients accumulated over 4 microbatches, in float32 and float64. There are two checks of a run:

- *Bits*: torch takes the same steps from the gradients that dtensor's steps had. The values and the
  optimizer state that result must be bitwise equal.
- *End to end*: plain torch trains the same model. The largest error of a parameter, relative to its
  largest update, is at most 1e-5 in float32 and 1e-9 in float64. Some optimizers enlarge rounding
  errors (Muon, SOAP). There the limit is twice torch's spread: the largest difference between
  three runs of torch, which sum the batch in 1, 2 and 8 parts.

The packages are those of `python -m tests.optimizers_sweep`, with adam-mini. Exit status 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

import dtensor as dt
from tests.models import batch, loss_fn
from tests.optimizers import Normed
from tests.optimizers_sweep.__main__ import ROOT
from tests.training import SIX, assert_same_bits, make_model

STEPS = 5
CLIP = 0.3
PLACED: dict[str, tuple[str, int]] = {  # name in tests.training, level of ZeRO
    "tp2": ("tp2", 0),
    "dp2": ("dp2", 0),
    "ZeRO-1": ("dp2", 1),
    "ZeRO-2": ("dp2", 2),
    "ZeRO-3": ("dp2", 3),
    "pp2": ("pp2", 0),
    "dp2tp2": ("dp2_tp2", 0),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": dict(schedule=dt.GPipe(1)),
    "clipping": dict(schedule=dt.GPipe(1), clip_grad_norm=CLIP),
    "accumulation": dict(schedule=dt.OneFOneB(4)),
}
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-9}
OF_SPREAD = 2
"""More than 1, because the spread is the largest of three samples only."""

Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``make``: the optimizers of a model. ``package``: the distribution. ``is_scheduled``: whether
    each optimizer has a scheduler."""

    make: Make
    package: str = "torch"
    is_scheduled: bool = False

    def schedulers(self, optimizers: Optimizers) -> list[LRScheduler]:
        """Return a scheduler for each optimizer, of different kinds."""
        kinds: list[Callable[[torch.optim.Optimizer], LRScheduler]] = [
            lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
            lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
        ]
        pairs = zip(optimizers, kinds, strict=False)
        return [kind(optimizer) for optimizer, kind in pairs] if self.is_scheduled else []


def muon_and_adamw(module: nn.Module) -> Optimizers:
    """Return Muon for the matrices of the blocks, and AdamW for the other parameters."""
    named = [*module.named_parameters()]
    matrices = [p for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    others = [p for name, p in named if not (name.startswith("blocks.") and p.ndim == 2)]
    # In torch a fused AdamW rounds as dtensor's. The larger ``eps`` limits updates from gradients
    # that are only rounding errors.
    adamw = torch.optim.AdamW(others, lr=1e-3, eps=1e-6, fused=True)
    return [torch.optim.Muon(matrices, lr=1e-3), adamw]


def of(module: str, name: str, **options: Any) -> Make:
    """Return a function that builds an optimizer of a package over all parameters."""

    def make(model: nn.Module) -> Optimizers:
        return [getattr(importlib.import_module(module), name)(model.parameters(), **options)]

    return make


def adam_mini(model: nn.Module) -> Optimizers:
    cls = importlib.import_module("adam_mini").Adam_mini
    return [cls(model.named_parameters(), lr=1e-2, eps=1e-3, dim=16, n_heads=4, verbose=False)]


def schedule_free(model: nn.Module) -> Optimizers:
    (optimizer,) = of("schedulefree", "AdamWScheduleFree", lr=1e-2, eps=1e-3)(model)
    optimizer.train()  # type: ignore[attr-defined]
    return [optimizer]


MORE = "pytorch_optimizer"
OTHER = "torch_optimizer"
CASES: dict[str, Case] = {
    "Muon and AdamW": Case(make=muon_and_adamw),
    "Muon and AdamW, scheduled": Case(make=muon_and_adamw, is_scheduled=True),
    "torch Adafactor": Case(make=of("torch.optim", "Adafactor", lr=1e-2)),
    "transformers Adafactor": Case(
        make=of("transformers.optimization", "Adafactor"), package="transformers"
    ),
    "Lamb": Case(make=of(MORE, "Lamb", lr=1e-2, eps=1e-4), package=MORE),
    "Lamb of torch_optimizer": Case(make=of(OTHER, "Lamb", lr=1e-2, eps=1e-4), package=OTHER),
    "LARS": Case(make=of(MORE, "LARS", lr=1.0), package=MORE),
    "NovoGrad": Case(make=of(MORE, "NovoGrad", lr=1e-2), package=MORE),
    "NovoGrad of torch_optimizer": Case(make=of(OTHER, "NovoGrad", lr=1e-2), package=OTHER),
    "SM3": Case(make=of(MORE, "SM3"), package=MORE),
    "SOAP": Case(make=of(MORE, "SOAP", lr=1e-2, eps=1e-3, precondition_frequency=2), package=MORE),
    "Shampoo": Case(make=of(MORE, "Shampoo", matrix_eps=1e-3), package=MORE),
    "Shampoo of torch_optimizer": Case(make=of(OTHER, "Shampoo", epsilon=1e-2), package=OTHER),
    "Adam-mini": Case(make=adam_mini, package="adam-mini"),
    "schedulefree AdamW": Case(make=schedule_free, package="schedulefree"),
    "of a user": Case(make=lambda model: [Normed(model.parameters())]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a run. ``same``: whether all bits are torch's; ``error``: the largest relative
    error of a parameter; ``spread``: torch's spread; ``why``: what is wrong, or ""."""

    same: bool = False
    error: float = float("inf")
    spread: float = 0.0
    why: str = ""


def build(dtype: torch.dtype) -> nn.Module:
    return make_model(bias=False).to(dtype)  # the gradient of a key's bias is only rounding errors


def batches() -> list[tuple[Tensor, Tensor]]:
    return [batch(seed, size=8) for seed in range(STEPS)]


def by_torch(case: Case, dtype: torch.dtype, way: str, parts: int = 1) -> dict[str, Tensor]:
    """Return the parameters after plain torch's steps. ``parts``: the gradient of a batch is the
    sum of the gradients of so many parts."""
    module = build(dtype)
    optimizers = case.make(module)
    schedulers = case.schedulers(optimizers)
    for one in batches():
        for part in zip(*(x.chunk(parts) for x in one), strict=True):
            (loss_fn(module, *part)[0] / parts).backward()
        if way == "clipping":
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        for each in (*optimizers, *schedulers):
            each.step()
        module.zero_grad()
    return values_of(module)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@cache
def expected(name: str, dtype: torch.dtype, way: str) -> tuple[dict[str, Tensor], float]:
    """Return plain torch's parameters, and torch's spread."""
    values = [by_torch(CASES[name], dtype, way, parts) for parts in (1, 2, 8)]
    return values[0], max(error_of(a, b, dtype) for a, b in combinations(values, 2))


def error_of(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtype: torch.dtype
) -> float:
    """Return the largest error of a parameter, relative to its largest update."""
    start = values_of(build(dtype))
    errors = [
        ((found[n] - wanted[n]).abs().max() / (wanted[n] - start[n]).abs().max()).item()
        for n in wanted
    ]
    return max(errors) if all(e == e for e in errors) else float("inf")


def follow(
    optimizers: Optimizers, module: nn.Module, gradients: Mapping[str, Tensor], norm: float | None
) -> None:
    """Take torch's step from these gradients, clipped as dtensor clips them."""
    for label, p in module.named_parameters():
        p.grad = gradients[label].clone()
        if norm is not None:
            p.grad /= torch.clamp((torch.tensor(norm, dtype=p.dtype) + 1e-6) / CLIP, min=1.0)
    for optimizer in optimizers:
        optimizer.step()


def judge(name: str, placed: str, way: str, dtype: torch.dtype) -> Found:
    case, (where, level) = CASES[name], PLACED[placed]
    module, plain = build(dtype), build(dtype)
    optimizers, followers = case.make(module), case.make(plain)
    schedulers = case.schedulers(optimizers), case.schedulers(followers)
    place = SIX[where]
    model = dt.parallelize(
        module, place.mesh, place.pins, stages=place.stages, zero={"dp": level} if level else None
    )
    step = dt.train_step(
        model, loss_fn, optimizers, inputs=place.inputs, keep_gradients=True, **WAYS[way]
    )
    with dt.launch(place.mesh):
        for one in batches():
            norm = step(*one).grad_norm
            gradients = step.gradients()
            follow(followers, plain, gradients, norm)
            for scheduler in (s for own in schedulers for s in own):
                scheduler.step()
        state = dt.gather_state_dict(model, optimizers)
    values = {label: state["model"][label] for label, _ in plain.named_parameters()}
    wanted, spread = expected(name, dtype, "clipping" if way == "clipping" else "plain")
    error, limit = error_of(values, wanted, dtype), max(LIMITS[dtype], OF_SPREAD * spread)
    why = "" if error <= limit else f"the largest error is {error:.1e}, the limit {limit:.1e}"
    try:
        assert_same_bits(values, values_of(plain), "values")
        for number, (own, other) in enumerate(zip(state["optimizer"], followers, strict=True)):
            theirs = other.state_dict()  # parameters without entries are left out
            theirs["state"] = {at: entries for at, entries in theirs["state"].items() if entries}
            assert_same_bits(own, theirs, f"optimizer {number}")
    except AssertionError as difference:
        return Found(error=error, spread=spread, why=f"bits: {difference}; {why}")
    return Found(same=True, error=error, spread=spread, why=why)


def runs(given: argparse.Namespace) -> Iterator[Any]:
    for name in CASES:
        if given.only and not any(fnmatch.fnmatchcase(name, glob) for glob in given.only):
            continue
        for dtype in given.dtypes:
            for where in given.placed:
                for way in given.ways:
                    yield name, where, way, getattr(torch, dtype)


def table(found: Mapping[tuple[str, str, str, torch.dtype], Found]) -> str:
    """Return the results as a page: a line for each optimizer and dtype."""
    wrong = [
        f"- {key[0]}, {key[1]}, {key[2]}, {key[3]}: {f.why}" for key, f in found.items() if f.why
    ]
    names = dict.fromkeys(key[0] for key in found)
    packages = dict.fromkeys(CASES[name].package for name in names)
    lines = [
        "# Optimizers that need whole parameters, beside torch",
        "",
        "`python -m tests.optimizers_sweep.owned`, "
        + ", ".join(f"{package} {version(package)}" for package in packages)
        + f". A GPT with two layers, {STEPS} steps. *Bits*: from the gradients of dtensor's steps, "
        "torch's steps give the same bits of all values and all state. *Error*: the largest error "
        "of a parameter after all steps, relative to its largest update, against plain torch. "
        "*Spread*: the largest difference between three runs of torch, which sum the batch in 1, 2 "
        "and 8 parts. The limit of an error is 1e-5 in float32 and 1e-9 in float64, or "
        f"{OF_SPREAD} times the spread if this is larger.",
        "",
        "| optimizer | dtype | runs | same bits | largest error | spread |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        for dtype in LIMITS:
            own = [f for key, f in found.items() if (key[0], key[3]) == (name, dtype)]
            if own:
                same = sum(f.same for f in own)
                error, spread = (max(getattr(f, key) for f in own) for key in ("error", "spread"))
                lines.append(
                    f"| {name} | {str(dtype)[6:]} | {len(own)} | {same} | {error:.1e} "
                    f"| {spread:.1e} |"
                )
    placed, ways = ({key[i]: None for key in found} for i in (1, 2))
    lines += ["", f"Placements: {', '.join(placed)}. Ways: {', '.join(ways)}.", ""]
    return "\n".join(lines + (["Wrong:", "", *wrong, ""] if wrong else []))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.optimizers_sweep.owned")
    parser.add_argument("--only", action="append", help="a glob over names; may be repeated")
    parser.add_argument("--placed", nargs="+", choices=PLACED, default=[*PLACED])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    dtypes = [str(dtype)[6:] for dtype in LIMITS]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    default = ROOT / "benchmarks" / "results" / "owned_optimizers.md"
    parser.add_argument("--table", type=Path, help="written if all optimizers run", default=default)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[tuple[str, str, str, torch.dtype], Found] = {}
    for key in runs(options):
        begin = time.perf_counter()
        try:
            one = judge(*key)
        except Exception as error:  # the optimizer's, or dtensor's
            one = Found(why=f"{type(error).__name__}: {error}"[:400])
        found[key] = one
        words = f"{key[0]}, {key[1]}, {key[2]}, {key[3]}"
        verdict = one.why or f"error {one.error:.1e}, spread {one.spread:.1e}"
        print(f"{words:55} {time.perf_counter() - begin:5.1f} s  {verdict}", flush=True)
    text = table(found)
    print(text)
    if not options.only:
        options.table.write_text(text)
    return int(any(one.why for one in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
