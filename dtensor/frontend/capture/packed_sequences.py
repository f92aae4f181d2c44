"""Compute packed sequences of a captured program as padded sequences.

    packed = pack_padded_sequence(x, lengths, batch_first=True)   # x: f32[b,t,d], lengths: i64[b]
    output, state = gru(packed)                                   # over f32[t,b,d], with a mask
    y, lengths = pad_packed_sequence(output, batch_first=True, total_length=t)

In torch the shape of `packed.data` depends on the lengths' values. Here `Packed` replaces the data:
padded rows, and lengths as a tensor. A step beyond the end of a sequence keeps the state, so
results and gradients equal torch's, and one program serves all lengths.

Invariants: the stand-ins support only what torch's own code calls; other uses are refused. The
batch is never sorted (`Unsorted`), even if `enforce_sorted` is True, where torch may raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from dtensor.errors import PlanningError
from dtensor.frontend.capture.value_reads import ValueReads
from dtensor.private_torch import disable_current_modes, pack_padded, pad_packed, pytree

Refuse = Callable[..., PlanningError]
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_PACKS = rnn.pack_padded_sequence.__code__
_PADS = rnn.pad_packed_sequence.__code__
_TORCH_MODULES = {rnn.__name__, nn.RNNBase.__module__}


class StandIn:
    """Replaces a tensor of a packed sequence; raises ``refuse()`` for unsupported uses."""

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a stand-in within a list or tuple; RefusalMode refuses one that is an argument."""
        leaves = pytree.tree_leaves((args, kwargs))
        raise next(x for x in leaves if isinstance(x, StandIn)).refuse()

    def raise_refusal(self, *_: Any) -> Any:
        raise self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = raise_refusal
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __getitem__ = raise_refusal
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = raise_refusal
    __hash__ = object.__hash__


class Packed(StandIn):
    """Replaces the packed data. ``rows``: [t, b, ...], zero beyond the ``lengths``, i64[b]."""

    def __init__(self, refuse: Refuse, rows: Tensor, lengths: Tensor) -> None:
        super().__init__(refuse)
        self.rows = rows
        self.lengths = lengths
        self.dtype: torch.dtype = rows.dtype
        self.is_cuda = False

    def dim(self) -> int:
        return self.rows.dim() - 1

    def size(self, dim: int) -> int:
        if dim != -1:
            raise self.refuse()
        return self.rows.size(-1)

    def to(self, *args: Any, **kwargs: Any) -> Packed:
        rows = self.rows.to(*args, **kwargs)
        return self if rows is self.rows else Packed(self.refuse, rows, self.lengths)


class BatchSizes(StandIn):
    """Replaces the batch size of each step. ``is_exact``: a sequence is as long as the rows."""

    def __init__(self, refuse: Refuse, steps: int, batch: int, is_exact: bool) -> None:
        super().__init__(refuse)
        self.steps, self.batch = steps, batch
        self.is_exact = is_exact

    def __getitem__(self, step: int) -> int:
        if step != 0:
            raise self.refuse()
        return self.batch

    def size(self, _dim: int) -> int:
        caller = sys._getframe(1)
        total = caller.f_locals["total_length"] if caller.f_code is _PADS else None
        if total is not None and total < self.steps and not self.is_exact:
            raise self.refuse(
                f"pad_packed_sequence(total_length={total}) is shorter than the {self.steps} steps "
                f"that were packed: which is the longest length is not known when the program is "
                f"planned.",
                fix=f"total_length={self.steps}, and a slice of the first {total} steps",
            )
        return self.steps


class Unsorted(StandIn):
    """Replaces the permutation that sorts a batch by length, and its inverse, by the identity."""

    def to(self, *_: Any, **__: Any) -> Unsorted:
        return self

    cpu = to
    scatter_ = to

    def numel(self) -> int:
        return 0


def packed_result(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: ValueReads, refuse: Refuse
) -> tuple[Any] | None:
    """Return a 1-tuple with the result of a torch call on packed sequences; None for other calls.
    Raises ``refuse()`` for a call that has no padded form."""
    if func is pack_padded:
        return (_pack(*args, reads=reads, refuse=refuse),)
    caller = sys._getframe(2)
    is_torch_call = caller.f_globals.get("__name__") in _TORCH_MODULES
    if func is torch.sort and caller.f_code is _PACKS:
        return ((args[0], Unsorted(refuse)),)
    if any(isinstance(x, StandIn) for x in (*args, *kwargs.values())):
        match args:
            case (Packed(), *_) if func in RECURRENT and is_torch_call:
                return (_recurrent(func, *args),)
            case (Packed(), *_) if func is pad_packed:
                return (_pad(*args),)
            case (x, *_) if func in _PERMUTES and is_torch_call:
                return (x,)
            case _:
                raise refuse()
    if func is pad_packed or (func is Tensor.__getitem__ and is_torch_call):
        raise refuse()  # the packed sequence was packed outside the program
    return None


_PERMUTES = (Tensor.index_select, Tensor.__getitem__, torch.empty_like)


def _pack(
    x: Tensor, lengths: Tensor, batch_first: bool, *, reads: ValueReads, refuse: Refuse
) -> tuple[Packed, BatchSizes]:
    """Pack padded rows; the program checks lengths whose values are unknown."""
    rows = x.transpose(0, 1) if batch_first else x
    steps, batch = rows.shape[:2]
    known_lengths = reads.known_value(lengths)
    numbers: list[int] = []
    if known_lengths is not None:
        with disable_current_modes():
            numbers = known_lengths.tolist()
    if lengths.shape != (batch,) or any(not 0 < n <= steps for n in numbers):
        raise refuse(
            f"A packed sequence has one length of 1 to {steps} for each of {batch} sequences.",
            f"lengths: {numbers or list(lengths.shape)}",
            fix="pass the lengths of the sequences, and batch_first=True if the batch is dim 0",
        )
    if numbers:
        steps = max(numbers)
        rows = rows[:steps]
    else:
        fits = (lengths > 0) & (lengths <= steps)
        torch.ops.dt.ask(fits.all(), True, f"Lengths of packed sequences are to be 1 to {steps}")
    rows = torch.where(_mask(rows, lengths), rows, 0)
    sizes = BatchSizes(refuse, steps, batch, bool(numbers))
    return Packed(refuse, rows, lengths), sizes


def _mask(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return a mask of the rows before the end of their sequence: bool[t, b, 1, ...]."""
    mask = torch.arange(rows.shape[0])[:, None] < lengths
    return mask.reshape(*mask.shape, *[1] * (rows.dim() - 2))


def _pad(
    packed: Packed, sizes: BatchSizes, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    """Return padded rows and lengths. Without total_length= torch pads to the longest sequence; the
    program then checks that the longest sequence is as long as the rows."""
    rows, lengths = packed.rows, packed.lengths
    caller = sys._getframe(3)
    is_total_stated = caller.f_code is not _PADS or caller.f_locals["total_length"] is not None
    if not (sizes.is_exact or is_total_stated):
        longest = (lengths.max() == sizes.steps).expand(lengths.shape)
        message = f"pad_packed_sequence: no sequence has {sizes.steps} steps, as the padded rows do"
        torch.ops.dt.ask(longest.all(), True, f"{message}; state total_length={sizes.steps}")
    rows = torch.where(_mask(rows, lengths), rows, padding)
    padding_sizes = [0, 0] * (rows.dim() - 1) + [0, total - sizes.steps]
    rows = F.pad(rows, padding_sizes, value=padding) if padding_sizes[-1] else rows
    return rows.transpose(0, 1) if batch_first else rows, lengths


def _recurrent(
    func: Any,
    packed: Packed,
    _sizes: BatchSizes,
    hx: Any,
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Any, ...]:
    """Run the layers of `torch.lstm` and the like, step by step. Return the packed output and the
    final states of the sequences, each [layers * directions, b, ...]."""
    initial_states = hx if func is torch.lstm else (hx,)
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (layers * directions)
    x, mask = packed.rows, _mask(packed.rows, packed.lengths)
    final_states: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            n = layer * directions + direction
            w_ih, w_hh, *remaining_weights = weights[n * per_layer : (n + 1) * per_layer]
            b_ih, b_hh = remaining_weights[:2] if biased else (None, None)
            projection = remaining_weights[-1] if len(remaining_weights) % 2 else None
            inputs = F.linear(x, w_ih, b_ih)
            state = tuple(start[n] for start in initial_states)
            step_outputs: list[Tensor] = [x] * len(x)
            for t in range(len(x))[:: -1 if direction else 1]:
                hidden = F.linear(state[0], w_hh, b_hh)
                new = _CELLS[func](inputs[t], hidden, state, projection)
                pairs = zip(new, state, strict=True)
                state = tuple(torch.where(mask[t], now, before) for now, before in pairs)
                step_outputs[t] = state[0]
            final_states.append(state)
            outputs.append(torch.stack(step_outputs))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout)
    finals = [torch.stack(states) for states in zip(*final_states, strict=True)]
    return Packed(packed.refuse, x, packed.lengths), *finals


def _lstm(
    x: Tensor, hidden: Tensor, state: tuple[Tensor, ...], projection: Tensor | None
) -> tuple[Tensor, ...]:
    i, f, g, o = (x + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if projection is None else F.linear(h, projection)), c


def _gru(x: Tensor, hidden: Tensor, state: tuple[Tensor, ...], _: object) -> tuple[Tensor, ...]:
    (r, z, n), (r_h, z_h, n_h) = x.chunk(3, -1), hidden.chunk(3, -1)
    new = (n + (r + r_h).sigmoid() * n_h).tanh()
    return (new + (z + z_h).sigmoid() * (state[0] - new),)


_CELLS: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda x, hidden, *_: ((x + hidden).tanh(),),
    torch.rnn_relu: lambda x, hidden, *_: ((x + hidden).relu(),),
}
