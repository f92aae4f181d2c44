"""What a call pays to know that nothing has changed: its key, and the look at what its step read.

    python -m benchmarks.looking_again

A GPT of 12 layers and Hugging Face's Llama of 24, small, on Mesh(tp=2); nothing is launched. The
least of 400 rounds of 10 calls, in microseconds, and the seconds of the capture beside. A false
alarm (an object that was replaced by its equal) costs the last column once.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import dtensor as dt
from benchmarks.plan_large import gpt_loss, llama_loss
from benchmarks.smallest import parsed


def models(gpt: int, llama: int) -> dict[str, tuple[nn.Module, Callable[..., torch.Tensor]]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.models import GPT

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_hidden_layers=llama,
        vocab_size=320,
        use_cache=False,
    )
    return {
        f"GPT, {gpt} layers": (GPT(1000, 64, 4, gpt, 128, tied=False), gpt_loss),
        f"Llama, {llama} layers": (LlamaForCausalLM(config), llama_loss),
    }


def microseconds(call: Callable[[], object], calls: int, rounds: int) -> float:
    least = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        least = min(least, (time.perf_counter() - began) / calls)
    return least * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.set_defaults(layers=(12, 24))
    given = parsed(parser, rounds=2, layers=(1, 1))
    rounds = given.rounds
    warnings.filterwarnings("ignore")
    mesh = dt.Mesh(tp=2)
    ids = torch.zeros(2, 16, dtype=torch.long)
    print("model               key, us   look, us   entries   compared by value, us")
    for name, (module, loss) in models(*given.layers).items():
        model = dt.parallelize(module, mesh, {})
        step = dt.train_step(model, loss, torch.optim.AdamW(model.parameters()))
        step.plan(ids, ids)
        planned = step.plans.latest
        assert planned is not None and planned.graph.reads is not None
        reads, call = planned.graph.reads, step._bind((ids, ids), {})
        entries = sum(len(group.holders) for group in reads.reached.entries.values())
        key, look = (microseconds(f, 10, rounds) for f in (call.key, reads.same))
        by_value = microseconds(reads.difference, 1, min(20, rounds))
        print(f"{name:19} {key:7.1f}   {look:8.1f}   {entries:7}   {by_value:21.0f}")


if __name__ == "__main__":
    main()
