"""A few families of the sweeps over transformers for CI, and checks that the sweep detects errors.

`make hf` runs the full sweep.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))


import dtensor as dt
from dtensor.sharding.rules import pattern, registry
from tests.huggingface_sweep import context
from tests.huggingface_sweep.judge import families, judge

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.mark.slow
@pytest.mark.sample("vit-ViTForImageClassification", "wav2vec2-Wav2Vec2ForSequenceClassification")
@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("bloom", "BloomForCausalLM"),  # a custom autograd Function
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("mixtral", "MixtralForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("wav2vec2", "Wav2Vec2ForSequenceClassification"),
    ],
)
def test_family_trains_as_torch_over_two_ranks(family: str, model: str) -> None:
    record = judge(family)
    assert (record.verdict, record.model, record.captures) == ("right", model, 1), record.reason
    assert record.split > 0


@pytest.mark.slow
def test_sweep_finds_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted rule is a loss whose backward ignores which columns of the vocabulary a rank
    holds."""
    wrong = pattern("n, n v, n k!, n -> n v", linear=((0,),))
    monkeypatch.setitem(registry._BUILDERS, "dt.ce_backward.default", wrong)
    record = judge("llama")
    assert record.verdict == "wrong"


@pytest.mark.slow
def test_sweep_reports_missing_rule_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._BUILDERS, "dt.gated.default")
    record = judge("llama")
    assert (record.verdict, record.stage) == ("refused", "for_model")
    assert "no rule says how dt.gated.default" in record.reason


@pytest.mark.default("gemma2-zero3-ring")
@pytest.mark.parametrize("strategy", context.KINDS)
@pytest.mark.parametrize("layout", context.LAYOUTS)
@pytest.mark.parametrize("family", [name for name in context.FAMILIES if name != "gpt2"])
def test_steps_with_split_sequence_match_torch(family: str, layout: str, strategy: str) -> None:
    found = context.judge(context.FAMILIES[family], layout, strategy, tokens=dt.Zigzag(1))
    assert found.startswith("right"), found


@pytest.mark.slow
@pytest.mark.parametrize("layout", context.LAYOUTS)
def test_steps_with_dropout_and_split_sequence_match_one_rank(layout: str) -> None:
    found = context.judge(context.FAMILIES["gpt2"], layout, "auto", tokens=dt.Zigzag(1))
    assert found.startswith("right"), found


def test_sweep_lists_every_family_once() -> None:
    names = families()
    assert len(names) == len(set(names)) >= 150
    assert {"llama", "mixtral", "whisper", "vit"} <= set(names)


def test_committed_sweep_table_has_no_wrong_results() -> None:
    root = Path(__file__).parents[2]
    text = (root / "benchmarks" / "results" / "huggingface.md").read_text()
    found = {
        cells[1].strip(): cells[2].strip()
        for line in text.splitlines()
        if len(cells := line.split("|")) == 4
    }
    assert found["wrong"] == "0"
    assert int(found["built small, and trained by plain torch"]) >= 150
    assert float(found["right, of those that plain torch trains"].rstrip("%")) >= 92
