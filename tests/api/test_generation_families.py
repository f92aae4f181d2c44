"""Every family of causal language models of transformers, in a small configuration, against its own
`generate`.

    pytest tests/api/test_generation_families.py -m "sweep or not sweep" -k "phi"

A family gives the same greedy tokens, or the generator refuses it by name. Weights are drawn from a
wider range than the models' own initialization. Models that transformers cannot build in a small
configuration, or cannot generate from, are skipped. Transformers 5.23: 87 equal, 60 refused, none
unequal.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.errors import PlanningError
from tests.api.generation import by_transformers
from tests.extras import missing
from tests.huggingface_sweep.shrink import HOW, small

modeling_auto = pytest.importorskip(
    "transformers.models.auto.modeling_auto", reason=missing("transformers")
)
LENGTH, NUM = 32, 12


def shrunk(family: str) -> Any:
    """Return a small model of the family, or skip the test."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    why: Exception | None = None
    for how in HOW:
        try:
            config = small(CONFIG_MAPPING[family], how)
            cls = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            torch.manual_seed(0)
            model = cls(copy.deepcopy(config)).float().eval()
        except Exception as error:  # anything: each family has ways of its own to want more
            why = error
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model
    pytest.skip(f"not built: {why!r}")


@pytest.mark.default("bert")
@pytest.mark.sample("bert", "opt")
@pytest.mark.parametrize("family", sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_family_generates_as_transformers_or_is_refused_by_name(family: str) -> None:
    model = shrunk(family)
    words = min(model.config.get_text_config(decoder=True).vocab_size, 90)
    drawn = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, words, (n,), generator=drawn).tolist() for n in (5, 11, 3)]
    model.generation_config.eos_token_id = None
    try:
        want = by_transformers(model, prompts, NUM)
    except Exception as error:  # as above
        pytest.skip(f"transformers does not generate from it: {error!r}")
    try:
        gen = dt.generator(
            dt.parallelize(model, dt.Mesh(), {}), slots=2, length=LENGTH, buckets=(LENGTH,)
        )
    except PlanningError as error:
        assert type(model).__name__ in str(error) and "fix: " in str(error)
        return
    assert [list(text.tokens) for text in gen(prompts, max_new_tokens=NUM)] == want
