"""Check `search` against brute force: every point of the space is planned, and none may be better.

    $ python -m tests.api.search_brute [--models gpt,llama] [--networks slow] [--objective memory]

The space is enumerated here independently, as described in docs/searching.md, and each point is
planned by `dt.compare`. A row shows the best result of both, how many of the five best figures
agree, and how many points the search planned. Exit status 1 if brute force found anything better.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import dtensor as dt
from tests.models import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on the meta device, its loss and batch. ``layers``: its repeated modules in order;
    ``tp``: axis sizes that divide heads and widths; ``memory``: a limit that some points exceed."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch: tuple[Tensor, ...]
    num_ranks: int
    layers: tuple[str, ...]
    tp: tuple[int, ...]
    placements: dict[str, Any]
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The results of search and brute force: up to five best figures of each, ascending."""

    found: tuple[float, ...]
    brute: tuple[float, ...]
    num_points: int
    num_planned: int
    num_over: int  # points whose plan is above the limit
    seconds: tuple[float, float]

    @property
    def right(self) -> bool:
        return not self.brute or self.found[0] <= self.brute[0] * (1 + 1e-9)

    @property
    def alike(self) -> int:
        """Return how many of the five best figures agree."""
        return sum(abs(a - b) <= 1e-9 * b for a, b in zip(self.found, self.brute))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--objective", default="time", choices=("time", "memory"))
    options = parser.parse_args()
    print(
        "| model | ranks | network | limit | above | points | planned "
        "| | best | five | search | brute |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    wrong = 0
    for name in options.models.split(","):
        case = CASES[name]()
        for network in options.networks.split(","):
            for limit in (None, case.memory):
                judged = judge(case, NETWORKS[network], limit, options.objective)
                wrong += not judged.right
                best = judged.found[0] / judged.brute[0]
                print(
                    f"| {name} | {case.num_ranks} | {network} | {limit or ''} | {judged.num_over} "
                    f"| {judged.num_points} | {judged.num_planned} "
                    f"| {judged.num_planned / judged.num_points:.1%} | {best:.4f} "
                    f"| {judged.alike}/{len(judged.brute)} "
                    f"| {judged.seconds[0]:.1f} s | {judged.seconds[1]:.0f} s |",
                    flush=True,
                )
    return int(wrong > 0)


def judge(case: Case, network: dict[str, Any], limit: float | None, objective: str) -> Judged:
    """Run the search and brute force, and time both in CPU seconds."""
    begin = time.process_time()
    found = dt.search(
        case.model,
        case.loss_fn,
        case.num_ranks,
        *case.batch,
        topology=dt.Topology(**network),
        memory=limit,
        objective=objective,
    )
    searched = time.process_time()
    points = dict(strategies(case))
    topology = dt.Topology(**network, **({} if limit is None else {"memory_bytes": limit}))
    rows = dt.compare(case.model, case.loss_fn, points, *case.batch, topology=topology)
    planned = [row for row in rows if row.error is None and row.fits]
    figures = sorted(r.seconds if objective == "time" else float(r.memory.total) for r in planned)
    assert len(points) == found.num_points, "the space is not what its page says"
    return Judged(
        found=tuple(r.seconds if objective == "time" else float(r.memory.total) for r in found),
        brute=tuple(figures[:5]),
        num_points=len(points),
        num_planned=found.num_planned,
        num_over=sum(row.error is None and not row.fits for row in rows),
        seconds=(searched - begin, time.process_time() - searched),
    )


# -- the space, as docs/searching.md has it --------------------------------------------------------


def strategies(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = case.batch[0].shape[0]
    whole = range(1, case.num_ranks + 1)
    for pp, dp, tp in ((p, d, t) for p in whole for d in whole for t in whole):
        if pp * dp * tp != case.num_ranks or rows % dp or tp not in case.tp:
            continue
        if pp > max(1, len(case.layers)):
            continue
        sizes = {axis: n for axis, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1}
        for zero in range(4 if dp > 1 else 1):
            for exponent in range(7):
                num = 2**exponent
                if rows // dp % num:
                    continue
                orders: list[Any] = [dt.OneFOneB]
                if pp > 1 and num > 1:
                    orders.append(dt.ZBH1)
                    orders += [dt.Interleaved1F1B] if len(case.layers) >= 2 * pp else []
                for order in orders:
                    for again in (False, True) if case.layers else (False,):
                        stated: dict[str, Any] = dict(mesh=dt.Mesh(**sizes))
                        stated["placements"] = case.placements if tp > 1 else {}
                        if dp > 1:
                            stated["inputs"] = dict(dp=dt.Row())
                        if zero:
                            stated["zero"] = {"dp": zero}
                        if pp > 1:
                            stages = pp * (2 if order is dt.Interleaved1F1B else 1)
                            stated["stages"] = {"pp": dt.Auto(num_stages=stages)}
                        if pp > 1 or num > 1:
                            stated["schedule"] = order(microbatches=num)
                        if again:
                            stated["recompute"] = list(case.layers)
                        yield f"{sizes} {zero} {order.__name__} {num} {again}", stated


# -- models ----------------------------------------------------------------------------------------


def _tokens(rows: int, length: int) -> Tensor:
    return torch.empty(rows, length, dtype=torch.int64, device="meta")


def _lm_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _huggingface_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=targets, use_cache=False).loss


def square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def _gpt(tied: bool) -> Case:
    with torch.device("meta"):
        model = GPT(vocab=2048, width=512, heads=8, layers=4, positions=128, tied=tied)
    tokens = _tokens(16, 128)
    return Case(
        model=model,
        loss_fn=_lm_loss,
        batch=(tokens, tokens),
        num_ranks=8 if not tied else 4,
        layers=tuple(f"blocks.{i}" for i in range(4)),
        tp=(1, 2, 4, 8),
        placements=_derived(model, tokens),
        memory=150e6,
    )


def _llama() -> Case:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = _tokens(8, 64)
    return Case(
        model=model,
        loss_fn=_huggingface_loss,
        batch=(tokens, tokens),
        num_ranks=4,
        layers=tuple(f"model.layers.{i}" for i in range(4)),
        tp=(1, 2),
        placements=_derived(model, tokens),
        memory=80e6,
    )


def _mlp() -> Case:
    x = torch.empty(256, 1024, device="meta")
    model, placements = residual(width=1024, layers=6, x=x)
    return Case(
        model=model,
        loss_fn=square,
        batch=(x, x),
        num_ranks=6,
        layers=tuple(str(i) for i in range(6)),
        tp=(1, 2, 3, 6),
        placements=placements,
        memory=300e6,
    )


def residual(*, width: int, layers: int, x: Tensor) -> tuple[nn.Module, dict[str, Any]]:
    """Return an MLP with residual layers, and its derived placements."""
    with torch.device("meta"):
        model = nn.Sequential(*(_Residual(width) for _ in range(layers)))
    return model, _derived(model, x)


def _t5() -> Case:
    config = T5Config(
        vocab_size=1024,
        d_model=256,
        d_kv=64,
        d_ff=512,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    tokens = _tokens(8, 32)
    return Case(
        model=model,
        loss_fn=_huggingface_loss,
        batch=(tokens, tokens),
        num_ranks=4,
        # the first block of each has the table of relative positions besides
        layers=tuple(f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (1, 2)),
        tp=(1, 2, 4),
        placements=_derived(model, tokens, labels=tokens),
        memory=27e6,
    )


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _derived(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> dict[str, Any]:
    return dict(dt.placements.for_model(model, args, kwargs))


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: _gpt(tied=False),
    "tied": lambda: _gpt(tied=True),
    "llama": _llama,
    "mlp": _mlp,
    "t5": _t5,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "fast": {},
    "slow": {"bandwidth": {"tp": 4e11, "dp": 1.2e9, "pp": 1.2e9}},
}

if __name__ == "__main__":
    sys.exit(main())
