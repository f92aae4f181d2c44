"""Seconds to plan DeepSeek-V3's published layout, and its predicted step: results/plan_experts.md.

    OMP_NUM_THREADS=1 python -m benchmarks.plan_experts [--layers 61]

The DeepSeek-V3 of transformers (61 layers, 256 experts, width 7168) in bf16 on the meta device,
Mesh(pp=16, dp=2, ep=64), 15,360 sequences of 4,096 tokens in 120 microbatches, 1F1B, ZeRO-1. Prints
the CPU seconds to plan with experts split over ep, and with experts whole, and their ratio; the
summary of each plan has the memory of the fullest rank and the predicted seconds of a step.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from typing import Any

import torch
from torch import nn

import dtensor as dt
from benchmarks.smallest import parsed

SEQUENCES, LENGTH = 15_360, 4_096
RECOMPUTED = ("*layernorm", "*.q_b_proj", "*.kv_b_proj")
"""What the paper recomputes: all RMSNorms and the up-projections of latent attention."""


def deepseek(layers: int, **smaller: int) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes: Any = dict(num_hidden_layers=layers, use_cache=False, **smaller)
    with torch.device("meta"):
        return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes)).bfloat16()


def loss_fn(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels).loss


def stages(layers: int, num: int) -> list[list[str]]:
    """Return as many layers for each stage as fit, fewer for the last, which has the head."""
    each = -(-layers // num)
    starts = [min(n * each, layers) for n in range(num + 1)]
    lists = [
        [f"model.layers.{{{lo}..{hi - 1}}}.*"] for lo, hi in itertools.pairwise(starts) if lo < hi
    ]
    lists[0] += ["model.embed_tokens*"]
    lists[-1] += ["model.norm*", "lm_head*"]
    return lists


def make(given: argparse.Namespace, *, split: bool) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return the training step and its arguments. ``split``: experts are split over ep."""
    lists = stages(given.layers, given.stages)
    mesh = dt.Mesh(pp=len(lists), dp=2, ep=given.ep)
    sizes: dict[str, int] = {"hidden_size": 128, "vocab_size": 256} if given.smallest else {}
    module = deepseek(given.layers, **sizes)
    pins: dict[str, Any] = {"*.experts.*": dict(ep=dt.Shard(0))} if split else {}
    model = dt.parallelize(
        module,
        mesh,
        pins,
        stages={"pp": lists},
        zero={"dp": 1, "ep": 1},
        recompute=list(RECOMPUTED),
    )
    ids = torch.zeros(given.sequences, given.length, dtype=torch.long, device="meta")
    step = dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(module.parameters(), lr=1e-4),
        inputs=dict(dp=dt.Row(), ep=dt.Row()),
        schedule=dt.OneFOneB(given.microbatches),
        topology=dt.topologies.h100(infiniband=("pp", "dp", "ep")),
    )
    return step, (ids, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.set_defaults(stages=16, ep=64, microbatches=120, sequences=SEQUENCES, length=LENGTH)
    given = parsed(parser, layers=4, stages=2, ep=2, microbatches=2, sequences=8, length=16)
    torch.set_num_threads(1)
    seconds: dict[bool, float] = {}
    for split in (True, False):
        step, batch = make(given, split=split)
        start = time.process_time()
        plan = step.plan(*batch)
        seconds[split] = time.process_time() - start
        what = "split" if split else "whole"
        print(f"experts {what}: {plan.mesh}, planned in {seconds[split]:.1f} s of CPU", flush=True)
        print(plan.summary(), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"split / whole: {seconds[True] / seconds[False]:.2f}; peak {peak:.2f} GiB")


if __name__ == "__main__":
    main()
