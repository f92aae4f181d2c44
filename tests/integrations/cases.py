"""What the scripts of this folder share: a tiny Llama, its data, and what becomes of a case.

    CASES = (Case("tp=2", lambda: compared(by_torch(), by_ranks())), ...)

Each script has the code that a user writes first, and then its cases: the same loop with the same
seeds on plain torch and on two ranks of this process, compared; or the error that a loop ends with.
Nothing is downloaded: models are made of configurations.
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
    """What a loop leaves: its losses, and the weights by name."""

    losses: Sequence[float]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Largest differences from the loop on plain torch; ``where``: what computed; ``raised``: the
    first line of the error, of a loop that does not work."""

    losses: float = 0.0
    weights: float = 0.0
    where: str = "ranks"
    raised: str = ""
    allowed: float = LARGEST

    def check(self) -> None:
        """AssertionError where numbers differ."""
        assert self.raised or max(self.losses, self.weights) <= self.allowed, self


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. ``slow``: left to `make integrations`."""

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
    """Its weights split over two ranks, or for data parallelism whole on each."""
    if axis == "dp":
        return dt.parallelize(net, dt.Mesh(dp=2))
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    return dt.parallelize(net, dt.Mesh(tp=2), dt.placements.for_model(net, (tokens,)))


def texts(count: int = 48) -> list[dict[str, torch.Tensor]]:
    """Of one length; a third of them with fewer labels, so that batches have unequal numbers."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i, row in enumerate(torch.randint(0, WORDS, (count, LENGTH), generator=generator)):
        labels = row.clone()
        labels[: 5 if i % 3 == 0 else 0] = -100
        found.append(dict(input_ids=row, labels=labels, attention_mask=torch.ones_like(row)))
    return found


def words(count: int) -> Any:
    """A tokenizer of as many words, w0, w1 and on, that was never trained."""
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
    """AssertionError where it does not end with this error."""
    try:
        run()
    except kind as error:
        text = str(error)
        assert re.search(words, text), text
        return Outcome(raised=f"{type(error).__name__}: {text.splitlines()[0]}")
    raise AssertionError(f"no {kind.__name__}")


def folder(name: str) -> Path:
    """An empty one under `build/`."""
    import shutil

    path = Path(__file__).parents[2] / "build" / "integrations" / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
