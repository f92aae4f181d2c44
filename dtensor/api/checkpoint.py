"""`save`, `load`, `resume`: checkpoints that ranks write while training goes on, and read.

    loaded = dt.resume("ckpt", model, opt)             # the newest in the folder; None: none yet
    for i in range(loaded.step if loaded else 0, 1000):
        step(*batches[i])
        if (i + 1) % 100 == 0:
            saved = dt.save(f"ckpt/{i + 1}", model, opt, step=i + 1, extra={...}, keep=3)
    saved.get()                                        # "ckpt/1000", once it is on the disk

A save is submitted like a step, and has its place in their order: it has the state after the steps
called before it, and nothing of those called after. Each rank copies what it is to write and goes
on; a thread of its process writes (runtime/saving.py). A thread of the controller waits until all
have, and publishes the folder whole. One save is under way at a time: the next waits for it, so
that no rank holds more than one copy. What is still the controller's, it writes by the same code.

Besides parameters, buffers and the optimizer's state a checkpoint has what random numbers depend
on: the seed, the number of the next training step, the counts of compiled functions' calls.

A load checks all names, shapes and dtypes before it writes anything. In a launch each rank reads
its own ranges from the files; outside, the controller's tensors are filled, but those on the meta
device stay on the disk until ranks need them.

Not here: the files (runtime/checkpoint), whole states in memory (state.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dtensor.api.away import (
    ONE_AT_A_TIME,
    AwayState,
    Entries,
    as_it_is,
    at_hand,
    bring_back,
    holder_of,
)
from dtensor.api.initial import names_in_state
from dtensor.api.kept import kept
from dtensor.api.on_disk import OnDisk, read_whole
from dtensor.api.parallel import ParallelModule, check_parallel
from dtensor.api.randomness import counts, initial_seed, restore_counts
from dtensor.api.resident import Resident
from dtensor.api.session import MeshSession, launched, session_at_hand
from dtensor.api.stating.patterns import listing, nearest
from dtensor.daft import DaftError, Future
from dtensor.errors import PlanningError, check_kind, check_number, check_word
from dtensor.frontend.graph import named_tensors
from dtensor.numerics import dtype_name
from dtensor.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    PartRecord,
    TensorPiece,
    TensorRecord,
    Writing,
    latest,
    read_part,
)
from dtensor.runtime.saving import (
    SAVING,
    WRITING,
    WRITTEN,
    Held,
    Names,
    Saving,
    ask_program,
    error_of,
    hand_over,
    load_program,
    own_copy,
    save_program,
    state_of,
)
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.spec.placements import Partial

_OPTIMIZER = torch.optim.Optimizer | None
OWN = ("dtensor",)
"""Where a checkpoint has what is ours: counts, and what the optimizer is."""
LOOK_S = 0.02  # how often a save looks for the parts of ranks
ASK_S = 2.0  # after which it asks the ranks how far they are: one may be lost, or its disk full


class Saved:
    """A save that may be under way. ``get()`` waits, and gives the path or raises what failed: no
    checkpoint is there then, and those before it are as they were. ``done()``; ``path``."""

    def __init__(self, path: str, finish: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._read = False
        self._thread = threading.Thread(target=self._run, args=(finish,), name=f"save {path}")
        self._thread.start()

    def get(self, timeout: float | None = None) -> str:
        """The path, when all is on the disk. `TimeoutError` after ``timeout`` seconds, which ends
        nothing."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path} is not written after {timeout:g} s; ask again.")
        self._read = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self.path

    result = get

    def done(self) -> bool:
        """Whether `get` would not wait."""
        return not self._thread.is_alive()

    def settle(self) -> None:
        """Wait; raises what failed, unless somebody has read it."""
        self._thread.join()
        if not self._read:
            self.get()

    def over(self) -> bool:
        """Whether nobody need wait for it, or be told of it."""
        return self.done() and (self._error is None or self._read)

    def told(self) -> str:
        """Wait; what failed, if nobody has read it, or ""."""
        self._thread.join()
        unread, self._read = not self._read, True
        if self._error is None or not unread:
            return ""
        return f"and of the save to {self.path}: {self._error}"

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as error:  # raised by whoever reads it
            if not os.path.exists(self.path):  # it is there where an older one cannot be removed
                error.add_note(f"{self.path} was not written; what was there before is untouched.")
            self._error = error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"Saved({self.path!r}, {state})"


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
        path: a folder that is not there yet, and that all machines of the launch see.
        step: what `load` gives back; by default the number of training steps taken.
        extra: so is this: numbers, text, containers, tensors; state_dict()s of schedulers, say.
        keep: how many of dtensor's checkpoints of this format to leave in the folder around
            ``path``, the newest.
        format: "dcp", the files of torch.distributed.checkpoint; "hf", safetensors of the model
            alone, as `from_pretrained` reads them.

    It waits for a save that is under way, and raises what has failed in it if nobody has read that.
    Leaving the launch waits for its saves. PlanningError for what cannot be written as stated.
    """
    _check_path("save", path)
    check_parallel("save", model)
    check_kind("the optimizer", optimizer, _OPTIMIZER, "a torch.optim optimizer or None", "None")
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
    stated = _SaveOptions(os.fspath(path), step, extra, keep, format)
    with _ONE_SAVE:
        if _LAST:
            _LAST.pop().settle()
        saved = _submitted(stated, model, optimizer)
        _LAST.append(saved)
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
    damaged file, DaftError where a rank fails; then nothing was loaded.
    """
    _check_path("load", path)
    check_parallel("load", model)
    check_kind("the optimizer", optimizer, _OPTIMIZER, "a torch.optim optimizer or None", "None")
    check_word("dtype", dtype, ("saved", "model"))
    if model.source is not None:
        raise PlanningError(
            "a replica has no values of its own to load.\n"
            "fix: dt.load(path, policy, opt), then dt.sync(policy, actor)"
        )
    checkpoint = Checkpoint.open(path)
    values = _matched(checkpoint, model, convert=dtype == "model")
    found = None if optimizer is None else _matched_state(checkpoint, model, optimizer)
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
    says what is there and loads no values.
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


# -- saving ----------------------------------------------------------------------------------------

_ONE_SAVE = threading.RLock()
_LAST: list[Saved] = []
"""The save that the next one waits for."""


@dataclass(frozen=True, slots=True)
class _SaveOptions:
    """What `save` was given."""

    path: str
    step: int | None
    extra: Any
    keep: int | None
    format: str


@dataclass(slots=True)
class _Located:
    """Where what a checkpoint takes is: on ranks, or here. ``aliases``: further names of tensors,
    to their first ones."""

    on_ranks: dict[Names, Held] = field(default_factory=dict[Names, Held])
    here: dict[Names, Tensor] = field(default_factory=dict[Names, Tensor])
    aliases: dict[Names, Names] = field(default_factory=dict[Names, Names])
    small: dict[Names, Any] = field(default_factory=dict[Names, Any])


def _submitted(
    stated: _SaveOptions, model: ParallelModule, optimizer: torch.optim.Optimizer | None
) -> Saved:
    with ONE_AT_A_TIME:
        session = session_at_hand(model.mesh)
        if session is not None and launched() is not None:
            _hold_what_is_on_meta(session, model)
        resident = session.residents.get(id(model)) if session is not None else None
        if resident is not None:
            resident.settle()
        state = _Located()
        _locate_model(state, model, resident, () if stated.format == "hf" else ("model",))
        if optimizer is not None:
            _locate_optimizer(state, model, optimizer, resident)
        writing = _begun(stated, model, state)
        saving = Saving(folder=writing.folder, previous=writing.previous, format=stated.format)
        try:
            run = None
            if session is not None and resident is not None and state.on_ranks:
                run = _copied_by_ranks(saving, session, resident, state.on_ranks)
            if state.here:
                pieces = [_whole(path, tensor) for path, tensor in state.here.items()]
                hand_over(saving, model.mesh.size, pieces)
        except BaseException:
            writing.abort()
            raise
        own = {"seed": initial_seed(), "counts": counts(), "steps": model.steps.present()}
        if optimizer is not None:
            own["optimizer"] = type(optimizer).__name__
        ending = _Ending(
            stated, writing, saving, state, own, model.mesh.size, session, resident, run
        )
        if resident is not None:
            resident.unsaved = False
        saved = Saved(stated.path, ending.finish)
        if session is not None:
            launch = session.launch
            launch.saves = [other for other in launch.saves if not other.over()] + [saved]
        return saved


def _begun(stated: _SaveOptions, model: ParallelModule, state: _Located) -> Writing:
    if stated.format == "dcp":
        return Writing.begin(stated.path, step=stated.step, extra=stated.extra, small=state.small)
    tensors = {
        ".".join(path): (held.spec.dtype, held.spec.shape) for path, held in state.on_ranks.items()
    } | {".".join(path): (own.dtype, tuple(own.shape)) for path, own in state.here.items()}
    tied = {".".join(path): ".".join(first) for path, first in state.aliases.items()}
    return Writing.begin_hf(
        stated.path, tensors, tied=tied, model=model.module, step=stated.step, extra=stated.extra
    )


def _hold_what_is_on_meta(session: MeshSession, model: ParallelModule) -> None:
    """Ranks make what nobody has yet, rather than the controller."""
    tensors, holders = named_tensors(model.module), model.initial.holders
    labels = set(names_in_state(model.module).values()) & tensors.keys()
    missing = [n for n in sorted(labels) if tensors[n].is_meta and n not in holders]
    if missing:
        keeping = kept(model, session.residents.get(id(model)))
        session.hold(model, {label: keeping[label] for label in missing})


def _locate_model(
    state: _Located, model: ParallelModule, resident: Resident | None, prefix: Names
) -> None:
    tensors = named_tensors(model.module)
    first: dict[str, Names] = {}
    for key, label in names_in_state(model.module).items():
        path = *prefix, key
        if label not in tensors:
            raise PlanningError(
                f"{key} of the module's state dict is none of its parameters and buffers, so there "
                f"is nothing that ranks could write.\n"
                f"fix: leave it out of the state dict, and pass what it has as extra="
            )
        if first.setdefault(label, path) != path:
            state.aliases[path] = first[label]
            continue
        tensor = tensors[label]
        holder = model.initial.holders.get(label) if tensor.is_meta else holder_of(tensor)
        if resident is None or holder is not resident:
            state.here[path] = model.initial.value(label, tensor).detach()
        elif any(isinstance(p, Partial) for p in resident.specs[label].placements):
            state.here[path] = resident.gather([label])[label]
        else:
            name = resident.name(label)
            state.on_ranks[path] = Held(name, resident.specs[label], resident.ranks[label])


def _locate_optimizer(
    state: _Located,
    model: ParallelModule,
    optimizer: torch.optim.Optimizer,
    resident: Resident | None,
) -> None:
    keys = _keys_of(model, optimizer)
    state.small["optimizer", "param_groups"] = [
        {**_options(group), "params": [keys[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    home = resident.optimizers.get(id(optimizer)) if resident is not None else None
    if home is not None and home.current:
        labels = {label: keys[id(p)] for label, p in model.named_parameters()}
        for (label, key), named in home.named.items():
            state.on_ranks["optimizer", "state", labels[label], key] = Held(*named)
        entries = {p: read_whole(own) for p, own in home.rest.items()}
    else:
        held: object = optimizer.state
        entries = held.refresh() if isinstance(held, AwayState) else dict(optimizer.state)
    for parameter, own in entries.items():
        if any(isinstance(value, Tensor) and value.is_meta for value in own.values()):
            continue  # what Adagrad begins with, of a parameter on the meta device
        for key, value in own.items():
            path = "optimizer", "state", keys[id(parameter)], key
            if isinstance(value, Tensor):
                state.here[path] = value
            else:
                state.small[path] = value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as data: a learning rate that is a tensor, as a number."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    return {k: plain(v) for k, v in group.items() if k not in ("params", "param_names")}


def _keys_of(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """By id, the parameters' names in the state dict. PlanningError for one that is not there."""
    labels: dict[str, str] = {}
    for key, label in names_in_state(model.module).items():
        labels.setdefault(label, key)
    with as_it_is():
        names = {id(p): labels.get(name, name) for name, p in model.module.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in names:
                raise PlanningError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not "
                    f"one of the model's; fix: build it over model.parameters()"
                )
    return names


def _whole(path: Names, tensor: Tensor) -> TensorPiece:
    shape = tuple(tensor.shape)
    return TensorPiece(path=path, shape=shape, offsets=(0,) * len(shape), tensor=own_copy(tensor))


def _copied_by_ranks(
    saving: Saving, session: MeshSession, resident: Resident, values: Mapping[Names, Held]
) -> Future:
    """The run in which each rank copies its share; it gives the number of the next step."""
    model, cluster = resident.model, session.cluster
    key = "save", id(model), saving["format"]
    known, handle = session.loaded.get(key, (None, None))
    if known != values:
        if handle is not None:
            cluster.unload(handle)
        handle = cluster.load(save_program(values, cluster.size))
        session.loaded[key] = dict(values), handle
    counted = session.counted(f"{resident.prefix}steps", model.steps, takes=False)
    fed = {STEP: model.steps.present(), SAVING: saving}
    return session.run(handle, [fed] * cluster.size, {}, counted)


@dataclass(frozen=True, slots=True)
class _Ending:
    """What is left of a save when it is submitted: a thread of the controller waits for the parts
    of ``size`` ranks, if they ``run``, and for the controller's own, and publishes them."""

    stated: _SaveOptions
    writing: Writing
    saving: Saving
    state: _Located
    own: dict[str, Any]
    size: int
    session: MeshSession | None
    resident: Resident | None
    run: Future | None

    def finish(self) -> None:
        try:
            self._finish()
        except BaseException:
            if self.resident is not None:
                self.resident.unsaved = True
            raise

    def _finish(self) -> None:
        steps = self.own["steps"]
        try:
            if self.run is not None:
                steps = self.run.get()[0]["number"]
            parts = self._parts()
            if self.stated.format == "dcp":
                self.writing.add(OWN, {**self.own, "steps": steps})
                parts = [*parts[:-1], self._with_aliases(parts)]
        except BaseException:
            self.writing.abort()
            raise
        self.writing.finish(parts, keep=self.stated.keep)
        if self.resident is not None and steps >= self.resident.saved[1]:
            self.resident.saved = f"{self.stated.path} has what was saved last", steps

    def _parts(self) -> list[PartRecord]:
        """What all have written. Where one fails the others are waited for: they write there."""
        folder, found, failed = self.writing.folder, dict[int, PartRecord](), dict[int, str]()
        waiting = [*(range(self.size) if self.run is not None else ())]
        waiting += [self.size] if self.state.here else []
        asked = time.monotonic()
        while True:
            for rank in waiting:
                part = read_part(folder, rank)
                if part is not None:
                    found[rank] = part
                elif why := error_of(folder, rank):
                    failed[rank] = why
            waiting = [rank for rank in waiting if rank not in found and rank not in failed]
            if not waiting:
                break
            if self.session is not None and self.session.cluster.failure is not None:
                raise self.session.cluster.failure
            if time.monotonic() - asked > ASK_S:
                failed |= self._fallen(waiting)
                asked = time.monotonic()
            time.sleep(LOOK_S)
        for rank, why in sorted(failed.items()):
            who = "the controller" if rank == self.size else f"rank {rank}"
            raise CheckpointError(f"{who} could not write its part of {self.stated.path}: {why}")
        return list(found.values())

    def _fallen(self, waiting: Sequence[int]) -> dict[int, str]:
        """Those that will write nothing, and why: the process was lost, or could not even write
        that. Asks the ranks, behind the steps that are under way."""
        folder = self.writing.folder
        states = {self.size: state_of(folder, self.size)}
        if self.session is not None and self.run is not None:
            cluster = self.session.cluster
            handle = cluster.load(ask_program(self.size))
            found = cluster.run(handle, [{SAVING: self.saving}] * self.size).get()
            cluster.unload(handle)
            states |= {rank: own["state"] for rank, own in enumerate(found)}
        fallen = {r: states[r] for r in waiting if states[r] not in (WRITTEN, WRITING)}
        for rank in waiting:
            if states[rank] == WRITTEN and read_part(folder, rank) is None:
                fallen[rank] = f"what it wrote is not in {folder} as this machine sees it"
        return fallen

    def _with_aliases(self, parts: Sequence[PartRecord]) -> PartRecord:
        """The last part, with tied tensors under their other names too, which have no bytes."""
        pieces: dict[Names, list[TensorRecord]] = {}
        for record in (record for part in parts for record in part.tensors):
            pieces.setdefault(record.path, []).append(record)
        also = [
            replace(record, path=path)
            for path, first in self.state.aliases.items()
            for record in pieces[first]
        ]
        return replace(parts[-1], tensors=(*parts[-1].tensors, *also))


# -- what a checkpoint has for a model -------------------------------------------------------------


def _matched(checkpoint: Checkpoint, model: ParallelModule, *, convert: bool) -> dict[str, OnDisk]:
    """By first name, where each parameter and buffer of the state dict is in the checkpoint.

    PlanningError for names that are missing or too many, for shapes and for dtypes.
    """
    tensors, keys = named_tensors(model.module), names_in_state(model.module)
    prefix = _prefix(checkpoint, keys)
    stored = {
        name.removeprefix(prefix): record
        for name, record in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    stored |= {n: stored[kept] for n, kept in checkpoint.tied.items() if n in keys}
    named: dict[str, list[str]] = {}
    for key, label in keys.items():
        named.setdefault(label, []).append(key)
    missing = [own[0] for own in named.values() if not any(key in stored for key in own)]
    unexpected = sorted(stored.keys() - keys.keys())
    if missing or unexpected:
        raise _other_names(checkpoint, missing, unexpected, list(keys), list(stored))
    found: dict[str, OnDisk] = {}
    shapes: list[str] = []
    dtypes: list[str] = []
    for label, own in named.items():
        there = [key for key in own if key in stored]
        record = stored[there[0]]
        with as_it_is():
            shape, dtype = tuple(tensors[label].shape), tensors[label].dtype
        line = (
            f"\n  {there[0]}: {_type(record.dtype, record.shape)} in the checkpoint, "
            f"{_type(dtype, shape)} in the model"
        )
        if record.shape != shape:
            shapes.append(line)
        elif record.dtype != dtype and not convert:
            dtypes.append(line)
        for other in there[1:]:
            _check_tied(checkpoint, there[0], record, other, stored[other])
        found[label] = OnDisk(os.path.abspath(checkpoint.path), record.name, shape, dtype)
    if shapes:
        raise _not_alike(checkpoint, "shapes", shapes, "build the model as the one that was saved")
    if dtypes:
        fix = (
            'dt.load(path, model, dtype="model") converts to the model\'s, or model.to(...) before'
        )
        raise _not_alike(checkpoint, "dtypes", dtypes, fix)
    return found


def _not_alike(checkpoint: Checkpoint, what: str, lines: Sequence[str], fix: str) -> PlanningError:
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    return PlanningError(
        f"{checkpoint.path} has other {what} than the model; nothing was loaded."
        f"{''.join(lines[:8])}{more}\nfix: {fix}"
    )


def _prefix(checkpoint: Checkpoint, keys: Mapping[str, str]) -> str:
    """What stands before a model's names: "model." in ours; in another's whatever fits best."""
    if checkpoint.layout == "hf":
        return ""
    if checkpoint.layout == "dtensor":
        return "model."
    fitting = {p: sum(p + key in checkpoint.tensors for key in keys) for p in ("model.", "")}
    return max(fitting, key=lambda p: (fitting[p], p))


def _other_names(
    checkpoint: Checkpoint,
    missing: Sequence[str],
    unexpected: Sequence[str],
    keys: Sequence[str],
    stored: Sequence[str],
) -> PlanningError:
    text = f"{checkpoint.path} has other names than the model; nothing was loaded."

    def line(what: str, names: Sequence[str], known: Sequence[str]) -> str:
        if not names:
            return ""
        near = nearest(names[0], known)
        hint = f" (near {names[0]}: {', '.join(near)})" if near else ""
        return f"\n  {what}: {listing(names)}{hint}"

    text += line("only in the model", missing, unexpected or stored)
    text += line("only in the checkpoint", unexpected, missing or keys)
    for prefix in ("model.", "module.", "_orig_mod."):
        if missing and all(prefix + key in stored for key in missing):
            return PlanningError(
                f'{text}\nfix: the names in the checkpoint begin with "{prefix}": load it into the '
                f"model that has these names, such as AutoModelForCausalLM in place of AutoModel"
            )
        bare = [key.removeprefix(prefix) for key in missing if key.startswith(prefix)]
        if missing and len(bare) == len(missing) and set(bare) <= set(stored):
            return PlanningError(
                f'{text}\nfix: the names in the model begin with "{prefix}": load the checkpoint '
                f"into the part of it that has these names"
            )
    return PlanningError(f"{text}\nfix: build the model that was saved, or choose its checkpoint")


def _check_tied(
    checkpoint: Checkpoint, key: str, one: TensorRecord, other_key: str, other: TensorRecord
) -> None:
    """PlanningError where two names that the model ties have different values."""
    if one.pieces == other.pieces:
        return
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    if not alike or not torch.equal(checkpoint.read(one.name), checkpoint.read(other.name)):
        raise PlanningError(
            f"{key} and {other_key} are one tensor in the model, and two with different values in "
            f"{checkpoint.path}; nothing was loaded.\n"
            f"fix: build the model without the tie, or choose another checkpoint"
        )


def _type(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"


# -- giving a model its values ---------------------------------------------------------------------


def _fill_here(checkpoint: Checkpoint, model: ParallelModule, values: Mapping[str, OnDisk]) -> None:
    """The controller's tensors, read before the first is written; what is on meta stays there."""
    tensors = named_tensors(model.module)
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
        model.initial.leave_on_disk(model.module, on_meta)
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
    tensors, keeping = named_tensors(model.module), kept(model, resident)
    held = {
        stored.name: Held(resident.name(label), *keeping[label]) for label, stored in values.items()
    }
    cluster = session.cluster
    folder = os.path.abspath(checkpoint.path)
    handle = cluster.load(load_program(folder, held, cluster.size, cluster.device))
    try:
        cluster.run(handle, [{}] * cluster.size).get()
    except DaftError as error:
        if cluster.failure is None:
            error.add_note("nothing was loaded: the model has what it had.")
        raise session.told(error) from error.__cause__
    finally:
        if cluster.failure is None:
            cluster.unload(handle)
    for label in values:
        _leave_other_holder(tensors[label], resident)
        resident.specs[label], resident.ranks[label] = keeping[label]
    model.initial.leave_on_disk(
        model.module, {n: s for n, s in values.items() if tensors[n].is_meta}
    )
    resident.keep({label: tensors[label] for label in values})
    resident.stale |= values.keys() & resident.own.keys()
    resident.changed = any(
        tensors[label].is_meta for label in resident.specs.keys() - values.keys()
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


# -- giving an optimizer its state -----------------------------------------------------------------


@dataclass(slots=True)
class _Matched:
    """An optimizer's state in a checkpoint: its groups, as torch has them, and its entries, tensors
    as `OnDisk` until they are ``read``."""

    groups: list[dict[str, Any]]
    entries: Entries
    whole: Entries | None = None

    def read(self) -> Entries:
        """The entries, whole, where their parameters are."""
        self.whole = {p: _beside(p, read_whole(own)) for p, own in self.entries.items()}
        return self.whole

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        state = defaultdict[Tensor, dict[str, Any]](dict, self.whole or {})
        optimizer.__setstate__({"state": state, "param_groups": self.groups})
        if self.whole is None:
            optimizer.state = cast(Any, AwayState({}, self.read, self.entries))


def _beside(parameter: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
    with as_it_is():
        device = torch.device("cpu") if parameter.is_meta else parameter.device
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in entries.items()}


def _matched_state(
    checkpoint: Checkpoint, model: ParallelModule, optimizer: torch.optim.Optimizer
) -> _Matched:
    """PlanningError where groups, shapes or the optimizer are others."""
    keys = _keys_of(model, optimizer)
    own = [[keys[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    groups = _groups_in(checkpoint, own)
    if groups is None:
        raise PlanningError(
            f"{checkpoint.path} has no state of an optimizer; nothing was loaded.\n"
            f"fix: dt.load(path, model), which leaves the optimizer as it is"
        )
    saved_kind = checkpoint.small.get(OWN, {}).get("optimizer")
    kind = type(optimizer).__name__
    if saved_kind not in (None, kind):
        raise PlanningError(
            f"{checkpoint.path} has the state of {saved_kind}, and this is {kind}; nothing was "
            f"loaded.\nfix: build the {saved_kind} that was saved, or dt.load(path, model) alone"
        )
    theirs = [list(group["params"]) for group in groups]
    if [sorted(names) for names in own] != [sorted(names) for names in theirs]:
        raise PlanningError(
            f"{checkpoint.path} has the optimizer's parameters in other groups; nothing was "
            f"loaded.{_differing(own, theirs)}\n"
            f"fix: build the optimizer over the groups that it had when it was saved"
        )
    entries = {
        parameter: _entries_of(checkpoint, keys[id(parameter)], parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    options = [
        {**_as_theirs(group, saved), "params": group["params"]}
        for group, saved in zip(optimizer.param_groups, groups, strict=True)
    ]
    return _Matched(options, {parameter: own for parameter, own in entries.items() if own})


def _groups_in(
    checkpoint: Checkpoint, own: Sequence[Sequence[str]]
) -> Sequence[Mapping[str, Any]] | None:
    """The groups of the optimizer's options, with the names of their ``params``. Torch's tools take
    the list apart, or give each parameter its options; of those the ``own`` groups' are made."""
    place = "optimizer", "param_groups"
    if place in checkpoint.small:
        return checkpoint.small[place]
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, tuple[str, ...]] = {}
    for path in checkpoint.small:
        if path[:2] == place and len(path) == 4 and path[2].isdigit():
            numbered.setdefault(int(path[2]), {})[path[3]] = checkpoint.small[path]
        by_name[".".join(path)] = path
    if numbered:
        return [numbered[number] for number in sorted(numbered)]
    groups: list[dict[str, Any]] = []
    for keys in own:
        options: list[dict[str, Any]] = []
        for key in keys:
            prefix = f"optimizer.param_groups.{key}."
            ends = {n.removeprefix(prefix): p for n, p in by_name.items() if n.startswith(prefix)}
            found = {end: checkpoint.small[p] for end, p in ends.items() if "." not in end}
            options += [found] if found else []
        if any(other != options[0] for other in options[1:]):
            raise PlanningError(
                f"{checkpoint.path} has different options for parameters that are one group here; "
                f"nothing was loaded.\nfix: build the optimizer over the groups that it had"
            )
        groups += [{**options[0], "params": list(keys)}] if options else []
    return groups or None


def _differing(own: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> str:
    lines = [f"\n  groups: {len(theirs)} in the checkpoint, {len(own)} here"]
    for i, (mine, saved) in enumerate(zip(own, theirs, strict=False)):
        for what, names in (
            ("only here", sorted(set(mine) - set(saved))),
            ("only in the checkpoint", sorted(set(saved) - set(mine))),
        ):
            if names:
                lines.append(f"\n  group {i}, {what}: {listing(names)}")
    return "".join(lines)


def _as_theirs(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as saved; a tensor where it has one now."""

    def like(now: Any, value: Any) -> Any:
        if isinstance(now, tuple) and isinstance(value, tuple) and len(now) == len(value):
            return tuple(map(like, now, value))
        if isinstance(now, Tensor) and isinstance(value, int | float):
            return torch.full_like(now, value)
        return value

    options = {key: like(group.get(key), value) for key, value in saved.items() if key != "params"}
    return {**group, **options}


def _entries_of(checkpoint: Checkpoint, key: str, parameter: Tensor) -> dict[str, Any]:
    prefix = f"optimizer.state.{key}."
    found: dict[str, Any] = {}
    with as_it_is():
        shape = tuple(parameter.shape)
    for name, record in checkpoint.tensors.items():
        entry = name.removeprefix(prefix)
        if entry == name or "." in entry:
            continue
        if record.shape not in ((), shape):
            raise PlanningError(
                f"{name} is {_type(record.dtype, record.shape)} in {checkpoint.path}, and the "
                f"parameter has shape {list(shape)}; nothing was loaded.\n"
                f"fix: build the model and the optimizer that were saved"
            )
        folder = os.path.abspath(checkpoint.path)
        found[entry] = OnDisk(folder, name, record.shape, record.dtype)
    for path, value in checkpoint.small.items():
        if path[:3] == ("optimizer", "state", key) and len(path) == 4:
            found[path[3]] = value
    return found
