"""Real text without a download: Python's own manual, in tokens, in reproducible batches."""

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


def load(vocab: int) -> tuple[Tokenizer, Tensor]:
    """A byte-pair tokenizer of `vocab` entries trained on the text, and the text's tokens (n,)."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer, torch.tensor(tokenizer.encode(text).ids)


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
