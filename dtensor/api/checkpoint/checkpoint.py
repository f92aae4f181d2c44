"""`save`, `load`, `resume`: checkpoints that ranks write during training, and read.

    loaded = dt.resume("ckpt", model, opt)             # the newest in the folder; None: none yet
    for i in range(loaded.step if loaded else 0, 1000):
        step(*batches[i])
        if (i + 1) % 100 == 0:
            saved = dt.save(f"ckpt/{i + 1}", model, opt, step=i + 1, extra={...}, keep=3)
    saved.get()                                        # "ckpt/1000", once it is on the disk

A save has the state after the steps that were called before it. One save runs at a time. A load
checks all names, shapes and dtypes before it changes anything.
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

from dtensor.api.checkpoint.async_save import Saved, SaveOptions, submit_save
from dtensor.api.checkpoint.matching import OWN, InCheckpoint, matched, matched_states
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.step.wrapped_optimizers import Optimizers, checked_optimizers
from dtensor.api.store.default_home import current_homes
from dtensor.api.store.home import ModelHome
from dtensor.api.store.session import MeshSession, existing_session, launched
from dtensor.api.values.lazy_parameters import fault_in, holder_of, make_plain
from dtensor.api.values.randomness import restore_counts
from dtensor.errors import PlanningError, check_kind, check_number, check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.checkpoint import Checkpoint, latest
from dtensor.runtime.checkpoint.assembly import read_block
from dtensor.runtime.checkpoint.saving import load_program

_SAVE_LOCK = threading.RLock()
_LAST_SAVE: list[Saved] = []
"""The last save, which the next save and loads wait for."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The description of a loaded checkpoint: ``step`` and ``extra`` as passed to `save`, and its
    ``path``. If no step was passed, ``step`` is the number of training steps taken."""

    step: int | None
    extra: Any
    path: str


def save(
    path: str | os.PathLike[str],
    model: ParallelModule,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    format: str = "dcp",
) -> Saved:
    """Write a checkpoint during training: the state after the steps called before.

    Args:
        path: a folder that does not exist yet, and that all machines of the launch see. With
            ``format="hf"`` it may exist, for example with a tokenizer: other files stay, and files
            of an earlier save there are replaced, so that no reader gets a mix of both. Other
            weights in it are refused.
        optimizer: an optimizer, or a list of several; None leaves the state out.
        step: returned by `load`; by default the number of training steps taken.
        extra: returned by `load`: numbers, text, containers, tensors, such as state_dict()s of
            schedulers.
        keep: how many of dtensor's checkpoints of this format to leave in the folder around
            ``path``, the newest; others are removed with all their files.
        format: "dcp", the files of torch.distributed.checkpoint; "hf", safetensors of the model
            alone, as `from_pretrained` reads them: with the published names of a transformers
            model, such as one tensor for each expert.

    Within a launch, "dcp" is written while later steps run, and the returned `Saved` raises a
    failure. If the optimizer needs whole parameters, `save` first waits for running steps. A
    failure that was not read is raised by the next save or by the launch's end, or it is printed at
    the end of the process, whose exit status is then not 0. Outside a launch, and with
    ``format="hf"``, `save` returns when all is on the disk, and raises a failure itself. `save`,
    `load` and `resume` wait for a running save. Raises PlanningError for state that cannot be
    written as requested.
    """
    _check_path("save", path)
    check_parallel("save", model)
    optimizers = checked_optimizers(optimizer)
    if format not in ("dcp", "hf"):
        raise PlanningError(
            f"format={format!r} does not exist.\n"
            f'fix: format="dcp", the files of torch.distributed.checkpoint; or "hf", safetensors'
        )
    if keep is not None:
        check_number("keep", keep, least=1, whole=True, fix="keep=3, or leave it out to keep all")
    if optimizers and format == "hf":
        raise PlanningError(
            'format="hf" has the model alone: Hugging Face\'s files have no place for an '
            "optimizer.\n"
            'fix: dt.save(path, model, format="hf"), and another save to resume from'
        )
    stated = SaveOptions(os.fspath(path), step, extra, keep, format)
    with _SAVE_LOCK:
        if _LAST_SAVE:
            _LAST_SAVE.pop().settle()
        saved = submit_save(stated, model, optimizers)
        _LAST_SAVE.append(saved)
    if format == "hf" or launched() is None:
        saved.wait()
    return saved


def load(
    path: str | os.PathLike[str],
    model: ParallelModule,
    optimizer: Optimizers | None = None,
    *,
    dtype: str = "saved",
) -> Loaded:
    """Load a checkpoint into the model and the optimizer, with any placements.

    Args:
        path: a path passed to `save`; or a directory of torch.distributed.checkpoint, or of
            Hugging Face's safetensors, that another program wrote. These may have the published
            names of a transformers model.
        optimizer: an optimizer, or the list that was saved, in its order; None leaves the state in
            the files.
        dtype: "saved" refuses a tensor of another dtype than the model's; "model" converts it.

    In a launch each rank reads its own shards. Outside, the controller's tensors are filled, but
    tensors on the meta device stay in the files until ranks need them. Raises PlanningError for
    names, shapes or dtypes that differ, CheckpointError for a damaged file, and DaftError if a rank
    fails; nothing was loaded then. Inside a launch the next step reads the optimizer's state, and
    raises the error of a damaged file.
    """
    _check_path("load", path)
    _wait_for_save()
    check_parallel("load", model)
    optimizers = checked_optimizers(optimizer)
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
    saved_states = matched_states(checkpoint, model, optimizers)
    with CALL_LOCK:
        session = existing_session(model.mesh) if launched() is not None else None
        if session is None and not any(p.is_meta for p in model.parameters()):
            for saved_state in saved_states:
                saved_state.read()
        if session is None:
            _fill_controller(checkpoint, model, values)
        else:
            _fill_ranks(checkpoint, session, model, values)
        for loaded_optimizer, saved_state in zip(optimizers, saved_states, strict=True):
            saved_state.give(loaded_optimizer)
        counters = checkpoint.small.get(OWN)
        if counters is not None:
            restore_counts(counters["seed"], counters["counts"])
            model.steps.restore(counters["steps"])
        if session is not None:
            saved_note = f"{checkpoint.path} has the values that were loaded"
            session.model_home(model).saved = saved_note, model.steps.present()
    return _describe(checkpoint, path)


def resume(
    path: str | os.PathLike[str],
    model: ParallelModule | None = None,
    optimizer: Optimizers | None = None,
) -> Loaded | None:
    """Load the newest complete checkpoint in a folder, or the checkpoint at ``path``. Return None
    if there is none.

    A script that begins with this call continues after it was killed. Without a model, it only
    describes the checkpoint; without an optimizer, the optimizer's state stays in the files. Raises
    the errors of `load`.
    """
    _check_path("resume", path)
    _wait_for_save()
    newest = os.fspath(path)
    if not Path(path, "manifest.json").exists():
        if os.path.exists(path) and not os.path.isdir(path):
            raise PlanningError(
                f"{newest} is a file; checkpoints are folders.\nfix: dt.resume('ckpt')"
            )
        newest = latest(path, "dcp")  # weights alone are not enough to resume
    if newest is None:
        return None
    if model is not None:
        return load(newest, model, optimizer)
    if optimizer is not None:
        raise PlanningError(
            "resume has an optimizer and no model.\nfix: dt.resume(path, model, opt)"
        )
    return _describe(Checkpoint.open(newest), newest)


def _wait_for_save() -> None:
    """Wait for the last save, which may write the folder that is read next. Ignores its failure."""
    with _SAVE_LOCK:
        if _LAST_SAVE:
            _LAST_SAVE[-1].join()


def _describe(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> Loaded:
    """Return the description of a checkpoint. A missing step is the number of training steps."""
    counters = checkpoint.small.get(OWN)
    step = (
        counters["steps"] if checkpoint.step is None and counters is not None else checkpoint.step
    )
    return Loaded(step, checkpoint.extra, os.fspath(path))


def _check_path(verb: str, path: object) -> None:
    check_kind("the path", path, str | os.PathLike, "a path", f'dt.{verb}("ckpt/100", model, opt)')


# -- giving a model its values ---------------------------------------------------------------------


def _fill_controller(
    checkpoint: Checkpoint, model: ParallelModule, values: Mapping[str, InCheckpoint]
) -> None:
    """Read all values, then fill the controller's tensors, except tensors on the meta device."""
    tensors = model.seen.tensors
    on_meta = {label: stored for label, stored in values.items() if tensors[label].is_meta}
    values_read = {
        label: read_block(checkpoint, stored.source).to(stored.dtype)
        for label, stored in values.items()
        if label not in on_meta
    }
    for label, value in values_read.items():
        with torch.inference_mode(tensors[label].is_inference()), torch.no_grad():
            tensors[label].copy_(value)
    if on_meta:
        model.initial.set_on_disk(on_meta)
        model.loads += 1


def _fill_ranks(
    checkpoint: Checkpoint,
    session: MeshSession,
    model: ParallelModule,
    values: Mapping[str, InCheckpoint],
) -> None:
    """Have each rank read its shards of all values."""
    model_home = session.model_home(model)
    model_home.settle()
    tensors, homes = model.seen.tensors, current_homes(model, session.ranks, model_home)
    folder = os.path.abspath(checkpoint.path)
    sources = [(stored.source, homes[label]) for label, stored in values.items()]
    model_home.store.load(
        model_home.owner,
        {label: homes[label] for label in values},
        lambda cluster: load_program(folder, sources, cluster.size, cluster.device),
    )
    for label in values:
        _leave_other_holder(tensors[label], model_home)
    model.initial.set_on_disk({n: s for n, s in values.items() if tensors[n].is_meta})
    model_home.make_lazy({label: tensors[label] for label in values})
    model_home.stale |= values.keys() & model_home.local_tensors.keys()
    model_home.changed = any(
        tensors[label].is_meta for label in model_home.stored.keys() - values.keys()
    )
    model_home.unsaved = False


def _leave_other_holder(tensor: Tensor, model_home: ModelHome) -> None:
    """Make the tensor plain if another cluster holds its value, which is no longer valid."""
    holder = holder_of(tensor)
    if holder is not None and holder is not model_home:
        if holder.gone:
            make_plain(tensor)
        else:
            fault_in(tensor)
