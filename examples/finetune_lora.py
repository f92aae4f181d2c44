"""Fine-tune a Hugging Face model with LoRA over two ranks: the model is transformers', the adapters
are peft's, and neither knows of ranks.

    python examples/finetune_lora.py                          # a tiny Llama, trained here first
    python examples/finetune_lora.py --backend ray
    python examples/finetune_lora.py --model path/to/model    # a folder as from_pretrained reads it

The base is frozen; rank-8 adapters on all its projections learn one chapter of Python's manual, of
which the last fifth is held out: that of the debugger. Placements are derived from the program; the
adapters fit the split of the weights beside them. At the end the adapters are saved as peft has
them, read back into a fresh base, and merged: the losses of all three are the same.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from text import batches, encode, manual, train_tokenizer, windows
from tokenizers import Tokenizer
from torch import Tensor, nn

import dtensor as dt

CHAPTER = "debugger"
REST = ["compound", "types", "specialnames", "execmodel", "import", "customization"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONTEXT, BATCH = 64, 16


@dataclass(frozen=True, slots=True)
class Task:
    """The base, and the tokens (n,) that its adapters learn, and those held out."""

    base: nn.Module
    train: Tensor
    held_out: list[tuple[Tensor, Tensor]]


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def chapter(base: nn.Module, tokens: Tensor) -> Task:
    cut = len(tokens) * 4 // 5
    return Task(base, tokens[:cut], windows(tokens[cut:], BATCH, CONTEXT, 2))


# -- the base -------------------------------------------------------------------------------------


def read(path: str) -> Task:
    """A model and its tokenizer in a folder, in transformers' files."""
    base = hf.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    return chapter(base, torch.tensor(tokenizer(manual(CHAPTER))["input_ids"]))


def make(backend: Literal["inprocess", "ray"], steps: int, layers: int = 2) -> Task:
    """A tiny Llama, trained for so many steps on other chapters."""
    tokenizer: Tokenizer = train_tokenizer(manual(*REST), 512)
    torch.manual_seed(0)
    base = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    fit(base, encode(tokenizer, manual(*REST)), backend, steps, lr=3e-3)
    return chapter(base, encode(tokenizer, manual(CHAPTER)))


# -- training -------------------------------------------------------------------------------------


def fit(
    module: nn.Module,
    tokens: Tensor,
    backend: Literal["inprocess", "ray"],
    steps: int,
    lr: float,
    held_out: list[tuple[Tensor, Tensor]] | None = None,
) -> list[float]:
    """Train what of the module is not frozen, over two ranks; afterwards it has the values."""
    mesh = dt.Mesh(tp=2)
    data = list(batches(tokens, BATCH, CONTEXT, range(steps), seed=0))
    placements = dt.placements.for_model(module, (), dict(input_ids=data[0][0]), size=2)
    model = dt.parallelize(module, mesh, placements)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=lr / 10)
    step = dt.train_step(model, loss_fn, optimizer, clip_grad_norm=1.0)
    if held_out:
        print(step.plan(*data[0]).summary(), end="\n\n")
    evaluated = dt.compile(loss_fn, mesh)
    with dt.launch(mesh, backend=backend):
        losses: list[dt.Loss] = []
        for i, batch in enumerate(data):
            if held_out and i % 20 == 0:
                show(i, "held out", mean([evaluated(model, *b).full_tensor() for b in held_out]))
            losses.append(step(*batch))
            scheduler.step()
            if not held_out and i % 50 == 0:
                show(i, "base", float(losses[-1]))
        if held_out:
            show(steps, "held out", mean([evaluated(model, *b).full_tensor() for b in held_out]))
    return [float(loss) for loss in losses]


def show(step: int, what: str, loss: float) -> None:
    print(f"step {step:4d}   {what}: loss {loss:.4f}, perplexity {math.exp(loss):.1f}")


def mean(losses: list[Tensor]) -> float:
    return float(torch.stack(losses).mean())


@torch.no_grad()
def loss_of(model: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> float:
    """In plain torch, on one device."""
    model.eval()
    return mean([loss_fn(model, *batch) for batch in held_out])


def finetune(
    task: Task, backend: Literal["inprocess", "ray"], steps: int, folder: Path
) -> dict[str, float]:
    """The losses on what is held out: before, with adapters, with those read back, and merged."""
    before = loss_of(task.base, task.held_out)
    fresh = copy.deepcopy(task.base)
    torch.manual_seed(1)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(task.base, config)  # type: ignore[arg-type]
    adapted.print_trainable_parameters()
    fit(adapted, task.train, backend, steps, lr=3e-3, held_out=task.held_out)

    adapted.save_pretrained(folder)
    losses = {"before": before, "adapted": loss_of(adapted, task.held_out)}
    again: Any = PeftModel.from_pretrained(fresh, folder)  # type: ignore[arg-type]
    losses["read back"] = loss_of(again, task.held_out)
    losses["merged"] = loss_of(again.merge_and_unload(), task.held_out)
    return losses


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="Fine-tune a Hugging Face model with LoRA.")
    options.add_argument("--model", metavar="FOLDER", help="a causal language model; default: tiny")
    options.add_argument("--backend", choices=["inprocess", "ray"], default="inprocess")
    options.add_argument("--base-steps", type=int, default=200, help="of training the tiny model")
    options.add_argument("--steps", type=int, default=100, help="of training the adapters")
    options.add_argument("--save", metavar="FOLDER", type=Path, help="of the adapters")
    return options


def main() -> None:
    args = parser().parse_args()
    task = read(args.model) if args.model else make(args.backend, args.base_steps)
    with tempfile.TemporaryDirectory() as temporary:
        losses = finetune(task, args.backend, args.steps, args.save or Path(temporary))
    print("\non what was held out, in plain torch:")
    for name, loss in losses.items():
        print(f"  {name:10} {loss:.6f}")


if __name__ == "__main__":
    main()
