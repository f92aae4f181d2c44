"""Real text without a download: Python's own manual, in tokens, in reproducible batches.

tokenizer, train, validation = load(vocab=512)     # tokens (n,) of the text, and of its last tenth
for tokens, targets in batches(train, 16, 64, range(100), seed=0): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor


def load(vocab: int) -> tuple[Tokenizer, Tensor, Tensor]:
    """A byte-pair tokenizer of `vocab` entries, and the tokens (n,) of the text to train on, on
    which it was trained too, and of the last tenth of the manual, held out."""
    text = manual(*sorted(topics))
    cut = len(text) * 9 // 10
    tokenizer = train_tokenizer(text[:cut], vocab)
    return tokenizer, encode(tokenizer, text[:cut]), encode(tokenizer, text[cut:])


def manual(*names: str) -> str:
    """Chapters of Python's manual, as `help("debugger")` shows them."""
    return "\n\n".join(topics[name] for name in names)


def train_tokenizer(text: str, vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    return torch.tensor(tokenizer.encode(text).ids)


def batches(
    tokens: Tensor, batch: int, context: int, steps: range, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) of shape (batch, context) per step; a step's batch depends on its number
    alone, so that a resumed run goes on with the text that it would have seen."""
    for step in steps:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        window = tokens[starts + torch.arange(context + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def windows(tokens: Tensor, batch: int, context: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """`number` batches of windows spread evenly over the text: what a loss is measured on."""
    starts = torch.linspace(0, len(tokens) - context - 1, number * batch).long()
    found = tokens[starts[:, None] + torch.arange(context + 1)]
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in found.split(batch)]
