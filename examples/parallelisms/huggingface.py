"""An unmodified Hugging Face model (random numbers, no download): its placements are derived."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dtensor as dt
from examples.parallelisms.model import batch, train

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )
)  # fmt: skip
example = dict(input_ids=batch()[0], labels=batch()[0])
placements = dt.placements.for_model(model, example_kwargs=example, size=2)
print(placements)
losses = train(
    dt.parallelize(model, dt.Mesh(tp=2), placements),
    loss_fn=lambda model, tokens, _: model(input_ids=tokens, labels=tokens).loss,
)
