"""The table of training cases: each row is one way to train, with one value for each column.

    python -m tests.api.training_cases        # prints the numbers of rows and pairs
    python -m tests.api.training_cases --write

`COLUMNS` lists the features and their values. The rows in `tests/golden/training_cases.txt` are a
pairwise covering array: every two values that `conflict` allows together occur in some row. To add
a feature, add a value or a column here, define it in `build`, and write the rows again.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, Llama, batch, loss_fn
from tests.plans import LLAMA, VOCABULARY
from tests.training import MEGATRON, MakeOptimizer, Placed, Stated

ROWS = Path(__file__).parents[1] / "golden" / "training_cases.txt"

COLUMNS: dict[str, tuple[str, ...]] = {
    "model": ("gpt", "untied", "llama", "odd", "conv"),
    "placement": (
        "single", "dp2", "tp2", "pp2", "dp4", "tp3", "tp2_pp2", "dp2_tp2", "pp2_dp2",
        "vocabulary", "sequence", "free", "zigzag",
    ),
    "schedule": (
        "whole", "gpipe2", "1f1b4", "looped4", "interleaved4", "zbh1_4", "zbh2_4", "zbv4",
        "dualpipev4", "searched4",
    ),
    "zero": ("0", "1", "2", "3"),
    "dtype": ("f32", "f64", "bf16", "masters", "autocast"),
    "optimizer": ("adamw", "adagrad", "nadam", "pair", "owned"),
    "recompute": ("none", "all"),
    "data": ("full", "ignored", "short"),
    "clip": ("none", "small"),
    "delay": ("0", "1"),
    "backend": ("inprocess", "ray"),
}  # fmt: skip
TOKENS = {"vocabulary", "sequence", "zigzag"}
PIPELINES = {"pp2", "tp2_pp2", "pp2_dp2"}
TWO_STAGES_A_RANK = {"looped4", "interleaved4", "zbv4", "dualpipev4", "searched4"}
SCHEDULES: dict[str, dt.Schedule] = {
    "whole": dt.GPipe(1),
    "gpipe2": dt.GPipe(2),
    "1f1b4": dt.OneFOneB(4),
    "looped4": dt.LoopedBFS(4),
    "interleaved4": dt.Interleaved1F1B(4),
    "zbh1_4": dt.ZBH1(4),
    "zbh2_4": dt.ZBH2(4),
    "zbv4": dt.ZBV(4),
    "dualpipev4": dt.DualPipeV(4),
    "searched4": dt.Searched(microbatches=4, most_held=3),
}
AXES: dict[str, dict[str, int]] = {
    "single": {},
    "tp3": dict(tp=3),
    "dp4": dict(dp=4),
    "tp2_pp2": dict(pp=2, tp=2),
    "dp2_tp2": dict(dp=2, tp=2),
    "pp2_dp2": dict(pp=2, dp=2),
    "vocabulary": dict(tp=3),
    "sequence": dict(tp=2),
    "free": dict(tp=2),
    "zigzag": dict(cp=3),  # 8 tokens in 6 pieces
}
INPUTS: dict[str, dt.Placement] = dict(dp=dt.Row(), cp=dt.Zigzag(1))
LIMITS: dict[str, dict[str, float]] = {
    "f32": dict(limit=2e-6, atol=1e-4),
    "f64": dict(limit=1e-13, atol=1e-9),
    "bf16": dict(limit=2e-2, part=0.7),
    "masters": dict(limit=2e-2, part=0.7),
    "autocast": dict(limit=2e-2, part=0.4),
}
"""By dtype: how far losses, weights and optimizer state may be from torch's. Where 16 bits round,
the largest errors measured are 0.63 and 0.26 of a tensor's change; a doubled gradient is 1.0."""

Row = Mapping[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def conflict(row: Row) -> bool:
    """Whether two values of ``row``, which may lack columns, exclude each other."""
    get = row.get
    placement, schedule, model = get("placement"), get("schedule"), get("model")
    tokens = model in ("gpt", "untied", "llama", None)
    return (
        # Schedules of stages need stages; others accumulate gradients on any mesh.
        (
            placement is not None
            and placement not in PIPELINES
            and schedule not in ("whole", "gpipe2", "1f1b4", None)
        )
        or (get("zero", "0") != "0" and placement is not None and "dp" not in placement)
        # A vocabulary, a sequence and ignored targets are those of a model of tokens.
        or (not tokens and (placement in TOKENS or get("data") == "ignored"))
    )


def covered(rows: Sequence[Row]) -> set[Pair]:
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def wanted() -> set[Pair]:
    """Return every two values that do not exclude each other."""
    found: set[Pair] = set()
    for one, other in combinations(COLUMNS, 2):
        for a in COLUMNS[one]:
            for b in COLUMNS[other]:
                if not conflict({one: a, other: b}):
                    found.add(((one, a), (other, b)))
    return found


def generated() -> Iterator[Row]:
    """Return rows that cover each wanted pair: a greedy choice, preferring rare values. Ray is
    chosen only if no other backend covers a pair."""
    missing, uses = sorted(wanted()), Counter[tuple[str, str]]()
    uses["backend", "ray"] = 10**6
    while missing:
        row = dict(missing[0])
        while len(row) < len(COLUMNS):
            gains = [
                (
                    sum(set(pair) <= {*row.items(), (column, value)} for pair in missing),
                    -uses[column, value],
                    column,
                    value,
                )
                for column, values in COLUMNS.items()
                if column not in row
                for value in values
                if not conflict({**row, column: value})
            ]
            *_, column, value = max(gains)
            row[column] = value
            uses[column, value] += 1
        yield {column: row[column] for column in COLUMNS}
        missing = [pair for pair in missing if not set(pair) <= row.items()]


def rows() -> dict[str, Row]:
    """Return the committed rows by name."""
    lines = [line.split() for line in ROWS.read_text().splitlines()[1:]]
    return {"-".join(line): dict(zip(COLUMNS, line, strict=True)) for line in lines}


# -- what the values mean --------------------------------------------------------------------------


class Odd(nn.Module):
    """A model with uneven sizes, a scalar, a frozen parameter, and four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in [(6, 7), (7, 5), (5, 7), (7, 6)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale * self.frozen


class Conv(nn.Module):
    """images [b 3 6 6] -> [b 6]: four layers with a GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)),
                nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 2)),
                nn.Sequential(nn.Flatten(), nn.Linear(8, 6)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def square_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


PINS: dict[str, dict[str, Stated]] = {
    "gpt": MEGATRON,
    "untied": MEGATRON,
    "llama": LLAMA,
    "odd": {"layers.[02].weight": dict(tp=dt.Row()), "layers.[13].weight": dict(tp=dt.Column())},
    "conv": {"layers.0.weight": dict(tp=dt.Row()), "layers.1.1.weight": dict(tp=dt.Shard(1))},
}


MLPS = {"*.up.weight", "*.down.weight", "*mlp.gate.weight", "*mlp.up.weight", "*mlp.down.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row as arguments of `assert_trains_as_torch`."""

    placed: Placed
    data: list[tuple[Tensor, ...]]
    build: Callable[[], nn.Module]
    make: MakeOptimizer
    loss: Callable[..., Any]
    stated: dict[str, Any]


def case_of(row: Row) -> Case:
    model, placement, dtype = row["model"], row["placement"], row["dtype"]
    count = 4 if row["schedule"] in TWO_STAGES_A_RANK else 2
    tokens = model in ("gpt", "untied", "llama")
    axes = AXES.get(placement, {placement[:2]: 2})
    stages = stages_of(model, count) if placement in PIPELINES else None
    in_16_bits = dtype in ("bf16", "masters")
    parameters = {"f64": torch.float64}.get(dtype, torch.bfloat16 if in_16_bits else torch.float32)
    unpinned = ("free", "single", "dp2", "dp4", "pp2", "pp2_dp2", "zigzag")
    pins = {} if placement in unpinned else PINS[model]
    if placement == "vocabulary":
        pins = VOCABULARY
    elif placement == "tp3" and tokens:  # 4 heads are whole; 64 hidden units are 22, 22, 20
        pins = {name: pin for name, pin in pins.items() if name in MLPS}

    def build() -> nn.Module:
        torch.manual_seed(0)
        if model == "llama":
            module: nn.Module = Llama()
        elif tokens:
            module = GPT(tied=model == "gpt")
        else:
            module = Odd() if model == "odd" else Conv()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "embed" in name or "positions" in name:
                    parameter.mul_(0.1)  # so that the loss starts near ln 32
        for name, norm in module.named_modules():
            if placement == "sequence" and name.endswith((".norm1", ".norm2")):
                norm.register_forward_pre_hook(lambda _, args: dt.annotate(args[0], "b t@tp d"))
                norm.register_forward_hook(lambda _, args, y: dt.annotate(y, "b t@tp d"))
        return module.to(parameters)

    # Not `dtype`: rows whose functions close over the same values share a graph.
    plain_loss, autocast = loss_fn if tokens else square_error, dtype == "autocast"

    def loss(module: nn.Module, *data: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return plain_loss(module, *data)

    return Case(
        placed=Placed(
            axes=axes,
            pins=pins,
            stages=stages,
            inputs={axis: INPUTS[axis] for axis in axes if axis in INPUTS} or None,
        ),
        data=[data_of(row, seed, parameters) for seed in range(3)],
        build=build,
        make=OPTIMIZERS[row["optimizer"]],
        loss=loss,
        stated=dict(
            schedule=SCHEDULES[row["schedule"]],
            zero={"dp": int(row["zero"])} if row["zero"] != "0" else None,
            recompute=["*"] if row["recompute"] == "all" else None,
            master_weights=dtype == "masters",
            clip=0.3 if row["clip"] == "small" else None,
            delay=int(row["delay"]),
            search="free" if placement == "free" else "predictable",
            backend=row["backend"],
        ),
    )


def stages_of(model: str, count: int) -> dict[str, list[list[str]]]:
    """Return two or four stages."""
    if model in ("odd", "conv"):
        last = ["scale", "frozen"] if model == "odd" else []
        cuts = [[f"layers.{i}.*"] for i in range(4)]
    else:
        last = ["norm*", "head*"]
        first = ["embed*"] if model == "llama" else ["embed*", "positions*"]
        cuts = [first, ["blocks.0.*"], ["blocks.1.*"], []]
    cuts[-1] = [*cuts[-1], *last]
    return {"pp": cuts if count == 4 else [cuts[0] + cuts[1], cuts[2] + cuts[3]]}


def data_of(row: Row, seed: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return batches of 8 rows; a short last batch has 5, which neither ranks nor microbatches
    divide."""
    rows = 5 if row["data"] == "short" and seed == 2 else 8
    if row["model"] in ("gpt", "untied", "llama"):
        return batch(seed, size=rows, ignored=row["data"] == "ignored")
    generator = torch.Generator().manual_seed(seed)
    shape = (6,) if row["model"] == "odd" else (3, 6, 6)
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype)


def pair(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return two optimizers: the first has groups, with weight decay only for matrices and another
    learning rate for vectors; the second has every other matrix. The larger ``eps`` limits updates
    from gradients that are only rounding errors."""
    matrices = [p for p in trained(module) if p.dim() > 1]
    decayed = dict(params=matrices[::2], weight_decay=0.1)
    vectors = [p for p in trained(module) if p.dim() <= 1]
    others = dict(params=vectors, lr=3e-2, betas=(0.8, 0.9))
    return [
        torch.optim.AdamW([decayed, others], lr=1e-2, weight_decay=0.0, eps=1e-6),
        torch.optim.SGD(matrices[1::2], lr=0.05, momentum=0.9),
    ]


def owned(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return optimizers that need whole parameters, and one for vectors. The few steps of
    Muon's iteration limit the effect of rounding errors, which Muon enlarges."""
    matrices = [p for p in trained(module) if p.dim() == 2][1::2]
    vectors = [p for p in trained(module) if p.dim() < 2]
    others = [p for p in trained(module) if p.dim() > 1 and not any(p is m for m in matrices)]
    muon = [torch.optim.Muon(matrices, lr=1e-3, ns_steps=2)] if matrices else []
    return [
        *muon,
        torch.optim.Adafactor(others, lr=1e-2),
        torch.optim.AdamW(vectors, lr=3e-2, eps=1e-6),
    ]


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda module: torch.optim.AdamW(trained(module), lr=1e-2),
    "adagrad": lambda module: torch.optim.Adagrad(trained(module), lr=1e-2),
    "nadam": lambda module: torch.optim.NAdam(trained(module), lr=1e-2),
    "pair": pair,
    "owned": owned,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        table = [list(COLUMNS), *(list(row.values()) for row in generated())]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        ROWS.write_text("\n".join(lines) + "\n")

    missing = wanted() - covered([*rows().values()])
    print(f"{len(rows())} rows, {len(wanted())} pairs, {len(missing)} missing")


if __name__ == "__main__":
    main()
