"""`save`, `load`, `resume`: checkpoints that ranks write while training goes on, and read.

    loaded = dt.resume("ckpt", model, opt)             # the newest in the folder; None: none yet
    for i in range(loaded.step if loaded else 0, 1000):
        step(*batches[i])
        if (i + 1) % 100 == 0:
            saved = dt.save(f"ckpt/{i + 1}", model, opt, step=i + 1, extra={...}, keep=3)
    saved.get()                                        # "ckpt/1000", once it is on the disk

A save is submitted like a step, and has its place in their order: it has the state after the steps
called before it, and nothing of those called after. One save is under way at a time: the next waits
for it, so that no rank holds more than one copy. Where no step could go on beside it, outside a
launch, it is over when the call returns; so is one for Hugging Face, whose folder others write to.

Besides parameters, buffers and the optimizer's state a checkpoint has what random numbers depend
on: the seed, the number of the next training step, the counts of compiled functions' calls.

A load checks all names, shapes and dtypes before it writes anything. In a launch each rank reads
its own ranges from the files; outside, the controller's tensors are filled, but those on the meta
device stay on the disk until ranks need them.

Not here: what a save does (async_save.py), which name is whose (matching.py), the files
(runtime/checkpoint), whole states in memory (state.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtensor.api.checkpoint.async_save import Saved, SaveOptions, submitted
from dtensor.api.checkpoint.matching import OWN, matched, matched_state
from dtensor.api.checkpoint.state_dict import checked_optional
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.store.default_home import kept
from dtensor.api.store.home import Resident
from dtensor.api.store.session import MeshSession, launched, session_at_hand
from dtensor.api.values.lazy_parameters import at_hand, bring_back, holder_of
from dtensor.api.values.on_disk import OnDisk
from dtensor.api.values.randomness import restore_counts
from dtensor.errors import PlanningError, check_kind, check_number, check_word
from dtensor.frontend.alone import ONE_AT_A_TIME
from dtensor.runtime.checkpoint import Checkpoint, latest
from dtensor.runtime.checkpoint.saving import load_program

_ONE_SAVE = threading.RLock()
_LAST: list[Saved] = []
"""The save that the next one waits for."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint has besides values: ``step`` and ``extra`` as `save` was given them, and
    its ``path``. Without a step of the user's it is the number of training steps taken."""

    step: int | None
    extra: Any
    path: str


def save(
    path: str | os.PathLike[str],
    model: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    format: str = "dcp",
) -> Saved:
    """Write a checkpoint while training goes on: the state after the steps called before.

    Args:
        path: a folder that is not there yet, and that all machines of the launch see. With
            ``format="hf"`` it may be there, with a tokenizer, say: other files stay, and what a
            save wrote there before is replaced, so that no reader gets a part of both. Other
            weights in it are refused.
        optimizer: None leaves its state out.
        step: what `load` gives back; by default the number of training steps taken.
        extra: so is this: numbers, text, containers, tensors; state_dict()s of schedulers, say.
        keep: how many of dtensor's checkpoints of this format to leave in the folder around
            ``path``, the newest; others are removed with all that is in them.
        format: "dcp", the files of torch.distributed.checkpoint; "hf", safetensors of the model
            alone, as `from_pretrained` reads them.

    Outside a launch, and everywhere with ``format="hf"``, it returns when all is on the disk, and
    raises what fails: `from_pretrained(path)` may follow. Within a launch "dcp" is written beside
    the steps, and what fails is raised by the `Saved` that this returns; if nobody reads it, by the
    next save or the launch's end; at the latest the process's end prints it, and its status is not
    0. It waits for a save that is under way. Raises PlanningError for what cannot be written as
    stated.
    """
    _check_path("save", path)
    check_parallel("save", model)
    optimizer = checked_optional(optimizer)
    if format not in ("dcp", "hf"):
        raise PlanningError(
            f"format={format!r} is none that there is.\n"
            f'fix: format="dcp", the files of torch.distributed.checkpoint; or "hf", safetensors'
        )
    if keep is not None:
        check_number("keep", keep, least=1, whole=True, fix="keep=3, or leave it out to keep all")
    if optimizer is not None and format == "hf":
        raise PlanningError(
            'format="hf" has the model alone: Hugging Face\'s files have no place for an '
            "optimizer.\n"
            'fix: dt.save(path, model, format="hf"), and another save for what is to be resumed'
        )
    stated = SaveOptions(os.fspath(path), step, extra, keep, format)
    with _ONE_SAVE:
        if _LAST:
            _LAST.pop().settle()
        saved = submitted(stated, model, optimizer)
        _LAST.append(saved)
    if format == "hf" or launched() is None:
        saved.wait()
    return saved


def load(
    path: str | os.PathLike[str],
    model: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    dtype: str = "saved",
) -> Loaded:
    """Give the model, and the optimizer, what a checkpoint has, however they are placed.

    Args:
        path: what `save` was given; or another's directory of torch.distributed.checkpoint, or of
            Hugging Face's safetensors.
        optimizer: None leaves the optimizer's state in the files.
        dtype: "saved" refuses a tensor of another dtype than the model's; "model" converts it.

    All or nothing: PlanningError for names, shapes or dtypes that differ, CheckpointError for a
    damaged file, DaftError where a rank fails; then nothing was loaded. Inside a launch the
    optimizer's state is read by the next step, and damage within its files is an error there.
    """
    _check_path("load", path)
    check_parallel("load", model)
    optimizer = checked_optional(optimizer)
    check_word("dtype", dtype, ("saved", "model"))
    if model.source is not None:
        raise PlanningError(
            "a replica has no values of its own to load.\n"
            "fix: dt.load(path, policy, opt), then dt.sync(policy, actor)"
        )
    checkpoint = Checkpoint.open(path)
    checkpoint.check_files()
    model.look()
    values = matched(checkpoint, model, convert=dtype == "model")
    found = None if optimizer is None else matched_state(checkpoint, model, optimizer)
    with ONE_AT_A_TIME:
        session = session_at_hand(model.mesh) if launched() is not None else None
        if session is None and found is not None and not any(p.is_meta for p in model.parameters()):
            found.read()
        if session is None:
            _fill_here(checkpoint, model, values)
        else:
            _fill_ranks(checkpoint, session, model, values)
        if optimizer is not None and found is not None:
            found.give(optimizer)
        own = checkpoint.small.get(OWN)
        if own is not None:
            restore_counts(own["seed"], own["counts"])
            model.steps.restore(own["steps"])
        if session is not None:
            where = f"{checkpoint.path} has what was loaded"
            session.resident(model).saved = where, model.steps.present()
    return _told(checkpoint, path)


def resume(
    path: str | os.PathLike[str],
    model: ParallelModule | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Loaded | None:
    """Load the newest whole checkpoint in a folder, or the one at ``path``; None if there is none.

    So a script that was killed begins with this line and goes on where it was. Without a model it
    says what is there and loads no values; without an optimizer its state stays in the files.
    Raises what `load` raises.
    """
    _check_path("resume", path)
    newest = os.fspath(path)
    if not Path(path, "manifest.json").exists():
        if os.path.exists(path) and not os.path.isdir(path):
            raise PlanningError(
                f"{newest} is a file; checkpoints are folders.\nfix: dt.resume('ckpt')"
            )
        newest = latest(path, "dcp")  # weights alone are none to go on from
    if newest is None:
        return None
    if model is not None:
        return load(newest, model, optimizer)
    if optimizer is not None:
        raise PlanningError(
            "resume has an optimizer and no model.\nfix: dt.resume(path, model, opt)"
        )
    return _told(Checkpoint.open(newest), newest)


def _told(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> Loaded:
    own = checkpoint.small.get(OWN)
    step = own["steps"] if checkpoint.step is None and own is not None else checkpoint.step
    return Loaded(step, checkpoint.extra, os.fspath(path))


def _check_path(verb: str, path: object) -> None:
    check_kind("the path", path, str | os.PathLike, "a path", f'dt.{verb}("ckpt/100", model, opt)')


# -- giving a model its values ---------------------------------------------------------------------


def _fill_here(checkpoint: Checkpoint, model: ParallelModule, values: Mapping[str, OnDisk]) -> None:
    """The controller's tensors, read before the first is written; what is on meta stays there."""
    tensors = model.seen.tensors
    on_meta = {label: stored for label, stored in values.items() if tensors[label].is_meta}
    read = {
        label: checkpoint.read(stored.name).to(stored.dtype)
        for label, stored in values.items()
        if label not in on_meta
    }
    for label, value in read.items():
        with torch.inference_mode(tensors[label].is_inference()), torch.no_grad():
            tensors[label].copy_(value)
    if on_meta:
        model.initial.leave_on_disk(on_meta)
        model.loads += 1


def _fill_ranks(
    checkpoint: Checkpoint,
    session: MeshSession,
    model: ParallelModule,
    values: Mapping[str, OnDisk],
) -> None:
    """Each rank reads its shards of all values."""
    resident = session.resident(model)
    resident.settle()
    tensors, homes = model.seen.tensors, kept(model, session.ranks, resident)
    folder = os.path.abspath(checkpoint.path)
    wanted = {stored.name: homes[label] for label, stored in values.items()}
    resident.store.load(
        resident.owner,
        {label: homes[label] for label in values},
        lambda cluster: load_program(folder, wanted, cluster.size, cluster.device),
    )
    for label in values:
        _leave_other_holder(tensors[label], resident)
    model.initial.leave_on_disk({n: s for n, s in values.items() if tensors[n].is_meta})
    resident.keep({label: tensors[label] for label in values})
    resident.stale |= values.keys() & resident.own.keys()
    resident.changed = any(
        tensors[label].is_meta for label in resident.stored.keys() - values.keys()
    )
    resident.unsaved = False


def _leave_other_holder(tensor: Tensor, resident: Resident) -> None:
    """What another cluster has of it counts no longer, and it is told, if it can be asked."""
    holder = holder_of(tensor)
    if holder is not None and holder is not resident:
        if holder.gone:
            bring_back(tensor)
        else:
            at_hand(tensor)
