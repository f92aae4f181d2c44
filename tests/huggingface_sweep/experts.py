"""Mixtures of experts of transformers under expert parallelism, against plain torch.

    python -m tests.huggingface_sweep.experts                      # all families and layouts
    python -m tests.huggingface_sweep.experts mixtral --layouts ep2 dp2ep2

Each row is a family, each column a layout of ranks. A cell is right if the losses of three steps
are within 1e-5 and the weights within 1e-4 of their largest element. Where float32 differs, because
near ties change the experts of a token, float64 must agree.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import dtensor as dt

RATE, STEPS, ROWS, TOKENS = 0.1, 3, 24, 8
COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
AUXILIARY: dict[str, Any] = dict(output_router_logits=True, router_aux_loss_coef=0.1)
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=8, **AUXILIARY),
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=24, norm_topk_prob=True, **AUXILIARY),
    "olmoe": dict(num_experts=8, **AUXILIARY),
    "gpt_oss": dict(num_local_experts=8, sliding_window=4, **AUXILIARY),
    "deepseek_v3": dict(
        n_routed_experts=8,
        moe_intermediate_size=24,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
    "llama4_text": dict(
        num_local_experts=8, intermediate_size_mlp=48, num_experts_per_tok=1, moe_layers=[0, 1]
    ),
}
"""The sizes of a small model of each family, besides COMMON."""

# How the inner dim of the experts' weights is split: [E 2F D] and [E D F], or as stated.
_INNER: dict[str, dict[str, dt.Shard]] = {
    "gpt_oss": {
        "gate_up_proj": dt.Shard(2, unit=2),  # gates and ups alternate
        "gate_up_proj_bias": dt.Shard(1, unit=2),
        "down_proj": dt.Shard(1),
    },
    "llama4_text": {"gate_up_proj": dt.Shard(2, blocks=2), "down_proj": dt.Shard(1)},
}
_STANDARD_INNER = {"gate_up_proj": dt.Shard(1, blocks=2), "down_proj": dt.Shard(2)}
_EXPERTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks: the axes over which tokens and experts are split, and how the step runs."""

    mesh: dict[str, int]
    tokens: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    schedule: Any = None
    zero: dict[str, int] | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def _pipelined(schedule: Any) -> Layout:
    options = {"aux_loss": "per_microbatch"}
    mesh = dict(pp=2, ep=2)
    return Layout(mesh=mesh, tokens=("ep",), experts=("ep",), schedule=schedule, options=options)


LAYOUTS: dict[str, Layout] = {
    **{f"ep{n}": Layout(mesh=dict(ep=n), tokens=("ep",), experts=("ep",)) for n in (1, 2, 3, 4)},
    "ep2 whole": Layout(mesh=dict(ep=2), experts=("ep",)),
    "dp2": Layout(mesh=dict(dp=2), tokens=("dp",)),
    "dp2ep2": Layout(mesh=dict(dp=2, ep=2), tokens=("dp", "ep"), experts=("ep",)),
    "tp2ep2": Layout(mesh=dict(tp=2, ep=2), tokens=("ep",), experts=("ep",)),
    "ep2tp2": Layout(mesh=dict(ep=2, tp=2), tokens=("ep",), experts=("ep",)),
    "folded": Layout(mesh=dict(dp=2, tp=2), tokens=("dp",), experts=("dp", "tp")),
    "zero1": Layout(mesh=dict(dp=2, ep=2), tokens=("dp", "ep"), experts=("ep",), zero={"dp": 1}),
    "zero3": Layout(mesh=dict(dp=2, ep=2), tokens=("dp", "ep"), experts=("ep",), zero={"dp": 3}),
    "pp2ep2 GPipe 2": _pipelined(dt.GPipe(microbatches=2)),
    "pp2ep2 GPipe 4": _pipelined(dt.GPipe(microbatches=4)),
    "pp2ep2 1F1B 2": _pipelined(dt.OneFOneB(microbatches=2)),
    "pp2ep2 1F1B 4": _pipelined(dt.OneFOneB(microbatches=4)),
}


def model_of(family: str) -> nn.Module:
    """Return a small model of the family, in training mode."""
    config: Any = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES[family]})
    config._experts_implementation = "eager"  # torch has no other one for float64
    torch.manual_seed(0)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class(config).float().train()


def batch_of() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (ROWS, TOKENS), generator=drawn)
    return dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


Run = tuple[list[float], dict[str, Tensor]]
"""The losses of the steps, and the weights after them."""


def plain(model: nn.Module, batch: Mapping[str, Tensor], layout: Layout) -> Run:
    """Take the steps with plain torch; a loss is the mean of the losses of the microbatches. A
    microbatch has the same part of the rows of each rank."""
    microbatches = getattr(layout.schedule, "microbatches", 1)
    ranks = math.prod(layout.mesh[axis] for axis in layout.tokens)
    rows = torch.arange(ROWS).view(ranks, microbatches, -1).transpose(0, 1).flatten(1)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [{name: x[own] for name, x in batch.items()} for own in rows]
        loss = torch.stack([loss_fn(model, part) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.state_dict().items()}


def distributed(family: str, model: nn.Module, batch: dict[str, Tensor], layout: Layout) -> Run:
    """Take the steps with dtensor under a layout."""
    model = copy.deepcopy(model)
    mesh = dt.Mesh(**layout.mesh)
    stages = None
    if "pp" in layout.mesh:
        first = ["model.embed_tokens.*", "model.layers.0.*"]
        stages = {"pp": [first, ["model.layers.1.*", "model.norm.*", "lm_head.*"]]}
    placed = dt.parallelize(
        model, mesh, placements(family, layout), stages=stages, zero=layout.zero
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = dict(layout.options)
    if not hasattr(model.config, "router_aux_loss_coef"):
        options.pop("aux_loss", None)
    if layout.schedule is not None:
        options["schedule"] = layout.schedule
    inputs = {axis: dt.Row() for axis in layout.tokens}
    step = dt.train_step(placed, loss_fn, optimizer, inputs=inputs, **options)
    with dt.launch(mesh):
        losses = [float(step(batch)) for _ in range(STEPS)]
        return losses, dt.gather_state_dict(placed, optimizer)["model"]


def placements(family: str, layout: Layout) -> dict[str, dict[str, dt.Shard]]:
    """Return the placements of the experts' weights."""
    experts = {axis: dt.Shard(0) for axis in layout.experts}
    if not experts:
        return {}
    inner = _INNER.get(family, _STANDARD_INNER) if {"tp", "ep"} <= set(layout.mesh) else {}
    stated = {name: experts | ({"tp": inner[name]} if name in inner else {}) for name in _EXPERTS}
    names = _EXPERTS if family == "gpt_oss" else _EXPERTS[:2]
    return {f"*.experts.{name}": stated[name] for name in names}


def judge(family: str, name: str) -> str:
    """Return "right", "right (f64)", or the first line of what is wrong."""
    layout = LAYOUTS[name]
    model, batch = model_of(family), batch_of()
    verdict = ""
    for wide in (False, True):
        model = model.double() if wide else model
        try:
            ours = distributed(family, model, batch, layout)
        except Exception as error:  # what is refused is the answer
            return f"{type(error).__name__}: {error}"
        verdict = difference(plain(model, batch, layout), ours)
        if not verdict:
            return "right (f64)" if wide else "right"
    return f"wrong: {verdict}"


def difference(expected: Run, found: Run) -> str:
    for a, b in zip(expected[0], found[0], strict=True):
        if not abs(a - b) <= 1e-5 * abs(a):
            return f"losses {found[0]}, not {expected[0]}"
    for name, x in expected[1].items():
        if x.is_floating_point():
            error, largest = (x - found[1][name]).abs().max().item(), x.abs().max().item()
            if not error <= 1e-4 * max(largest, 1e-3):
                return f"{name} is {error:.1e} off, its largest element is {largest:.1e}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    problems: list[str] = []
    for family in given.families or list(FAMILIES):
        for layout in given.layouts:
            start = time.perf_counter()
            found = judge(family, layout)
            seconds = time.perf_counter() - start
            print(
                f"{family:12} {layout:16} {found.splitlines()[0]:40.200} {seconds:5.1f} s",
                flush=True,
            )
            if not found.startswith("right"):
                problems.append(f"{family}, {layout}: {found}")
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
