"""Shared by the scripts of this folder: a tiny Llama, its data, and the outcome of a case.

    CASES = (Case("tp=2", lambda: compared(by_torch(), by_ranks())), ...)

Each script starts with the code that a user writes, followed by its cases: the same loop with the
same seeds on plain torch and on two in-process ranks, compared; or the error with which a loop
ends. Models are made from configurations; nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dtensor as dt

LARGEST = 2e-5
"""Of what losses and weights may differ by: sums in another order, in float32."""
WORDS, LENGTH = 96, 12


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a loop: its losses, and its weights by name."""

    losses: Sequence[float]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The largest differences from the loop on plain torch; ``where``: what computed; ``raised``:
    the first line of the error if the loop does not work."""

    losses: float = 0.0
    weights: float = 0.0
    where: str = "ranks"
    raised: str = ""
    allowed: float = LARGEST

    def check(self) -> None:
        """Raises AssertionError if numbers differ."""
        assert self.raised or max(self.losses, self.weights) <= self.allowed, self


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. ``slow``: only `make integrations` runs it."""

    name: str
    run: Callable[[], Outcome]
    slow: bool = False


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def on_two(net: LlamaForCausalLM, axis: str = "tp") -> dt.ParallelModule:
    """Parallelize with weights split over two ranks, or replicated for data parallelism."""
    if axis == "dp":
        return dt.parallelize(net, dt.Mesh(dp=2))
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    return dt.parallelize(net, dt.Mesh(tp=2), dt.placements.for_model(net, (tokens,)))


def texts(count: int = 48) -> list[dict[str, torch.Tensor]]:
    """Return texts of one length; a third of them have fewer labels, so that batches have unequal
    label counts."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i, row in enumerate(torch.randint(0, WORDS, (count, LENGTH), generator=generator)):
        labels = row.clone()
        labels[: 5 if i % 3 == 0 else 0] = -100
        found.append(dict(input_ids=row, labels=labels, attention_mask=torch.ones_like(row)))
    return found


def words(count: int) -> Any:
    """Return an untrained tokenizer with words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="w1", eos_token="w2", bos_token="w3", unk_token="w0"
    )


def weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def compared(
    plain: Trained, ours: Trained, where: str = "ranks", allowed: float = LARGEST
) -> Outcome:
    assert len(plain.losses) == len(ours.losses) and plain.weights.keys() == ours.weights.keys()
    losses = [abs(a - b) for a, b in zip(plain.losses, ours.losses, strict=True)]
    by = [float((plain.weights[n] - ours.weights[n]).abs().max()) for n in plain.weights]
    return Outcome(max(losses), max(by, default=0.0), where, allowed=allowed)


def raises(run: Callable[[], object], kind: type[Exception], words: str) -> Outcome:
    """Raises AssertionError if ``run`` does not end with this error."""
    try:
        run()
    except kind as error:
        text = str(error)
        assert re.search(words, text), text
        return Outcome(raised=f"{type(error).__name__}: {text.splitlines()[0]}")
    raise AssertionError(f"no {kind.__name__}")


def folder(name: str) -> Path:
    """Return an empty folder under `build/`."""
    import shutil

    path = Path(__file__).parents[2] / "build" / "integrations" / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
