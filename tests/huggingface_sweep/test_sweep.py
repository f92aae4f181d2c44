"""CI's part of the sweep over transformers: a few families, and that it finds what is wrong.

The whole is `make hf`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dtensor.sharding.rules import pattern, registry
from tests.huggingface_sweep.judge import families, judge
from tests.huggingface_sweep.record import Record
from tests.huggingface_sweep.shrink import small
from tests.huggingface_sweep.table import load, numbers, write

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
def test_family(family: str, model: str) -> None:
    record = judge(family)
    assert (record.verdict, record.model, record.captures) == ("right", model, 1), record.reason
    assert record.split > 0


@pytest.mark.slow
def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss whose backward does not know which columns of the vocabulary a rank holds."""
    wrong = pattern("n, n v, n k!, n -> n v", linear=((0,),))
    monkeypatch.setitem(registry._BUILDERS, "dt.ce_backward.default", wrong)
    record = judge("llama")
    assert record.verdict == "wrong"


@pytest.mark.slow
def test_a_missing_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._BUILDERS, "dt.gated.default")
    record = judge("llama")
    assert (record.verdict, record.stage) == ("refused", "for_model")
    assert "no rule says how dt.gated.default" in record.reason


def test_configurations_are_small() -> None:
    mixtral = small(CONFIG_MAPPING["mixtral"], "declared")
    found = (mixtral.hidden_size, mixtral.num_hidden_layers, mixtral.num_local_experts)
    assert found == (64, 2, 4)
    assert (mixtral.num_attention_heads, mixtral.num_key_value_heads) == (4, 2)
    bert = small(CONFIG_MAPPING["bert"], "declared")
    assert bert.hidden_dropout_prob == bert.attention_probs_dropout_prob == 0
    llava = small(CONFIG_MAPPING["llava"], "declared")
    assert (llava.text_config.hidden_size, llava.vision_config.image_size) == (64, 64)
    assert 0 < llava.image_token_index < llava.text_config.vocab_size


def test_every_family_is_listed_once() -> None:
    names = families()
    assert len(names) == len(set(names)) >= 150
    assert {"llama", "mixtral", "whisper", "vit"} <= set(names)


def test_records_and_their_table(tmp_path: Path) -> None:
    records = [
        Record(family="a", verdict="right", model="A", split=2, captures=1),
        Record(family="b", verdict="refused", reason="no rule says how x.y(f32[2]) may be split"),
        Record(family="c", reason="needs a picture of 3 | 4"),
    ]
    out = tmp_path / "found.jsonl"
    older = dataclasses.replace(records[0], verdict="wrong")
    lines = [json.dumps(r.as_json()) for r in (older, *records)]
    out.write_text("\n".join(lines) + "\n")
    assert load(out) == records
    assert numbers(records)["right %"] == 50
    write(tmp_path / "table.md", records)
    text = (tmp_path / "table.md").read_text()
    assert "| a | A | 2 |" in text
    assert "no rule says how x.y(...) may be split | 1 | b |" in text


def test_the_committed_table_has_no_wrong_numbers() -> None:
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
    guide = (root / "docs" / "huggingface.md").read_text()
    assert (
        f"{found['right']} of {found['built small, and trained by plain torch']} families" in guide
    )
