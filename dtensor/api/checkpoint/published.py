"""The published names of a transformers model's weights, by transformers' own conversion table.

    files = published(mixtral, {"model.layers.0.mlp.experts.down_proj": (f32, (E, d, i)), ...}, {})
    files.tensors["model.layers.0.block_sparse_moe.experts.0.w2.weight"]           # f32[d,i]
    assembled(mixtral, in_files, own)["model.layers.0.mlp.experts.gate_up_proj"]   # f32[E,2i,d]

Files have one tensor for each expert; the model has stacked parameters. transformers' converters
run here on tensors without values, which record the blocks of which tensors they consist of
(`Assembly`). So a rank reads and writes only the blocks of its shards. transformers is imported
only for its own models.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint.assembly import Assembly, InFiles, cat, inverted, stack


def assembled(
    module: nn.Module, in_files: Mapping[str, Assembly], own: Mapping[str, Assembly]
) -> dict[str, Assembly]:
    """Return the tensors of files under the names that they have in the model, as assemblies.

    ``own``: the model's tensors by name. A name that is not in the table, or that the table does
    not lead to a further name of the model, stays. Raises PlanningError for a conversion that is no
    rearrangement of blocks.
    """
    transforms = _transforms(module)
    converters: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    result: dict[str, Assembly] = {}
    renames = [t for t in transforms if not hasattr(t, "operations")]
    conversions = [t for t in transforms if hasattr(t, "operations")]
    for name in sorted(in_files, key=_natural):
        new, pattern = name, None
        for rename in renames:
            new, _ = rename.rename_source_key(new)
        for conversion in conversions:
            new, pattern = conversion.rename_source_key(new)
            if pattern is not None:
                converter = converters.setdefault(new, copy.deepcopy(conversion))
                converter.add_tensor(new, name, pattern, _Symbol(in_files[name]))
                sources.setdefault(new, []).append(name)
                break
        if pattern is None:
            result[new if new in own and new not in result else name] = in_files[name]
    for new, converter in converters.items():
        if new not in own or new in result:
            result |= {name: in_files[name] for name in sources[new]}
        else:
            result |= _converted(converter, new, sources[new], module)
    return result


def published(
    module: nn.Module,
    values: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    aliases: Mapping[str, str],
) -> InFiles:
    """Return the tensors of the published files of a model.

    ``values``: dtype and shape of the model's values, by name; ``aliases``: each further name of a
    tied value, with its name in ``values``. If transformers' table has conversions that are no
    rearrangement of blocks, or would not read the published names back as the same values, the
    names are the model's own, which transformers reads too.
    """
    types = {**values, **{name: values[first] for name, first in aliases.items()}}
    own = {name: Assembly.of(name, *types[name]) for name in types}
    tensors: dict[str, Assembly] = {}
    later: dict[str, Assembly] = {}
    for name, tensor in (_reverted(module, own) or own).items():
        if aliases.keys().isdisjoint(part.name for part in tensor.parts):
            tensors[name] = tensor
        else:
            later[name] = _renamed(tensor, aliases)
    names = {tensor: name for name, tensor in tensors.items()}
    tied = {name: names[tensor] for name, tensor in later.items() if tensor in names}
    tensors |= {name: tensor for name, tensor in later.items() if name not in tied}
    return InFiles.of(tensors, tied)


def _reverted(module: nn.Module, own: Mapping[str, Assembly]) -> dict[str, Assembly] | None:
    """Return the published tensors that transformers would write for the model's tensors; None if
    they do not differ, or are not read back as the same tensors."""
    if not _transforms(module):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = module
    symbols: dict[str, Any] = {name: _Symbol(tensor) for name, tensor in own.items()}
    try:
        reverted: dict[str, Any] = revert_weight_conversion(model, symbols)
        tensors = {name: symbol.assembly for name, symbol in reverted.items()}
        in_files = {name: Assembly.of(name, t.dtype, t.shape) for name, t in tensors.items()}
        read_back = assembled(module, in_files, own)
    except Exception:  # an entry of the table that cannot be run without values, or not reverted
        return None
    expected = {name: set(parts) for name, parts in inverted(tensors).items()}
    same = {name: set(tensor.parts) for name, tensor in read_back.items()} == expected
    return tensors if same else None


def _renamed(tensor: Assembly, names: Mapping[str, str]) -> Assembly:
    parts = (replace(part, name=names.get(part.name, part.name)) for part in tensor.parts)
    return replace(tensor, parts=tuple(parts))


def is_ignored(module: nn.Module, name: str) -> bool:
    """Return whether transformers ignores a tensor of published files that the model lacks, such as
    a layer that predicts further tokens."""
    patterns: Any = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    return any(re.search(pattern, name) for pattern in patterns or ())


def _transforms(module: nn.Module) -> Sequence[Any]:
    """Return the entries of transformers' table for a model; none for another module."""
    hf = sys.modules.get("transformers")
    if hf is None or not isinstance(module, hf.PreTrainedModel):
        return ()
    from transformers.conversion_mapping import get_model_conversion_mapping

    model: Any = module
    return get_model_conversion_mapping(model)


def _converted(
    converter: Any,
    name: str,
    sources: Sequence[str],
    module: Any,
) -> dict[str, Assembly]:
    """Return the results of a converter of the table, by the model's names."""
    operations = ", ".join(map(repr, converter.operations))
    try:
        results = converter.convert(name, model=module, config=module.config)
    except _UnknownOpError as error:
        raise PlanningError(
            f"{name} is made of {sources[0]} by {operations} of transformers, and ranks read only "
            f"tensors that are stacked, joined, cut or transposed; nothing was loaded.\n"
            f"fix: convert the checkpoint once: {type(module).__name__}.from_pretrained(path)"
            f".save_pretrained(new_path, save_original_format=False)"
        ) from error
    except Exception as error:  # what a converter raises if tensors are missing or misshapen
        raise PlanningError(
            f"{name} cannot be made of {len(sources)} tensors, such as {sources[0]}, by "
            f"{operations} of transformers: {error}; nothing was loaded.\n"
            f"fix: check that the folder is complete, and build the model that was saved"
        ) from error
    return {
        key: (symbol[0] if isinstance(symbol, list) else symbol).assembly
        for key, symbol in results.items()
    }


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key in which experts.10 is after experts.9, as transformers sorts."""
    words = re.split(r"(\d+)", name)
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in words]


# -- tensors without values ------------------------------------------------------------------------


class _UnknownOpError(Exception):
    """A torch function that is no rearrangement of blocks."""


class _Symbol:
    """A tensor without values, on which transformers' conversions are run."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.assembly.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.assembly.dtype

    @property
    def ndim(self) -> int:
        return len(self.assembly.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> _Symbol:
        return self

    def squeeze(self, dim: int) -> _Symbol:
        return _Symbol(self.assembly.squeeze(dim % self.ndim))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[_Symbol, ...]:
        return self.split(-(-self.size(dim) // chunks), dim)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[_Symbol, ...]:
        dim, number = dim % self.ndim, self.size(dim)
        if isinstance(sizes, int):
            sizes = [min(sizes, number - at) for at in range(0, number, sizes)]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(
            _Symbol(self.assembly.narrow(dim, at, n)) for at, n in zip(begins, sizes, strict=True)
        )

    def unbind(self, dim: int = 0) -> tuple[_Symbol, ...]:
        return tuple(symbol.squeeze(dim) for symbol in self.split(1, dim))

    def transpose(self, dim0: int, dim1: int) -> _Symbol:
        return _Symbol(self.assembly.transpose(dim0 % self.ndim, dim1 % self.ndim))

    def __getitem__(self, index: object) -> Any:
        raise _UnknownOpError("indexing")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _UnknownOpError(name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function not in _FUNCTIONS:
            raise _UnknownOpError(getattr(function, "__name__", repr(function)))
        return _FUNCTIONS[function](*args, **(kwargs or {}))


def _cat(symbols: Sequence[_Symbol], dim: int = 0) -> _Symbol:
    return _Symbol(cat([s.assembly for s in symbols], dim % symbols[0].ndim))


def _stack(symbols: Sequence[_Symbol], dim: int = 0) -> _Symbol:
    return _Symbol(stack([s.assembly for s in symbols], dim % (symbols[0].ndim + 1)))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.chunk: _Symbol.chunk,
    torch.split: _Symbol.split,
    torch.unbind: _Symbol.unbind,
    torch.transpose: _Symbol.transpose,
}
