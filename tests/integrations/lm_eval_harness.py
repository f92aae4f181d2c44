"""EleutherAI's lm-evaluation-harness: its HFLM, whose forward is a program on the ranks.

    lm_eval.simple_evaluate(model=ParallelLM(model, tokenizer=tokenizer), tasks=["arc_easy"])

Texts that are generated (`generate_until`) come from `model.module`, on the controller.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import dtensor as dt
from tests.integrations.cases import Case, Outcome, Trained, compared, on_two, tiny, words


# begin
def logits(model, tokens):
    return model(tokens).logits


class ParallelLM(HFLM):
    def __init__(self, model, multiple=32, **options):
        super().__init__(pretrained=model.module, backend="causal", **options)
        self.parallel, self.multiple = model, multiple
        self.program = dt.compile(logits, model.mesh)

    def _model_call(self, inps, attn_mask=None, labels=None):
        rows, length = inps.shape
        more = -length % self.multiple  # few lengths and sizes: each new one costs a capture
        padded = torch.nn.functional.pad(inps, (0, more, 0, self.batch_size - rows))
        return self.program(self.parallel, padded).full_tensor()[:rows, :length]


# end


def requests() -> list[Instance]:
    """Continuations of unequal lengths."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for i in range(10):
        drawn = torch.randint(4, 96, (3 + i,), generator=generator).tolist()
        text = [f"w{n}" for n in drawn]
        given = " ".join(text[:-2]), " " + " ".join(text[-2:])
        found.append(Instance("loglikelihood", {}, given, i, metadata=("own", i, 1)))
    return found


def likelihoods(lm: HFLM) -> Trained:
    """With 1.0 where the continuation is the likeliest."""
    found = lm.loglikelihood(requests(), disable_tqdm=True)
    return Trained([x for value, greedy in found for x in (value, float(greedy))])


def plain(net: Any) -> HFLM:
    return HFLM(pretrained=net, backend="causal", tokenizer=words(96), batch_size=4)


def by_ranks() -> Outcome:
    wanted = likelihoods(plain(tiny()))
    model = on_two(tiny())
    lm = ParallelLM(model, multiple=16, tokenizer=words(96), batch_size=4)
    with dt.launch(model.mesh):
        return compared(wanted, likelihoods(lm))


CASES = (Case("subclass, tp=2", by_ranks),)
