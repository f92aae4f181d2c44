"""Run one entry of the OpInfo database under placements and compare with plain torch.

    record = judge(entry, "even")
    record.verdict           # "split" | "whole" | "refused" | "wrong" | "not counted"

Each placement is planned, lowered and run on 4 in-process ranks, forward and backward, and compared
by `torch.testing.assert_close`. If float32 differs, float64 decides (1e-7), because a wrong rule is
wrong there too. A placement ran *split* if an op of its forward other than a view had an operand or
result of which a rank holds a part (for programs of views alone: a view; without ops: a result). An
entry is split if at least one of its placements is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dtensor.frontend.capture import decompose
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute
from dtensor.sharding.rules.tables import reasons
from dtensor.sharding.spec.placements import Placement, Shard
from dtensor.testing import execute
from dtensor.testing.execute import Evaluation, RanksDisagree, Traced
from tests.opinfo.entries import (
    MESH,
    SIZES,
    Sample,
    drawn,
    leaves_of,
    name_of,
    pending,
    placements,
    samples,
    seed,
    supported,
)
from tests.opinfo.record import (
    OutOfTime,
    Record,
    add_once,
    first_line,
    limited,
    placements_text,
)

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

PER_OP, PER_SAMPLE, SAMPLES, PENDING = 48, 12, 8, 4
SECONDS = 240

# what torch documents as not initialised
_UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"}
_UNDEFINED |= {"new_empty_strided"}


class NotCounted(Exception):
    """Raised if no system of this kind can run the entry; the message says why."""


def judge(entry: OpInfo, kind: str) -> Record:
    """Run one entry with the sizes of ``kind`` ("even" or "uneven")."""
    record = Record(name=name_of(entry))
    try:
        with limited(SECONDS):
            _judge(entry, kind, record)
    except NotCounted as reason:
        record.note = str(reason)
        return record
    except OutOfTime:
        add_once(record.errors, f"not done within {SECONDS} seconds")
        record.forward["refused"] += 1
    if record.wrong:
        record.verdict = "wrong"
    elif record.forward["refused"] or record.gradient["refused"]:
        record.verdict = "refused"
    else:
        record.verdict = "split" if record.split else "whole"
    known = reasons()
    record.note = record.note or "; ".join(
        dict.fromkeys(known[name] for name in record.whole_ops if name in known)
    )
    return record


def chosen_samples(entry: OpInfo, kind: str, record: Record) -> list[Sample]:
    """Return the samples that plain torch runs twice with equal results. Raises NotCounted if there
    is none."""
    if torch.float32 not in entry.dtypes:
        raise NotCounted("takes no float32")
    if entry.name in _UNDEFINED:
        raise NotCounted("its values are not defined: uninitialised memory")
    for wanted in (SIZES[kind], {}):  # {}: torch's own, for an entry that has numbers of its own
        found = drawn(entry, wanted)
        if not any(leaves_of(s) for s in found):
            raise NotCounted("no tensor input: nothing to place")
        found = [s for s in found if leaves_of(s)]
        if not any(all(supported(x) for x in leaves_of(s)) for s in found):
            raise NotCounted("takes sparse, nested or quantized tensors only")
        chosen = samples(found, entry, SAMPLES)
        problems = [_plain_problem(s) for s in chosen]
        if 2 * sum(map(bool, problems)) < len(chosen):
            break
    for problem in filter(None, problems):
        record.left_out += 1
        record.note = problem
    usable = [s for s, problem in zip(chosen, problems, strict=True) if problem is None]
    if not usable:
        raise NotCounted(record.note)
    return usable


def _judge(entry: OpInfo, kind: str, record: Record) -> None:
    traced: list[tuple[Sample, Traced]] = []
    for sample in chosen_samples(entry, kind, record):
        made = _traced(sample, record)
        if made is not None:
            traced.append((sample, made))
    if not traced:
        if record.left_out and not record.forward:
            raise NotCounted(record.note)
        return
    if record.left_out:
        record.note = f"{record.left_out} samples left out: {record.note}"
    record.differentiable = entry.supports_autograd and any(t.grads for _, t in traced)
    queue = [placements(s.leaves, even=kind == "even", limit=PER_SAMPLE) for s, _ in traced]
    budgets = shares([len(q) for q in queue], PER_OP)
    partial = PENDING
    for (sample, made), options, budget in zip(traced, queue, budgets, strict=True):
        sums = pending(sample.leaves)[: min(partial, 2)]
        partial -= len(sums)
        _Runner(sample, made, record).all((*options[:budget], *sums))


def shares(lengths: Sequence[int], total: int) -> list[int]:
    """Return how many of each length to take, dealing one at a time until all or ``total`` are
    dealt."""
    shares = [0] * len(lengths)
    while sum(shares) < total and shares != list(lengths):
        for i, length in enumerate(lengths):
            if shares[i] < length and sum(shares) < total:
                shares[i] += 1
    return shares


def _traced(sample: Sample, record: Record) -> Traced | None:
    """Return the captured sample; None if it is left out or refused, which is recorded."""
    wanted = any(x.requires_grad for x in sample.leaves) and differentiable(sample)
    for grads in (True, False) if wanted else (False,):
        try:
            with _recording_expansions(record):
                return execute.trace(sample.fn, sample.leaves, grads=grads)
        except Exception as error:  # whatever capture says is this entry's outcome
            reason = _cannot_capture(error)
            if reason is not None:
                record.left_out += 1
                record.note = reason
                return None
            add_once(record.errors, f"{sample.text}: {first_line(error)}")
            (record.gradient if grads else record.forward)["refused"] += 1
    return None


def _plain_problem(sample: Sample) -> str | None:
    """Return why plain torch gives nothing to compare with, or None."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    for value in (0, 1):
        seed(value)
        try:
            with torch.no_grad():
                out = sample.fn(*(x.detach().clone() for x in sample.leaves))
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            return f"plain torch refuses the sample: {first_line(error)}"
        outputs.append(execute.tensors_of(out))
    first, second = outputs
    same = len(first) == len(second) and all(
        a.shape == b.shape and difference(a, b, exact=True) is None for a, b in zip(first, second)
    )
    if not same:
        return "random"
    if not all(map(supported, first)):
        return "returns sparse or nested tensors"
    return None if first else "returns no tensor"


def differentiable(sample: Sample) -> bool:
    """Whether plain torch has a derivative for the sample."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in sample.leaves]
    try:
        results = [r for r in execute.tensors_of(sample.fn(*leaves)) if r.requires_grad]
        asked = [x for x in leaves if x.requires_grad]
        ones = [torch.ones_like(r) for r in results]
        torch.autograd.grad(results, asked, ones, allow_unused=True)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return bool(results)


_REASONS = (
    ("no counter-based form", "random"),
    ("changes an argument in place", "changes its argument in place"),
    ("depends on a tensor's value", "its result's shape or a branch depends on data"),
    ("DynamicOutputShape", "its result's shape depends on data"),
    ("DataDependent", "its result's shape or a branch depends on data"),
    ("unbacked symbols", "its result's shape depends on data"),
    ("GuardOnDataDependent", "its result's shape or a branch depends on data"),
    ("Jiterator is only supported on CUDA", "CUDA only"),
)


def _cannot_capture(error: Exception) -> str | None:
    text = f"{type(error).__name__}: {error}"
    return next((reason for part, reason in _REASONS if part in text), None)


# -- one sample ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Runner:
    sample: Sample
    traced: Traced
    record: Record
    _wide: Traced | None = None

    def all(self, options: Sequence[tuple[Placement, ...]]) -> None:
        expected = execute.reference(self.traced)
        for option in options:
            self.one(option, expected)

    def one(self, option: tuple[Placement, ...], expected: Evaluation) -> None:
        record = self.record
        try:
            found = self._run(self.traced, option)
        except RanksDisagree as error:
            self._wrong("forward", option, first_line(error))
            return
        except Exception as error:  # whatever planning or running says is this entry's outcome
            add_once(
                record.errors, f"{self.sample.text} {placements_text(option)}: {first_line(error)}"
            )
            if not self.traced.grads:
                record.forward["refused"] += 1
                return
            # the backward may be what is refused: the forward alone
            record.gradient["refused"] += 1
            self.traced = execute.trace(self.sample.fn, self.sample.leaves, grads=False)
            self.one(option, expected)
            return
        self._count(found, option, expected)

    def _run(self, traced: Traced, option: tuple[Placement, ...]) -> Evaluation:
        return execute.run(traced, MESH, [{"x": p} for p in option])

    def _count(
        self, found: Evaluation, option: tuple[Placement, ...], expected: Evaluation
    ) -> None:
        record = self.record
        wrong = _differences(found, expected, self.traced.grads)
        if wrong:
            again = self._in_double(option)
            if again:
                for phase in again:
                    self._wrong(phase, option, wrong.get(phase, again[phase]))
                if "gradient" in again and "forward" not in again:
                    record.forward["right"] += 1
                return
            record.rounding += 1
        record.forward["right"] += 1
        if self.traced.grads:
            record.gradient["right"] += 1
        forward = [c for c in found.plan.collectives if c.phase == "forward"]
        record.free += not forward
        record.free_all += not found.plan.collectives
        record.split += ran_split(found.plan)
        assert found.planned is not None
        asked = found.planned.request.flow
        if found.plan.flow is not asked:  # the planner wrote an op out
            kept = {op.name for op in found.plan.flow.ops}
            for op in asked.ops:
                if op.name not in kept:
                    add_once(record.expanded, op.call.name)
        for step in found.plan.steps:
            if isinstance(step, Compute) and step.phase == "forward":
                name = step.op.call.name
                add_once(record.all_ops, name)
                if name in reasons():
                    add_once(record.whole_ops, name)

    def _in_double(self, option: tuple[Placement, ...]) -> dict[str, str]:
        """Return what differs when the sample runs in float64; RanksDisagree counts as a result."""
        sample = self.sample.in_double()
        if self._wide is None:
            self._wide = execute.trace(sample.fn, sample.leaves, grads=self.traced.grads)
        try:
            found = self._run(self._wide, option)
        except RanksDisagree as error:
            return {"forward": first_line(error)}
        return _differences(found, execute.reference(self._wide), self.traced.grads)

    def _wrong(self, phase: str, option: tuple[Placement, ...], what: str) -> None:
        (self.record.forward if phase == "forward" else self.record.gradient)["wrong"] += 1
        add_once(
            self.record.wrong, f"{phase} of {self.sample.text} {placements_text(option)}: {what}"
        )


def _differences(found: Evaluation, expected: Evaluation, grads: bool) -> dict[str, str]:
    """Return the first difference by phase."""
    result: dict[str, str] = {}
    for number, (a, b) in enumerate(zip(found.tensors, expected.tensors, strict=True)):
        if problem := difference(a, b):
            result.setdefault("forward", f"result {number}: {problem}")
    for number, (a, b) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        shape = a if b is None else b
        if not grads or shape is None:
            continue
        # no gradient and a gradient of zeros are the same
        zero = torch.zeros_like(shape)
        if problem := difference(zero if a is None else a, zero if b is None else b):
            result.setdefault("gradient", f"gradient {number}: {problem}")
    return result


def difference(found: torch.Tensor, expected: torch.Tensor, exact: bool = False) -> str | None:
    tolerance = 0.0 if exact else None  # None: the dtype's default
    try:
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return None


def ran_split(plan: Plan) -> bool:
    """Whether the plan's forward ran split; see the module docstring."""
    forward = [s for s in plan.steps if isinstance(s, Compute) and s.phase == "forward"]
    steps = [s for s in forward if not s.is_view] or forward
    specs = [
        spec for s in steps for spec in (*s.operand_specs, *s.result_specs) if spec is not None
    ]
    if not steps:
        specs = [o.spec for o in plan.outputs if o.kind == "result"]
    return any(isinstance(p, Shard) for spec in specs for p in spec.placements)


@contextlib.contextmanager
def _recording_expansions(record: Record) -> Iterator[None]:
    """Within the block, record the ops that capture expands by torch's decompositions."""
    inline = decompose._replace_by

    def noted(module: Any, node: Any, inner: Any) -> Any:
        add_once(record.expanded, str(node.target))
        return inline(module, node, inner)

    with mock.patch.object(decompose, "_replace_by", noted):
        yield
