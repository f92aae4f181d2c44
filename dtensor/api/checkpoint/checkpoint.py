"""`save`, `load`, `resume`: checkpoints that ranks write during training, and read.

    loaded = dt.resume("ckpt", model, opt)             # the newest in the folder; None: none yet
    for i in range(loaded.step if loaded else 0, 1000):
        step(*batches[i])
        if (i + 1) % 100 == 0:
            saved = dt.save(f"ckpt/{i + 1}", model, opt, step=i + 1, extra={...}, keep=3)
    saved.get()                                        # "ckpt/1000", once it is on the disk

A save is submitted like a step, and has its place in their order: it has the state after the steps
called before it, and no changes of those called after. One save runs at a time: the next waits for
it, so no rank holds more than one copy. Outside a launch, where no step could run meanwhile, it is
done when the call returns; so is one for Hugging Face, whose folder others write to.

Besides parameters, buffers and the optimizer's state a checkpoint has the facts that determine
random numbers: the seed, the number of the next training step, the counts of compiled functions'
calls.

A load checks all names, shapes and dtypes before it writes anything. In a launch each rank reads
its own ranges from the files; outside, the controller's tensors are filled, except that those on
the meta device stay on the disk until ranks need them.

Not here: the steps of a save (async_save.py), the matching of names (matching.py), the files
(runtime/checkpoint), whole states in memory (state_dict.py).
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
from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.step.wrapped_optimizers import checked_optional
from dtensor.api.store.default_home import current_homes
from dtensor.api.store.home import ModelHome
from dtensor.api.store.session import MeshSession, existing_session, launched
from dtensor.api.values.lazy_parameters import fault_in, holder_of, make_plain
from dtensor.api.values.on_disk import OnDisk
from dtensor.api.values.randomness import restore_counts
from dtensor.errors import PlanningError, check_kind, check_number, check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.checkpoint import Checkpoint, latest
from dtensor.runtime.checkpoint.saving import load_program

_ONE_SAVE = threading.RLock()
_LAST: list[Saved] = []
"""The save that the next one, and a load, wait for."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rest of a checkpoint besides values: ``step`` and ``extra`` as passed to `save`, and its
    ``path``. Without a step of the user's it is the number of training steps taken."""

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
    """Write a checkpoint during training: the state after the steps called before.

    Args:
        path: a folder that does not exist yet, and that all machines of the launch see. With
            ``format="hf"`` it may exist, for example with a tokenizer: other files stay, and files
            of an earlier save there are replaced, so that no reader gets a mix of both. Other
            weights in it are refused.
        optimizer: None leaves its state out.
        step: returned by `load`; by default the number of training steps taken.
        extra: returned by `load`: numbers, text, containers, tensors, such as state_dict()s of
            schedulers.
        keep: how many of dtensor's checkpoints of this format to leave in the folder around
            ``path``, the newest; others are removed with all their files.
        format: "dcp", the files of torch.distributed.checkpoint; "hf", safetensors of the model
            alone, as `from_pretrained` reads them.

    Outside a launch, and everywhere with ``format="hf"``, it returns when all is on the disk, and
    raises its failure: `from_pretrained(path)` may follow. Within a launch "dcp" is written while
    steps run, and the returned `Saved` raises its failure; if it is not read, the next save or the
    launch's end raises it; at the latest the process's end prints it, and its status is not 0. It
    waits for a running save, and so do `load` and `resume`. Raises PlanningError for state that
    cannot be written as requested.
    """
    _check_path("save", path)
    check_parallel("save", model)
    optimizer = checked_optional(optimizer)
    if format not in ("dcp", "hf"):
        raise PlanningError(
            f"format={format!r} does not exist.\n"
            f'fix: format="dcp", the files of torch.distributed.checkpoint; or "hf", safetensors'
        )
    if keep is not None:
        check_number("keep", keep, least=1, whole=True, fix="keep=3, or leave it out to keep all")
    if optimizer is not None and format == "hf":
        raise PlanningError(
            'format="hf" has the model alone: Hugging Face\'s files have no place for an '
            "optimizer.\n"
            'fix: dt.save(path, model, format="hf"), and another save to resume from'
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
    """Load a checkpoint into the model, and the optimizer, under any placement.

    Args:
        path: a path passed to `save`; or a directory of torch.distributed.checkpoint, or of
            Hugging Face's safetensors, that another program wrote.
        optimizer: None leaves the optimizer's state in the files.
        dtype: "saved" refuses a tensor of another dtype than the model's; "model" converts it.

    All or nothing: PlanningError for names, shapes or dtypes that differ, CheckpointError for a
    damaged file, DaftError where a rank fails; then nothing was loaded. Inside a launch the next
    step reads the optimizer's state, and damage within its files is an error there.
    """
    _check_path("load", path)
    _wait_for_save()
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
    saved_state = None if optimizer is None else matched_state(checkpoint, model, optimizer)
    with CALL_LOCK:
        session = existing_session(model.mesh) if launched() is not None else None
        if (
            session is None
            and saved_state is not None
            and not any(p.is_meta for p in model.parameters())
        ):
            saved_state.read()
        if session is None:
            _fill_here(checkpoint, model, values)
        else:
            _fill_ranks(checkpoint, session, model, values)
        if optimizer is not None and saved_state is not None:
            saved_state.give(optimizer)
        counters = checkpoint.small.get(OWN)
        if counters is not None:
            restore_counts(counters["seed"], counters["counts"])
            model.steps.restore(counters["steps"])
        if session is not None:
            where = f"{checkpoint.path} has the values that were loaded"
            session.model_home(model).saved = where, model.steps.present()
    return _told(checkpoint, path)


def resume(
    path: str | os.PathLike[str],
    model: ParallelModule | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Loaded | None:
    """Load the newest whole checkpoint in a folder, or the one at ``path``; None if there is none.

    So a script that begins with this line continues after a kill. Without a model it only describes
    the checkpoint and loads no values; without an optimizer its state stays in the files. Raises
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
    return _told(Checkpoint.open(newest), newest)


def _wait_for_save() -> None:
    """Wait until the last save has ended: it may write the folder that is read next. A failure of
    the save is not raised here."""
    with _ONE_SAVE:
        if _LAST:
            _LAST[-1].join()


def _told(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> Loaded:
    counters = checkpoint.small.get(OWN)
    step = (
        counters["steps"] if checkpoint.step is None and counters is not None else checkpoint.step
    )
    return Loaded(step, checkpoint.extra, os.fspath(path))


def _check_path(verb: str, path: object) -> None:
    check_kind("the path", path, str | os.PathLike, "a path", f'dt.{verb}("ckpt/100", model, opt)')


# -- giving a model its values ---------------------------------------------------------------------


def _fill_here(checkpoint: Checkpoint, model: ParallelModule, values: Mapping[str, OnDisk]) -> None:
    """Fill the controller's tensors, all read before the first is written; those on meta stay on
    the disk."""
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
    model_home = session.model_home(model)
    model_home.settle()
    tensors, homes = model.seen.tensors, current_homes(model, session.ranks, model_home)
    folder = os.path.abspath(checkpoint.path)
    wanted = {stored.name: homes[label] for label, stored in values.items()}
    model_home.store.load(
        model_home.owner,
        {label: homes[label] for label in values},
        lambda cluster: load_program(folder, wanted, cluster.size, cluster.device),
    )
    for label in values:
        _leave_other_holder(tensors[label], model_home)
    model.initial.leave_on_disk({n: s for n, s in values.items() if tensors[n].is_meta})
    model_home.keep({label: tensors[label] for label in values})
    model_home.stale |= values.keys() & model_home.local_tensors.keys()
    model_home.changed = any(
        tensors[label].is_meta for label in model_home.stored.keys() - values.keys()
    )
    model_home.unsaved = False


def _leave_other_holder(tensor: Tensor, model_home: ModelHome) -> None:
    """The value on another cluster is no longer valid; tell that holder, if it still answers."""
    holder = holder_of(tensor)
    if holder is not None and holder is not model_home:
        if holder.gone:
            make_plain(tensor)
        else:
            fault_in(tensor)
