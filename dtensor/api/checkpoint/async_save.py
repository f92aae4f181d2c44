"""Asynchronous saves: ranks copy their values between two steps, and write them while steps run.

    saved = submit_save(SaveOptions("ckpt/100", 100, None, None, "dcp"), model, optimizer)
    saved.get()                # "ckpt/100", once it is on the disk

Of `f32[64@dp,16]` at dp=4 each rank writes its `[16,16]`; one rank writes a replicated value; the
controller writes its own values. A thread of the controller waits for all parts, and then publishes
the folder. Invariant: a save ends before the process does, because Python waits for the thread. An
exit handler prints a failure that was not read, and makes the exit status nonzero.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtensor.api.checkpoint.exit_status import not_zero
from dtensor.api.checkpoint.located import Located, locate_model, locate_optimizer
from dtensor.api.checkpoint.matching import OWN, keys_in_state
from dtensor.api.checkpoint.published import published
from dtensor.api.model.initial_values import labels_in_state
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.store.default_home import current_homes
from dtensor.api.store.home import ModelHome
from dtensor.api.store.session import MeshSession, existing_session, launched
from dtensor.api.values.randomness import counts, initial_seed
from dtensor.daft import Future
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.source import Source, lines_text, source_here
from dtensor.runtime.checkpoint import (
    CheckpointError,
    PartRecord,
    TensorRecord,
    Writing,
    read_part,
)
from dtensor.runtime.checkpoint.assembly import InFiles
from dtensor.runtime.checkpoint.saving import (
    GONE,
    SAVING,
    WRITING,
    WRITTEN,
    Names,
    Saving,
    Share,
    ask_program,
    error_of,
    hand_over,
    save_program,
    state_of,
)
from dtensor.runtime.optimizer.elementwise.optimizer_rule import python_numbers, saved_attributes
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import held_back, wait

LOOK_S = 0.02  # the interval at which a save looks for the parts of ranks
ASK_S = 2.0  # the interval at which it asks the ranks: one may be lost, or its disk full


class WriterLost(CheckpointError):
    """A rank was lost while it wrote its part, and was replaced, so that the launch continues."""


class Saved:
    """A save, which may still be running. ``get()`` waits, and returns the path or raises the
    failure; there is no checkpoint then, and earlier ones are unchanged. ``wait()`` does the same
    and returns None; ``done()`` returns whether the save has ended; ``path`` is its folder."""

    def __init__(self, path: str, finish: Callable[[], None], source: Source | None = None) -> None:
        """Start the thread that runs ``finish``. ``source``: the user's line of the save."""
        self.path = path
        self._source = source
        self._error: BaseException | None = None
        self._read = False  # whether the failure was raised, or reported as below
        self._noted = False  # whether it was reported only by a warning or a note
        self._thread = threading.Thread(target=self._run, args=(finish,), name=f"save {path}")
        _unread_saves.add(self)
        try:
            self._thread.start()
        except BaseException:
            _unread_saves.discard(self)
            raise

    def get(self, timeout: float | None = None) -> str:
        """Wait until all is on the disk, and return the path. Raises the save's failure, or
        TimeoutError after ``timeout`` seconds; the save continues then."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path} is not written after {timeout:g} s; ask again.")
        self._read, self._noted = True, False
        _unread_saves.discard(self)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self.path

    result = get

    def wait(self, timeout: float | None = None) -> None:
        """Wait as `get` does, and return None."""
        self.get(timeout)

    def done(self) -> bool:
        """Return whether the save has ended."""
        return not self._thread.is_alive()

    def settle(self) -> None:
        """Wait, and raise the failure unless it was read. If a rank was lost and replaced, only
        warn, so that the training loop continues."""
        self.join()
        if self._read:
            return
        if not isinstance(self._error, WriterLost):
            self.get()
            return
        self._read = self._noted = True
        notes = "\n".join(self._error.__notes__)
        warnings.warn(f"{self._error}\n{notes}", RuntimeWarning, stacklevel=4)

    def join(self) -> None:
        """Wait, without reading the failure."""
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
            wait()  # for signals

    def over(self) -> bool:
        """Return whether the save has ended without an unread failure."""
        return self.done() and (self._error is None or self._read)

    def take_note(self) -> str:
        """Wait, and return an unread failure as the text of a note, or "". It counts as read."""
        self.join()
        if self._error is None or self._read:
            return ""
        self._read = self._noted = True
        return f"and of the save to {self.path}: {self._error}"

    def unread(self) -> str:
        """Wait, and return the text that the end of the process prints, or "". It reports a failure
        that was not read, or that was only a warning or a note."""
        try:
            self.join()
        except BaseException as error:  # Ctrl-C at the end: the process and the thread end
            why = f"{self.path} is not written: waiting for it was ended by {error!r}."
        else:
            if self._error is None or (self._read and not self._noted):
                return ""
            why = "\n".join([str(self._error), *getattr(self._error, "__notes__", ())])
        return (
            "dtensor: a save failed, and its error was not read: the exit status is not 0.\n"
            f"{lines_text(save=self._source)}{why}\n"
        )

    def _run(self, finish: Callable[[], None]) -> None:
        """The thread of a save: finish it, and keep its failure for `get`."""
        try:
            finish()
        except BaseException as error:  # `get` raises it
            if not os.path.exists(self.path):  # it exists if an older save could not be removed
                error.add_note(f"{self.path} was not written; its earlier contents are unchanged.")
            self._error = error
        else:
            # this save replaces those that were noted
            outdated = {other for other in [*_unread_saves] if other._noted}
            _unread_saves.difference_update(outdated, [self])

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"Saved({self.path!r}, {state})"


_unread_saves: set[Saved] = set()
"""Saves that are running, or that have failed and may be unread."""
# a forked child does not have their threads
os.register_at_fork(after_in_child=_unread_saves.clear)


def note_unread(error: BaseException, saves: Iterable[Saved]) -> None:
    """Wait for saves, and add their unread failures as notes to the error that ends a launch;
    except to an exit, whose notes are not printed. The end of the process then prints them."""
    for saved in saves:
        saved.join()
        if not isinstance(error, SystemExit | GeneratorExit) and (note := saved.take_note()):
            error.add_note(note)


@atexit.register
def _print_unread() -> None:
    """Print the failures of saves that were not read, and make the exit status nonzero."""
    texts = [
        text for saved in sorted(_unread_saves, key=lambda s: s.path) if (text := saved.unread())
    ]
    if texts:
        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
            with suppress(OSError, ValueError):  # a broken pipe, or closed
                sys.stderr.write("".join(texts))
        _unread_saves.clear()  # also drops tracebacks, whose objects Python would delete too late
        not_zero()


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The options of `save`."""

    path: str
    step: int | None
    extra: Any
    keep: int | None
    format: str


def submit_save(
    options: SaveOptions, model: ParallelModule, optimizers: Sequence[torch.optim.Optimizer]
) -> Saved:
    """Start a save of the state after the steps called before."""
    with CALL_LOCK, held_back():
        model.look()
        session = existing_session(model.mesh)
        if session is not None and launched() is not None:
            _make_meta_values(session, model)
        model_home = session.model_homes.get(id(model)) if session is not None else None
        if model_home is not None:
            model_home.settle()
        state = Located()
        locate_model(state, model, model_home, () if options.format == "hf" else ("model",))
        keys = keys_in_state(model, optimizers)
        for optimizer in optimizers:
            locate_optimizer(state, optimizer, keys, model_home)
        files = _files_of(model, state) if options.format == "hf" else None
        writing = _begin_writing(options, model, state, files)
        saving = Saving(folder=writing.folder, previous=writing.previous, format=options.format)
        try:
            run, compare = None, None
            if session is not None and model_home is not None and state.on_ranks:
                if session.cluster.device.type == "cuda":
                    from dtensor.api.checkpoint.equal_copies import warn_of_unequal

                    compare = warn_of_unequal(model_home, optimizers)
                run = _copy_on_ranks(saving, session, model_home, state.on_ranks, files)
            if state.local:
                pieces = [
                    share.piece(tensor)
                    for path, tensor in state.local.items()
                    for share in _shares_of(path, tensor, files)
                ]
                hand_over(saving, model.mesh.size, pieces)
        except BaseException:
            writing.abort()
            raise
        counters = {"seed": initial_seed(), "counts": counts(), "steps": model.steps.present()}
        counters |= _description(optimizers)
        counters |= {"nested": state.nested} if state.nested else {}
        counters |= {"strides": state.strides} if state.strides else {}
        completion = _Completion(
            options, writing, saving, state, counters, model.mesh.size, session, model_home, run,
            compare,
        )  # fmt: skip
        if model_home is not None:
            model_home.unsaved = False
        try:
            saved = Saved(options.path, completion.finish, source_here())
        except BaseException:  # for example, a process that is ending cannot start a thread
            writing.abort()
            raise
        if session is not None:
            launch = session.launch
            launch.saves = [other for other in launch.saves if not other.over()] + [saved]
        return saved


def _begin_writing(
    options: SaveOptions, model: ParallelModule, state: Located, files: InFiles | None
) -> Writing:
    """Create the folder of a save, in which parts are written."""
    if files is None:
        return Writing.begin(
            options.path, step=options.step, extra=options.extra, small=state.small
        )
    return Writing.begin_hf(
        options.path,
        {name: (tensor.dtype, tensor.shape) for name, tensor in files.tensors.items()},
        tied=files.tied,
        model=model.module,
        step=options.step,
        extra=options.extra,
    )


def _description(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the description of the optimizers: values for one, lists of values for several."""
    lists: dict[str, list[Any]] = {
        "optimizer": [type(optimizer).__name__ for optimizer in optimizers],
        "attributes": [saved_attributes(optimizer) for optimizer in optimizers],
        "numbers": [python_numbers(optimizer) for optimizer in optimizers],
    }
    if len(optimizers) < 2:
        return {key: value for key, values in lists.items() for value in values}
    return {**lists, "groups": [len(optimizer.param_groups) for optimizer in optimizers]}


def _files_of(model: ParallelModule, state: Located) -> InFiles:
    """Return the tensors of Hugging Face's files, by their published names."""
    on_ranks = {path: value.spec for path, value in state.on_ranks.items()}
    values = {
        ".".join(path): (value.dtype, tuple(value.shape))
        for path, value in (*on_ranks.items(), *state.local.items())
    }
    aliases = {".".join(path): ".".join(first) for path, first in state.aliases.items()}
    return published(model.module, values, aliases)


def _make_meta_values(session: MeshSession, model: ParallelModule) -> None:
    """Have the ranks make the missing initial values of tensors on the meta device."""
    tensors, holders = model.seen.tensors, model.initial.holders
    labels = set(labels_in_state(model.module, model.seen).values()) & tensors.keys()
    missing = [n for n in sorted(labels) if tensors[n].is_meta and n not in holders]
    if missing:
        homes = current_homes(model, session.ranks, session.model_homes.get(id(model)))
        session.put_missing(model, {label: homes[label] for label in missing})


def _shares_of(path: Names, tensor: Tensor, files: InFiles | None) -> Iterable[Share]:
    """Return the shares of a full tensor of the controller."""
    shape = tuple(tensor.shape)
    zeros = (0,) * len(shape)
    share = Share(path=path, shape=shape, offsets=zeros, sizes=shape, at=zeros)
    return [share] if files is None else share.in_files(files)


def _copy_on_ranks(
    saving: Saving,
    session: MeshSession,
    model_home: ModelHome,
    values: Mapping[Names, StoredTensor],
    files: InFiles | None,
) -> Future:
    """Start the run in which each rank copies its share of the values for its writer. The run
    returns the number of the next step."""
    model = model_home.model
    numbering = session.numbering(f"{model_home.prefix}steps", model.steps, takes=False)
    inputs: dict[str, object] = {STEP: model.steps.present(), SAVING: saving}
    key = "save", id(model), saving["format"]
    return model_home.store.save(
        key, values, partial(save_program, values, files), inputs, numbering
    )


@dataclass(frozen=True, slots=True)
class _Completion:
    """The second half of a save, in a thread of the controller: it waits for the parts of ``size``
    ranks, unless ``run`` is None, and of the controller, and publishes them."""

    options: SaveOptions
    writing: Writing
    saving: Saving
    state: Located
    counters: dict[str, Any]  # dtensor's own entry in the checkpoint
    size: int
    session: MeshSession | None
    model_home: ModelHome | None
    run: Future | None
    compare: Callable[[], None] | None

    def finish(self) -> None:
        """Wait for all parts and publish the checkpoint. On failure, the earlier contents stay."""
        try:
            self._finish()
        except BaseException as error:
            if self.model_home is not None:
                self.model_home.unsaved = True
            if self.writing.replaces and not self.writing.published:
                error.add_note(f"the earlier contents of {self.options.path} are unchanged.")
            raise

    def _finish(self) -> None:
        """Wait for all parts and publish the folder. If a part fails, abort the save."""
        steps = self.counters["steps"]
        try:
            if self.run is not None:
                steps = self.run.get()[0]["number"]
            if self.compare is not None:
                self.compare()
            parts = self._wait_for_parts()
            if self.options.format == "dcp":
                self.writing.add(OWN, {**self.counters, "steps": steps})
                parts = [*parts[:-1], self._with_aliases(parts)]  # the last part has all aliases
        except BaseException:
            self.writing.abort()
            raise
        self.writing.finish(parts, keep=self.options.keep)
        if self.model_home is not None and steps >= self.model_home.saved[1]:
            self.model_home.saved = f"{self.options.path} has the last save", steps

    def _wait_for_parts(self) -> list[PartRecord]:
        """Wait for all parts, and return their records. If a part fails, the other parts are still
        waited for, because they write into the folder."""
        folder, records, failed = self.writing.folder, dict[int, PartRecord](), dict[int, str]()
        waiting = [*(range(self.size) if self.run is not None else ())]
        waiting += [self.size] if self.state.local else []
        last_query = time.monotonic()
        while True:
            for rank in waiting:
                part = read_part(folder, rank)
                if part is not None:
                    records[rank] = part
                elif why := error_of(folder, rank):
                    failed[rank] = why
            waiting = [rank for rank in waiting if rank not in records and rank not in failed]
            if not waiting:
                break
            if self.session is not None and self.session.cluster.failure is not None:
                raise self.session.cluster.failure
            if time.monotonic() - last_query > ASK_S:
                failed |= self._failed_ranks(waiting)
                last_query = time.monotonic()
            time.sleep(LOOK_S)
        for rank, why in sorted(failed.items()):
            who = "the controller" if rank == self.size else f"rank {rank}"
            kind = WriterLost if why == GONE else CheckpointError
            raise kind(f"{who} could not write its part of {self.options.path}: {why}")
        return list(records.values())

    def _failed_ranks(self, waiting: Sequence[int]) -> dict[int, str]:
        """Return the ranks that will not write their parts, with the reason: the process was lost,
        or could not report a failure. Asks the ranks, after the running steps."""
        folder = self.writing.folder
        states = {self.size: state_of(folder, self.size)}
        if self.session is not None and self.run is not None:
            cluster = self.session.cluster
            handle = cluster.load(ask_program(self.size))
            states_by_rank = cluster.run(handle, [{SAVING: self.saving}] * self.size).get()
            cluster.unload(handle)
            states |= {rank: outputs["state"] for rank, outputs in enumerate(states_by_rank)}
        failed = {r: states[r] for r in waiting if states[r] not in (WRITTEN, WRITING)}
        for rank in waiting:
            if states[rank] == WRITTEN and read_part(folder, rank) is None:
                failed[rank] = f"this machine does not see its part in {folder}"
        return failed

    def _with_aliases(self, parts: Sequence[PartRecord]) -> PartRecord:
        """Return the last part with records of tied tensors' bytes under their further names."""
        pieces: dict[Names, list[TensorRecord]] = {}
        for record in (record for part in parts for record in part.tensors):
            pieces.setdefault(record.path, []).append(record)
        aliases = [
            replace(record, path=path)
            for path, first in self.state.aliases.items()
            for record in pieces[first]
        ]
        return replace(parts[-1], tensors=(*parts[-1].tensors, *aliases))
