"""Run torch.optim on a rank's shards, with options that the controller sends for each step.

    optimizer = ShardOptimizer(torch.optim.AdamW)
    values = (absent("cpu"),) * 3                      # the state, in the rank's table
    names = (("w", "step"), ("w", "exp_avg"), ("w", "exp_avg_sq"))
    updated = Updated(groups=(("w",),), labels=("w",), names=names)
    optimizer.step(updated, {"w": w_local}, ({"lr": 3e-4, ...},), {"w": grad_local}, values)

The rank's table owns the state (with a float32 master for each 16-bit shard, if asked for). A value
is `absent` before its parameter's first step; then it is a view of the torch optimizer's state. If
the table holds another tensor later, the torch optimizer is rebuilt from the table's values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_not
from typing import Any, NamedTuple, cast

import torch

from dtensor.errors import PlanningError
from dtensor.numerics import accumulation_dtype, is_narrow
from dtensor.private_torch import without_compiler
from dtensor.runtime.optimizer.flat_buffers import FlatBuffer, group_by_size, make_buffer
from dtensor.runtime.optimizer.optimizer_kind import (
    OptimizerKind,
    StateEntry,
    copy_plain,
    stray_state,
)
from dtensor.runtime.optimizer.update import update

MASTER = "master_param"
"""The key of a master weight in a parameter's state, as in NVIDIA's Transformer Engine."""
STATE = "state"
"""The key of the packed state of a parameter that one rank updates whole: its name in the rank's
table is ``value_name(optimizer, STATE, label)``."""

DELAYED = "delayed_gradient"
"""The key, in a parameter's state, of the gradient with which the next step updates it."""

ELEMENTWISE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    # class -> all keys that a parameter's state may have
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.NAdam: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.RMSprop: ("step", "square_avg", "momentum_buffer", "grad_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
}

OPTION_OF_KEY = {
    "max_exp_avg_sq": "amsgrad",
    "momentum_buffer": "momentum",
    "grad_avg": "centered",
}
"""State keys that exist only if this option of the group is true."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes for which torch has a fused kernel of the whole update: on CPU and CUDA,
except Adagrad's, which is for the CPU only."""

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of state entries that are one number per parameter; other entries have its shape."""


def has_kernel(kind: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch has a correct fused kernel for the class named ``kind``.

    The SGD kernel is wrong for 16-bit dtypes on the CPU (torch 2.13): after 4 steps of lr=0.1 on 64
    normal numbers its result differs by 0.6 from the unfused loop's.
    """
    on_cpu = device.type == "cpu"
    is_correct = kind != "SGD" or not (on_cpu and is_narrow(dtype))
    on_cuda = device.type == "cuda" and kind != "Adagrad"
    is_supported = dtype.is_floating_point and (on_cpu or on_cuda)
    return kind in {cls.__name__ for cls in FUSED} and is_supported and is_correct


def kernel_divides(dtype: torch.dtype) -> bool:
    """Return whether fused kernels accept a divisor of gradients of this dtype. They read float32
    only."""
    return dtype == torch.float32


def check_masters(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanningError if no parameter is narrower than float32 and so none needs a master."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(is_narrow(p.dtype) for p in parameters):
        dtypes = ", ".join(sorted({str(p.dtype) for p in parameters}))
        raise PlanningError(
            f"master_weights=True, and no parameter of the optimizer is narrower than float32.\n"
            f"  its {len(parameters)} parameters: {dtypes}\n"
            f"fix: leave master_weights out, or model.to(torch.bfloat16) before the step is made"
        )


def keys_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a parameter's state in a group with these options, without MASTER."""
    return _state_keys(
        kind, tuple(option for option in OPTION_OF_KEY.values() if options.get(option))
    )


@cache
def _state_keys(
    kind: type[torch.optim.Optimizer], enabled_options: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the keys of a parameter's state if only these options of OPTION_OF_KEY are enabled."""
    keys = ELEMENTWISE[kind]
    return tuple(
        key for key in keys if key not in OPTION_OF_KEY or OPTION_OF_KEY[key] in enabled_options
    )


def value_name(optimizer: str, key: str, label: str) -> str:
    """Return the name in a rank's table of one state entry. ``optimizer``: the table's name of the
    rank's optimizer."""
    return f"{optimizer}: {key} of {label}"


def absent(device: torch.device | str) -> torch.Tensor:
    """Return the empty bool tensor that stands for a state entry that does not exist yet."""
    return torch.empty(0, dtype=torch.bool, device=device)


def is_absent(value: torch.Tensor) -> bool:
    return value.dtype == torch.bool


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Return the options of each group, without its parameters. They are sent for every step."""
    return tuple(
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    )


def split_rates(
    options: Sequence[Mapping[str, Any]],
) -> tuple[tuple[Mapping[str, Any], ...], torch.Tensor]:
    """Return the options, without the learning rates of groups for which `ShardOptimizer` takes the
    fused kernel, and f32[groups] with these learning rates."""
    rates, without = torch.zeros(len(options)), list(options)
    for number, group in enumerate(options):
        is_fused = group.get("fused") or not _is_chosen(group)
        if is_fused and isinstance(group["lr"], float | int | torch.Tensor):
            rates[number] = float(group["lr"])
            without[number] = {key: value for key, value in group.items() if key != "lr"}
    return tuple(without), rates


def _is_chosen(options: Mapping[str, Any]) -> bool:
    """Return whether the user has chosen an implementation of the update."""
    return bool(
        options.get("fused") is not None
        or options.get("foreach") is not None
        or options.get("capturable")
        or options.get("differentiable")
        or any(isinstance(beta, torch.Tensor) for beta in options.get("betas", ()))
    )


class Updated(NamedTuple):
    """The names of everything that a program's optimizer step updates. Plain data.

    ``groups``: parameters of each group. ``labels``: parameters with gradients. ``names``:
    (parameter, key) of each state entry.
    """

    groups: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    names: tuple[tuple[str, str], ...]


class ShardOptimizer:
    """The optimizer of one rank. It is stored in the rank's table and built at its first step.

    The parameters of the torch optimizer inside are flat buffers of shards (flat_buffers.py). It is
    pickled without state, because it can be rebuilt from the values of the table.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer] | OptimizerKind, masters: bool = False
    ) -> None:
        """``kind``: a class in ELEMENTWISE, or the kind of another class that passed the probe."""
        self.probed_kind = kind if isinstance(kind, OptimizerKind) else None
        self.kind = kind.cls if isinstance(kind, OptimizerKind) else kind
        self.masters = masters
        self._may_skip = False  # whether steps have a ``skip``
        self._reset(())

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardOptimizer, (self.probed_kind or self.kind, self.masters)

    def step(
        self,
        updated: Updated,
        shards: Mapping[str, torch.Tensor],
        options: Sequence[Mapping[str, Any]],
        gradients: Mapping[str, torch.Tensor],
        values: tuple[torch.Tensor, ...],
        clip: torch.Tensor | None = None,
        parts: Collection[str] = (),
        writable: Collection[str] = (),
        skip: torch.Tensor | None = None,
        rates: torch.Tensor | None = None,
    ) -> None:
        """Update the shards that have gradients, and their state ``values``, in place.

        ``values`` are in the order of ``updated.names``. ``options``: one dict for each group, and
        for a probed class the optimizer's attributes as the last. Shards become views of flat
        buffers, except those named in ``parts``: slices or copies made for this step. Gradients are
        divided by ``clip``; only gradients named in ``writable`` may be overwritten. ``skip``: see
        `update`. ``rates``: on the device, the learning rates of groups whose options have none.
        """
        if rates is not None:
            pairs_of_groups = zip(rates.unbind(), options, strict=True)
            options = [{"lr": rate, **group} for rate, group in pairs_of_groups]
        for group_options in options if self.probed_kind is None else ():
            if not isinstance(group_options["lr"], float | int | torch.Tensor):
                raise TypeError(
                    f"lr={group_options['lr']!r} of {self.kind.__name__} is not a number."
                )
        if (skip is not None) != self._may_skip:  # step counts have another device
            self._may_skip = skip is not None
            self._reset(updated.groups)
        if updated is not self._last_updated:
            if updated.groups != self.groups or self._was_cast(shards):
                self._reset(updated.groups)
            self._last_updated, self._step_buffers = updated, []
        if len(values) != len(self._last_values) or any(map(is_not, values, self._last_values)):
            self._receive_values(updated.names, values)
        if not gradients:
            return
        buffers = self._step_buffers = self._step_buffers or self._buffers_with_gradients(
            shards, gradients
        )
        for buffer in buffers:
            buffer.load_shards(shards, parts)
        optimizer = self._torch_optimizer(options)
        is_torch_class = self.probed_kind is None
        fused = is_torch_class and all(group.get("fused") for group in optimizer.param_groups)
        kernel_divides_by_clip = clip is not None and fused and kernel_divides(clip.dtype)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer in buffers:
            gradient, is_copy = buffer.gradient(gradients)
            if clip is not None and not kernel_divides_by_clip:
                gradient = divide(gradient, clip)
            elif (kernel_divides_by_clip or not is_torch_class) and not (
                is_copy or all(m.name in writable for m in buffer.members)
            ):
                gradient = (
                    gradient.clone()
                )  # a kernel that divides, or a probed class, may write it
            pairs.append((buffer.parameter, gradient))
        kernel_clip = clip if kernel_divides_by_clip else None
        update(optimizer, pairs, kernel_clip, skip, is_torch_class)
        if optimizer.state is not self.state:
            raise TypeError(f"{self.kind.__name__} has replaced its dict of state by another dict.")
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if not is_torch_class and (stray := stray_state(optimizer, parameters)):
            raise TypeError(f"{self.kind.__name__} {stray}.")
        for buffer in buffers:
            buffer.store_shards()
        for buffer in buffers:
            if not is_torch_class or buffer in self._unaliased or self._has_host_numbers(buffer):
                self._alias_values(buffer)
        self._unaliased = []

    # -- values of the rank's table ----------------------------------------------------------------

    def _reset(self, groups: tuple[tuple[str, ...], ...]) -> None:
        """Drop all buffers and state; the next step rebuilds them from the table's values.
        ``groups``: the names of the parameters of each group."""
        self.groups = groups
        self.optimizer: torch.optim.Optimizer | None = None
        self.buffers: dict[_BufferKey, list[FlatBuffer]] = {}  # a torch class has a group for each
        self.buffer_by_name: dict[str, FlatBuffer] = {}
        self.state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)  # torch's, by parameter
        self.values: dict[str, dict[str, torch.Tensor]] = {}  # in the table: [parameter][key]
        self._last_values: tuple[torch.Tensor, ...] = ()
        self._last_updated: Updated | None = None
        self._step_buffers: list[FlatBuffer] = []  # updated by the last step; [] if out of date
        self._unaliased: list[FlatBuffer] = []  # new buffers; the table has no views of them yet
        # state tensors of which the table's values are views, by buffer and key
        self._aliased_entries: dict[tuple[FlatBuffer, str], torch.Tensor] = {}

    def _was_cast(self, shards: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a shard's dtype has changed since its buffer was made (by
        `module.to(dtype)`)."""
        return any(
            member.name in shards and shards[member.name].dtype != key.shard_dtype
            for key, buffers in self.buffers.items()
            for buffer in buffers
            for member in buffer.members
        )

    def _receive_values(
        self, names: Sequence[tuple[str, str]], values: tuple[torch.Tensor, ...]
    ) -> None:
        """Record the table's values. If one of a known parameter was replaced, reset everything."""
        for (label, key), value in zip(names, values, strict=True):
            if label in self.buffer_by_name and self.values.get(label, {}).get(key) is not value:
                self._reset(self.groups)
                break
        for (label, key), value in zip(names, values, strict=True):
            self.values.setdefault(label, {})[key] = value
        self._last_values = values

    def _alias_values(self, buffer: FlatBuffer) -> None:
        """Make the table's values of the buffer's members views of the buffer's state."""
        state = self.state.get(buffer.parameter, {})
        if self.probed_kind is not None:
            self._alias_probed_values(buffer, state, self.probed_kind.entries)
            return
        device = buffer.parameter.device
        numbers = {k: v.to(device) for k, v in state.items() if k in NUMBERS}
        for member in buffer.members:
            for key, value in self.values.get(member.name, {}).items():
                if key == MASTER and buffer.master:
                    value.data = buffer.member_part(buffer.parameter.data, member)
                elif key in numbers:
                    value.data = numbers[key]
                elif isinstance(value_of_state := state.get(key), torch.Tensor):
                    value.data = buffer.member_part(value_of_state, member)

    def _alias_probed_values(
        self, buffer: FlatBuffer, state: Mapping[str, Any], entries: Mapping[str, StateEntry]
    ) -> None:
        """Make the table's values views of the state of a probed class, or copies if they are
        numbers. Its steps may replace state tensors, and keep Python numbers in the state."""
        if buffer.master and buffer in self._unaliased:
            state = {**state, MASTER: buffer.parameter.data}
        for key, entry_value in state.items():
            entry = entries.get(key)
            _check_as_probed(self.kind, key, entry_value, entry, buffer)
            if entry_value is None or self._aliased_entries.get((buffer, key)) is entry_value:
                continue
            number = entry is not None and entry.number
            stored = entry.to_table(entry_value) if entry is not None else entry_value
            stored = stored.to(buffer.parameter.device)
            for member in buffer.members:
                value = self.values.get(member.name, {}).get(key)
                if value is not None:
                    value.data = stored.clone() if number else buffer.member_part(stored, member)
            if isinstance(entry_value, torch.Tensor) and not number:
                self._aliased_entries[buffer, key] = entry_value

    def _existing_entries(self, name: str) -> dict[str, torch.Tensor]:
        """Return the existing state entries of a parameter, without its master."""
        entries = self.values.get(name, {})
        return {k: v for k, v in entries.items() if k != MASTER and not is_absent(v)}

    # -- flat buffers ------------------------------------------------------------------------------

    def _buffers_with_gradients(
        self, shards: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
    ) -> list[FlatBuffer]:
        """Return the buffers of the parameters that have gradients. Makes buffers for parameters
        with their first gradient, and splits buffers of which only some members have a gradient."""
        if not gradients.keys() <= self.buffer_by_name.keys():
            self._add_buffers(
                {name: shards[name] for name in gradients if name not in self.buffer_by_name}
            )
        buffers: list[FlatBuffer] = []
        num_members = 0
        for buffer in dict.fromkeys(map(self.buffer_by_name.__getitem__, gradients)):
            buffers.append(buffer)
            num_members += len(buffer.members)
        if num_members == len(gradients):
            return buffers
        for buffer in buffers:
            if not all(member.name in gradients for member in buffer.members):
                self._split(buffer, gradients)
        return list(dict.fromkeys(map(self.buffer_by_name.__getitem__, gradients)))

    def _add_buffers(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Make buffers for parameters that have none. Parameters share a buffer only if they have
        the same `_BufferKey`."""
        names_by_key: dict[_BufferKey, list[str]] = {}
        for group, names in enumerate(self.groups):
            for name in names:
                if name in shards:
                    shard = shards[name]
                    narrow = self.masters and is_narrow(shard.dtype)
                    entries = sorted(self._existing_entries(name).items())
                    numbers = tuple((k, self._number_or_none(k, v)) for k, v in entries)
                    dtype = torch.float32 if narrow else shard.dtype
                    key = _BufferKey(
                        group, shard.dtype, dtype, shard.device, numbers, len(self.buffers)
                    )
                    names_by_key.setdefault(key, []).append(name)
        for key, names in names_by_key.items():
            self.buffers[key] = []
            for positions in group_by_size(shards[name].numel() for name in names):
                members = [names[position] for position in positions]
                masters = {name: self._existing_master(name) for name in members}
                has_masters = key.dtype != key.shard_dtype
                buffer = make_buffer(members, shards, masters if has_masters else None)
                self.buffers[key].append(buffer)
                self.buffer_by_name.update(dict.fromkeys(members, buffer))
                if key.numbers:
                    self.state[buffer.parameter] = self._state_from_values(buffer, shards)
                    self._alias_values(buffer)  # at once, to free the tensors that were copied
                self._unaliased.append(buffer)
        self.optimizer = None

    def _is_number(self, key: str) -> bool:
        if self.probed_kind is None:
            return key in NUMBERS
        return key in self.probed_kind.entries and self.probed_kind.entries[key].number

    def _number_or_none(self, key: str, value: torch.Tensor) -> object:
        """Return the value of an entry that is a number, else None."""
        return float(value) if self._is_number(key) and not value.is_meta else None

    def _existing_master(self, name: str) -> torch.Tensor | None:
        master = self.values.get(name, {}).get(MASTER)
        return None if master is None or is_absent(master) else master

    def _state_from_values(
        self, buffer: FlatBuffer, shards: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Build the state of a buffer from the table's values of its members.

        Entries are cast to the dtype that the class uses, since a loaded state may have another. A
        value that fills the buffer alone is used without a copy. Raises ValueError if a shape
        differs from the shard's.
        """
        entries = [self._existing_entries(member.name) for member in buffer.members]
        like = buffer.parameter if buffer.master else shards[buffer.members[0].name]
        state: dict[str, Any] = {}
        probed = {} if self.probed_kind is None else self.probed_kind.entries
        for key, entry in probed.items():
            if entry.late and entries[0] and key not in entries[0]:
                state[key] = None
        for key, first_value in entries[0].items():
            if self._is_number(key):
                number = first_value.clone()
                state[key] = probed[key].from_table(number) if key in probed else number
                continue
            dtype = like.dtype if first_value.is_floating_point() else first_value.dtype
            dtype = probed[key].dtype(like.dtype) if key in probed else dtype
            for member, entry in zip(buffer.members, entries, strict=True):
                if entry[key].shape != member.shape:
                    raise ValueError(
                        f"{key} of {member.name} has the shape {list(entry[key].shape)}, the "
                        f"parameter's shard {list(member.shape)}."
                    )
            if (
                first_value.numel() == buffer.size
                and first_value.dtype == dtype
                and first_value.is_contiguous()
            ):
                state[key] = first_value.detach().view(-1)
                continue
            state[key] = flat = torch.zeros(buffer.size, dtype=dtype, device=like.device)
            for member, entry in zip(buffer.members, entries, strict=True):
                buffer.member_part(flat, member).copy_(entry[key])
        return state

    def _split(self, buffer: FlatBuffer, present: Collection[str]) -> None:
        """Replace a buffer by its parts (`FlatBuffer.split`), and split its state alike."""
        parts = buffer.split(present)
        for buffers in self.buffers.values():
            if buffer in buffers:
                index = buffers.index(buffer)
                buffers[index : index + 1] = [part for part, _ in parts]
        state = self.state.pop(buffer.parameter, {})
        for part, begin in parts:
            self.buffer_by_name.update((member.name, part) for member in part.members)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    number = self._is_number(key)
                    entry = value.clone() if number else value[begin : begin + part.size]
                    self.state[part.parameter][key] = entry
                elif self.probed_kind is not None:
                    self.state[part.parameter][key] = value
            self._alias_values(part)
        self.optimizer = None

    # -- the torch optimizer -----------------------------------------------------------------------

    def _torch_optimizer(self, options: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        """Return the torch optimizer over all buffers, with these options of its groups."""
        if self.probed_kind is not None:
            return self._probed_optimizer(self.probed_kind, options)
        new_options = [self._group_options(key, options[key.group]) for key in self.buffers]
        if self.optimizer is None:
            groups = [
                {**group_options, "params": [buffer.parameter for buffer in buffers]}
                for group_options, buffers in zip(new_options, self.buffers.values(), strict=True)
            ]
            with without_compiler():
                self.optimizer = self.kind(groups)  # pyright: ignore[reportCallIssue]
            for parameter, entry in self.optimizer.state.items():  # Adagrad makes it in __init__
                self.state.setdefault(parameter, entry)
            self.optimizer.state = cast(Any, self.state)
            for group in self.optimizer.param_groups:
                on_device = group.get("fused") or group.get("capturable")
                gpu_parameters = (
                    p for p in group["params"] if p.device.type not in ("cpu", "meta")
                )
                for parameter in gpu_parameters:
                    self._place_numbers(parameter, on_device or self.kind is torch.optim.ASGD)
        for group, group_options in zip(self.optimizer.param_groups, new_options, strict=True):
            group.update(group_options)
        return self.optimizer

    def _probed_optimizer(
        self, kind: OptimizerKind, sent: Sequence[Mapping[str, Any]]
    ) -> torch.optim.Optimizer:
        """Return a new optimizer of a probed class, with one group for each of the user's groups.

        ``sent``: the options of each group, then the attributes. They replace all changes that the
        last step made to the optimizer.
        """
        *options, attributes = copy_plain(tuple(map(dict, sent)))
        parameters: list[list[torch.Tensor]] = [[] for _ in options]
        for key, buffers in self.buffers.items():
            parameters[key.group] += [buffer.parameter for buffer in buffers]
        groups = [{**o, "params": p} for o, p in zip(options, parameters, strict=True)]
        self.optimizer = kind.make(groups, attributes)
        for text in [key for key in self.state if isinstance(key, str)]:
            del self.state[text]
        self.state.update(self.optimizer.state)
        self.optimizer.state = cast(Any, self.state)
        return self.optimizer

    def _has_host_numbers(self, buffer: FlatBuffer) -> bool:
        """Return whether the state of a buffer on a GPU has numbers on the host, which steps change
        there."""
        parameter = buffer.parameter
        state = self.state.get(parameter, {}) if parameter.device.type == "cuda" else {}
        return any(state[key].device.type == "cpu" for key in NUMBERS & state.keys())

    def _place_numbers(self, parameter: torch.Tensor, on_device: bool) -> None:
        """Move a parameter's number entries to the device on which the class expects them. The
        table holds all values on the parameter's device."""
        device = parameter.device if on_device else torch.device("cpu")
        state = self.state.get(parameter, {})
        for key in NUMBERS & state.keys():
            state[key] = state[key].to(device)

    def _group_options(self, key: _BufferKey, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a group, with fused=True if torch has a correct fused kernel and
        the user has not chosen an implementation. Raises ValueError if the user's fused=True has no
        correct kernel."""
        chosen = _is_chosen(options)
        right = has_kernel(self.kind.__name__, key.dtype, key.device)
        if options.get("fused") and self.kind in FUSED and not right:
            raise ValueError(
                f"torch's fused {self.kind.__name__} is not right for {key.dtype} on "
                f"{key.device.type}.\nfix: leave fused=True out, or train_step(..., "
                f"master_weights=True)"
            )
        if right and not chosen:
            return {**options, "fused": True}
        if not self._may_skip or options.get("fused") or key.device.type != "cuda":
            return options
        # without a wait, these classes count steps only if they are capturable
        lr = options["lr"]
        rate = float(lr) if isinstance(lr, torch.Tensor) and lr.device.type == "cpu" else lr
        return {**options, "lr": rate, **({"capturable": True} if "capturable" in options else {})}


@dataclass(frozen=True, slots=True)
class _BufferKey:
    """The properties that all parameters of a buffer share.

    ``group``: the index of the user's group. ``dtype``: of the updated tensor, float32 if it is a
    master. ``numbers``: the existing state keys, with the value if it is a number.
    ``num_earlier_keys``: how many keys existed before. It separates new parameters from older ones,
    since kernels need state for all parameters of a group, or for none.
    """

    group: int
    shard_dtype: torch.dtype
    dtype: torch.dtype
    device: torch.device
    numbers: tuple[tuple[str, object], ...]
    num_earlier_keys: int


def _check_as_probed(
    kind: type[torch.optim.Optimizer],
    key: str,
    value: Any,
    entry: StateEntry | None,
    buffer: FlatBuffer,
) -> None:
    """Raise TypeError if the optimizer stored a state entry of a form that its probe did not see,
    because the rank's table could not hold it."""
    if key == MASTER or (value is None and entry is not None and entry.late):
        return
    if entry is not None and entry.python is not None:
        fits = isinstance(value, entry.python | int if entry.python is float else entry.python)
    elif entry is not None and isinstance(value, torch.Tensor):
        expected_shape = entry.shape if entry.number else (buffer.size,)
        fits = tuple(value.shape) == expected_shape and value.dtype == entry.dtype(
            buffer.parameter.dtype
        )
        fits = fits or (entry.number and tuple(value.shape) == expected_shape)
    else:
        fits = False
    if not fits:
        description = type(value).__name__
        if isinstance(value, torch.Tensor):
            description = f"a tensor of shape {list(value.shape)} and {value.dtype}"
        raise TypeError(
            f"{kind.__name__} has put {description} under {key!r} into the state of a parameter, "
            f"which its probe did not see."
        )


def divide(gradient: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
    """Return the gradient divided by ``clip``, computed in float32 if it is narrower."""
    wide = gradient.float() if is_narrow(gradient.dtype) else gradient
    return (wide / clip.to(accumulation_dtype(wide.dtype))).to(gradient.dtype)
