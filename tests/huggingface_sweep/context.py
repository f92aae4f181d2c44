"""Models of transformers with their sequence split over ranks, against plain torch.

    python -m tests.huggingface_sweep.context                       # every family and layout
    python -m tests.huggingface_sweep.context llama --layouts cp2 tp2cp2 --strategies ring auto

Each row is a family, a layout of ranks and a strategy of attention. A row is right if the losses of
three steps are within 1e-5 and the weights within 1e-4 of their largest element. Where float32
differs, because near ties change the experts of a token, float64 must agree. With dropout, one rank
of dtensor is the reference. ``--ray`` also compares the bits of ranks on Ray and in this process.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

import dtensor as dt
from tests.huggingface_sweep import experts
from tests.huggingface_sweep.experts import RATE, STEPS, Run, difference

ROWS, TOKENS = 4, 18  # neither 2 nor 4 ranks have equally many tokens in a zigzag
KINDS = {"heads": "all_to_all", "gather": "all_gather", "ring": "shift"}
"""The messages that show that the plan has the stated strategy."""
STRATEGIES = (*KINDS, "auto")
COMMON: dict[str, Any] = {**experts.COMMON, "pad_token_id": 0}
STAGES = (
    ["model.embed_tokens.*", "model.layers.0.*"],
    ["model.layers.1.*", "model.norm.*", "lm_head.*"],
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A small model of ``kind``. ``batch``: "padded", "packed", or "" for whole sequences."""

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])
    batch: str = ""
    stages: tuple[list[str], list[str]] = STAGES
    is_random: bool = False

    def model(self) -> nn.Module:
        """Return the model in training mode."""
        config: Any = CONFIG_MAPPING[self.kind](**{**COMMON, **self.sizes})
        config._experts_implementation = "eager"  # torch has no other one for float64
        torch.manual_seed(0)
        mapping = (
            MODEL_FOR_MASKED_LM_MAPPING if self.kind == "bert" else MODEL_FOR_CAUSAL_LM_MAPPING
        )
        model_class: Any = mapping[type(config)]
        return model_class(config).float().train()

    def inputs(self) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(1)
        ids = torch.randint(1, 64, (ROWS, TOKENS), generator=drawn)
        batch = dict(input_ids=ids, labels=ids)
        places = torch.arange(TOKENS)
        if self.batch == "padded":
            lengths = torch.tensor([18, 11, 14, 5])
            batch["attention_mask"] = (places < lengths[:, None]).long()
        if self.batch == "packed":
            starts = torch.tensor([7, 4, 11, 18])
            batch["position_ids"] = places - starts[:, None] * (places >= starts[:, None])
        return batch


BERT = (
    ["bert.embeddings.*", "bert.encoder.layer.0.*"],
    ["bert.encoder.layer.1.*", "cls.*"],
)
GPT2 = (
    ["transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*"],
    ["transformer.h.1.*", "transformer.ln_f.*", "lm_head.*"],
)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
LATENT = {**experts.FAMILIES["deepseek_v3"], "v_head_dim": 4}  # narrower than keys
FAMILIES: dict[str, Family] = {
    "llama": Family(kind="llama"),
    "llama padded": Family(kind="llama", batch="padded"),
    "llama packed": Family(kind="llama", batch="packed"),
    "qwen3": Family(kind="qwen3"),
    "gemma2": Family(kind="gemma2", sizes=dict(sliding_window=5, query_pre_attn_scalar=8)),
    "gemma3": Family(kind="gemma3_text", sizes=dict(sliding_window=5, query_pre_attn_scalar=8)),
    "mistral": Family(kind="mistral", sizes=dict(sliding_window=5)),
    "gpt2": Family(kind="gpt2", stages=GPT2, is_random=True),
    "bert": Family(kind="bert", sizes=NO_DROPOUT, batch="padded", stages=BERT),
    "deepseek": Family(kind="deepseek_v3", sizes=LATENT),
    "gpt-oss": Family(kind="gpt_oss", sizes=dict(num_local_experts=8, sliding_window=5)),
}

LAYOUTS: dict[str, dict[str, int]] = {
    "cp2": dict(cp=2),
    "cp4": dict(cp=4),
    "dp2cp2": dict(dp=2, cp=2),
    "tp2cp2": dict(tp=2, cp=2),
    "cp2tp2": dict(cp=2, tp=2),
    "pp2cp2": dict(pp=2, cp=2),
    "zero3": dict(dp=2, cp=2),
}


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch).loss


def plain(model: nn.Module, batch: Mapping[str, Tensor]) -> Run:
    """Take the steps with plain torch."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.state_dict().items()}


def distributed(
    family: Family,
    model: nn.Module,
    batch: dict[str, Tensor],
    layout: str | None,
    strategy: str,
    *,
    tokens: dt.Placement,
    backend: Literal["inprocess", "ray"] = "inprocess",
) -> Run:
    """Take the steps with dtensor under a layout; None: one rank."""
    model = copy.deepcopy(model)
    mesh = dt.Mesh(**(LAYOUTS[layout] if layout else {}))
    pins: Any = {}
    if "tp" in mesh.axes:
        pins = dt.placements.for_model(model, (), batch, size=2)
    options: dict[str, Any] = {}
    if "pp" in mesh.axes:
        options["stages"] = {"pp": list(family.stages)}
    if layout == "zero3":
        options["zero"] = {"dp": 3, "cp": 3}
    if layout and strategy != "auto":
        options["attention"] = {"cp": strategy}
    placed = dt.parallelize(model, mesh, pins, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs = {
        axis: place for axis, place in (("dp", dt.Row()), ("cp", tokens)) if axis in mesh.axes
    }
    more: dict[str, Any] = dict(schedule=dt.GPipe(microbatches=2)) if "pp" in mesh.axes else {}
    step = dt.train_step(placed, loss_fn, optimizer, inputs=inputs, **more)
    kinds = {each.kind for each in step.plan(batch).collectives if each.axis == "cp"}
    assert KINDS.get(strategy) in {None, *kinds}, f"{strategy} has no message but {kinds}"
    with dt.launch(mesh, backend=backend):
        losses = [float(step(batch)) for _ in range(STEPS)]
        return losses, dt.gather_state_dict(placed, optimizer)["model"]


def judge(
    family: Family, layout: str, strategy: str, *, tokens: dt.Placement, on_ray: bool = False
) -> str:
    """Return "right", "right (f64)", or what is wrong or refused."""
    model, batch = family.model(), family.inputs()
    verdict = ""
    for wide in (False, True):
        model = model.double() if wide else model
        try:
            ours = distributed(family, model, batch, layout, strategy, tokens=tokens)
            if on_ray and not wide:
                other = distributed(
                    family, model, batch, layout, strategy, tokens=tokens, backend="ray"
                )
                same = all(torch.equal(x, other[1][name]) for name, x in ours[1].items())
                if not same or ours[0] != other[0]:
                    return f"wrong: the bits on Ray differ: {ours[0]} in process, {other[0]}"
            expected = (
                distributed(family, model, batch, None, "auto", tokens=tokens)
                if family.is_random
                else plain(model, batch)
            )
        except Exception as error:  # what is refused is the answer
            return f"{type(error).__name__}: {error}"
        verdict = difference(expected, ours)
        if not verdict:
            return "right (f64)" if wide else "right"
    return f"wrong: {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--contiguous", action="store_true", help="in place of the zigzag")
    parser.add_argument("--ray", action="store_true", help="compare the bits on Ray too")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tokens = dt.Shard(1) if given.contiguous else dt.Zigzag(1)
    problems: list[str] = []
    for name in given.families or list(FAMILIES):
        family = FAMILIES[name]
        for layout in given.layouts:
            for strategy in ["auto"] if family.is_random else given.strategies:
                start = time.perf_counter()
                found = judge(family, layout, strategy, tokens=tokens, on_ray=given.ray)
                seconds = time.perf_counter() - start
                first = found.splitlines()[0]
                print(
                    f"{name:12} {layout:8} {strategy:6} {first:40.200} {seconds:5.1f} s", flush=True
                )
                if not found.startswith("right"):
                    problems.append(f"{name}, {layout}, {strategy}: {found}")
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
