"""Judge one family: a small model, two steps of plain torch, the same over tp=2, and the
comparison.

    judge("mixtral").verdict      # "right", "refused", "wrong" or "not run"

The model is the first of HEADS that plain torch can train on a batch of inputs.py; without its own
loss, a number made of its outputs is used. Right: both losses within LOSS, each weight within
WEIGHT of its largest element and each change within CHANGE of the largest change of that weight,
and no capture after the first of five calls. If float32 differs, float64 must agree ten times
closer.
"""

from __future__ import annotations

import copy
import math
import random
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dtensor as dt
from dtensor.api.step import bound_call
from tests.huggingface_sweep.inputs import NoInput, batches
from tests.huggingface_sweep.record import Record
from tests.huggingface_sweep.shrink import HOW, small

HEADS = {
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "SpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
    "MaskedLM": "MASKED_LM",
    "ImageTextToText": "IMAGE_TEXT_TO_TEXT",
    "MultimodalLM": "MULTIMODAL_LM",
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "VideoClassification": "VIDEO_CLASSIFICATION",
    "AudioClassification": "AUDIO_CLASSIFICATION",
    "CTC": "CTC",
    "SequenceClassification": "SEQUENCE_CLASSIFICATION",
    "TokenClassification": "TOKEN_CLASSIFICATION",
    "SemanticSegmentation": "SEMANTIC_SEGMENTATION",
    "ObjectDetection": "OBJECT_DETECTION",
    "DepthEstimation": "DEPTH_ESTIMATION",
    "Model": "",
}
LOSS, WEIGHT, CHANGE = 1e-5, 1e-4, 1e-3
RATE = 0.05
STEPS, CALLS = 2, 5
MOST_PARAMETERS = 20_000_000
Step = tuple[list[float], dict[str, Tensor]]  # the losses, the weights after them


def families() -> list[str]:
    names: set[str] = set()
    for key, mapping in vars(modeling_auto).items():
        if key.startswith("MODEL_") and key.endswith("MAPPING_NAMES"):
            names |= set(mapping)
    return sorted(names)


def judge(
    family: str, begun: Callable[[Record], None] | None = None, patience_s: float = math.inf
) -> Record:
    """Judge a family. ``begun`` is called with the record once plain torch has trained the family;
    ``patience_s`` limits the search for a model that plain torch trains."""
    record = Record(family=family)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", message="The program reads ")  # ours: none is due
    found = trainable(family, record, patience_s)
    if found is None:
        return record
    model, batch, plain = found
    record.parameters = sum(p.numel() for p in model.parameters())
    if begun is not None:
        begun(record)
    try:
        ours = _distributed(model, batch, record)
    except Exception as error:  # what is refused, and by whom, is what is asked here
        return _failed(record, "refused", error)
    _compare(record, model, plain, ours, 1.0)
    if record.verdict == "wrong":
        _again_in_double(record, model, batch)
    if record.captures != 1:
        record.verdict, record.reason = "wrong", f"{record.captures} captures in {CALLS} calls"
    return record


# -- what plain torch trains -----------------------------------------------------------------------


def trainable(
    family: str, record: Record, patience_s: float = math.inf
) -> tuple[nn.Module, dict[str, Tensor], Step] | None:
    """Return a model of the family, a batch, and two steps of plain torch; None with the reason in
    the record."""
    reasons: list[tuple[str, Exception]] = []
    started = time.monotonic()
    for how in HOW:
        try:
            config = small(CONFIG_MAPPING[family], how)
            classes = _classes(config)
        except Exception as error:  # anything: each family has ways of its own to want more
            reasons.append(("configuration", error))
            continue
        for head, cls in classes:
            if time.monotonic() - started > patience_s:
                break
            try:
                model = _build(cls, config)
                for batch in batches(model, head):
                    try:
                        plain = _plain(model, batch)
                    except Exception as error:
                        reasons.append(("torch", error))
                        continue
                    record.model = cls.__name__
                    return model, batch, plain
            except Exception as error:
                reasons.append(("torch" if isinstance(error, NoInput) else "build", error))
    if not reasons:
        reasons = [("build", ValueError("no class of a model that is looked for takes it"))]
    stage, error = next((r for r in reasons if r[0] == "torch"), reasons[0])
    _failed(record, "not run", error)
    record.stage = stage
    return None


def _classes(config: PreTrainedConfig) -> list[tuple[str, type[nn.Module]]]:
    classes: list[tuple[str, type[nn.Module]]] = []
    for head, key in HEADS.items():
        mapping = vars(modeling_auto)[f"MODEL_FOR_{key}_MAPPING" if key else "MODEL_MAPPING"]
        if type(config) in mapping:
            found = mapping[type(config)]
            several = found if isinstance(found, tuple) else (found,)
            classes += [(head, cls) for cls in several]
    return classes


def _build(cls: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    def counted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        count += 0 if parameter is None else parameter.numel()
        if count > MOST_PARAMETERS:
            raise ValueError("more than 20 million parameters: too large to be run here")

    count = 0
    _seed(0)
    with register_module_parameter_registration_hook(counted):
        return cls(copy.deepcopy(config)).float().train()


def _seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's own loss, or else a number that depends on every tensor with a
    gradient."""
    out = model(**batch)
    if isinstance(out, dict) and isinstance(out.get("loss"), Tensor):
        return out["loss"].sum()
    values = out.values() if isinstance(out, dict) else [out]
    leaves = [x for v in values for x in pytree.tree_leaves(v) if isinstance(x, Tensor)]
    return sum((x.sin().mean() for x in leaves if x.requires_grad), torch.zeros(()))


def _plain(model: nn.Module, batch: Mapping[str, Tensor]) -> Step:
    """Take two steps of plain torch on a copy."""
    losses: list[float] = []
    for seed in (0, 1):
        _seed(seed)
        own = copy.deepcopy(model)
        losses.append(loss_fn(own, batch).item())
    if losses[0] != losses[1]:
        raise ValueError("its loss depends on random numbers")
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(own, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {name: x.detach() for name, x in own.state_dict().items()}
    finite = all(x.isfinite().all() for x in weights.values() if x.is_floating_point())
    if not finite or not torch.tensor(losses).isfinite().all():
        raise ValueError("a loss or a weight is not finite")
    return losses, weights


# -- the same over two ranks -----------------------------------------------------------------------


def _distributed(model: nn.Module, batch: Mapping[str, Tensor], record: Record) -> Step:
    own = copy.deepcopy(model)
    record.stage = "for_model"
    placements = dt.placements.for_model(own, (), batch, size=2)
    record.split = len(placements)
    record.stage = "step"
    mesh = dt.Mesh(tp=2)
    placed = dt.parallelize(own, mesh, placements)
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    step = dt.train_step(placed, loss_fn, optimizer)
    with (
        mock.patch.object(bound_call, "capture", wraps=bound_call.capture) as captured,
        dt.launch(mesh),
    ):
        losses = [float(step(batch)) for _ in range(STEPS)]
        weights = dt.gather_state_dict(placed, optimizer)["model"]
        for _ in range(CALLS - STEPS):
            float(step(batch))
        record.captures = captured.call_count
    return losses, weights


# -- the comparison --------------------------------------------------------------------------------


def _compare(record: Record, model: nn.Module, plain: Step, ours: Step, scale: float) -> None:
    """``scale`` multiplies the tolerances; 1 for float32."""
    record.stage = "compare"
    record.verdict, record.reason = "right", ""
    pairs = zip(plain[0], ours[0], strict=True)
    record.loss_error = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
    if not record.loss_error <= LOSS * scale:
        record.verdict = "wrong"
        record.reason = f"losses {plain[0]}, not {ours[0]}"
    before = model.state_dict()
    floating = [n for n, x in plain[1].items() if x.is_floating_point()]
    moved = {n: (plain[1][n] - before[n]).abs().max().item() for n in floating if before[n].numel()}
    largest = max(moved.values())
    record.weight_error = 0.0
    for name, x in plain[1].items():
        if name not in ours[1]:
            record.verdict, record.reason = "wrong", f"{name} is not in the state"
            continue
        y = ours[1][name]
        if name not in moved:
            if not torch.equal(x, y):
                record.verdict, record.reason = "wrong", f"{name} differs"
            continue
        error, size = (x - y).abs().max().item(), x.abs().max().item()
        # what is zero but for rounding has no scale of its own
        floor = 1e-3 * largest
        record.weight_error = max(record.weight_error, error / max(size, floor))
        close = error <= scale * WEIGHT * max(size, floor)
        close &= error <= scale * (CHANGE * max(moved[name], floor) + 1e-6 * size)
        if not close:
            record.verdict = "wrong"
            record.reason = record.reason or (
                f"{name}: {error:.2e} off, its largest element {size:.2e}, its change "
                f"{moved[name]:.2e}"
            )


def _again_in_double(record: Record, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    reason = record.reason
    wide = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    double = copy.deepcopy(model).double()
    try:
        plain = _plain(double, wide)
        ours = _distributed(double, wide, record)
    except Exception as error:
        record.verdict, record.reason = "wrong", f"{reason}; in float64: {_first_line(error)}"
        return
    record.double = True
    _compare(record, double, plain, ours, 0.1)
    if record.verdict == "wrong":
        moved = Record(family=record.family)
        _compare(moved, double, plain, _plain(_rounded(double), wide), 0.01)
        if moved.verdict == "wrong":  # by as much as a tenth of what counts as wrong
            record.verdict = "not run"
            record.reason = "plain torch's own numbers change when a weight is rounded otherwise"
        else:
            record.reason = f"{reason}; in float64: {record.reason}"


def _rounded(model: nn.Module) -> nn.Module:
    """Return a copy in which every weight is off by about its last bit."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for p in own.parameters():
            p.mul_(1 + 2**-52 * torch.randint(-1, 2, p.shape, dtype=p.dtype))
    return own


def _failed(record: Record, verdict: Any, error: BaseException) -> Record:
    record.verdict, record.reason = verdict, _first_line(error)
    record.trace = "".join(traceback.format_exception(error))[-6000:]
    return record


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    name = "" if isinstance(error, dt.PlanningError) else f"{type(error).__name__}: "
    return f"{name}{lines[0][:300] if lines else ''}"
