"""Pieces of local code that torch compiles: their source, their artifact, what ranks load.

    source = PieceSource(function, inputs=(Layout((4, 8), (8, 1), torch.float32),), outputs=(...,))
    data = compile_piece(source, torch.device("cpu"))    # bytes; a str says why there are none
    piece = CompiledPiece("compiled(mm, add)", {"cpu": data})
    h, g = piece([x, w])                                 # empties the list

A piece is compiled once for each kind of device, and all ranks load the same artifact. Nothing is
tuned by measuring, so all compilations of a source choose the same kernels. The results have the
strides that the generated code has: other pieces are compiled for these strides.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor.daft import Function
from dtensor.private_torch import (
    FakeTensorMode,
    cpp_compiler,
    loaded_artifact,
    standalone_compile,
    unset_fake_temporarily,
    without_trace,
)

SETTINGS: Mapping[str, object] = {
    "cpp.threads": 1,  # the number of threads changes the bits of a sum
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,
}
"""torch's settings of the compiler while a piece is compiled."""


_ALIGNMENT = 16  # bytes, which kernels on GPUs assume if an example input has them


class Layout(NamedTuple):
    """The shape, strides and dtype of a tensor, and its storage offset within an alignment."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @staticmethod
    def of(x: Tensor) -> Layout:
        offset = int(x.storage_offset()) % max(1, _ALIGNMENT // x.element_size())
        return Layout(tuple(x.shape), x.stride(), x.dtype, offset)

    def zeros(self, device: torch.device) -> Tensor:
        """Return zeros with this layout."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        size = self.offset + (0 if 0 in self.shape else last + 1)
        storage = torch.zeros(size, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSource:
    """A function of tensors, with the layouts of its inputs and of the results that it has as
    generated code."""

    function: Function
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class CompiledPiece:
    """A compiled piece of local code. It takes its tensors out of the list that it gets, so that
    each is freed after its last use. It raises if a tensor has other strides than it was compiled
    for.

    ``data``: its artifact for each kind of device (`device_kind`).
    """

    def __init__(self, name: str, data: Mapping[str, bytes]) -> None:
        self.__name__ = name
        self.data = data
        self._run: Callable[[list[Tensor]], Sequence[Tensor]] | None = None

    def load(self) -> CompiledPiece:
        """Load the artifact for this process's device, and return the piece."""
        kind = "cpu" if "cpu" in self.data else device_kind(torch.device("cuda"))
        self._run = _loaded(self.data[kind])
        return self

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        if self._run is None:
            self.load()
        assert self._run is not None
        return self._run(tensors)

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (self.__name__, self.data)


def _received(name: str, data: Mapping[str, bytes]) -> CompiledPiece:
    """Return a piece that another process has sent, loaded: no step waits for it."""
    return CompiledPiece(name, data).load()


def device_kind(device: torch.device) -> str:
    """Return a name that is equal for devices that run the same kernels."""
    if device.type != "cuda":
        return device.type
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.major}.{properties.minor}"


def compiler_problem(device_type: str) -> tuple[str, str] | None:
    """Return what torch's compiler lacks in this process to compile for this type of device, and a
    fix; None if it lacks nothing."""
    if device_type == "cuda":
        if find_spec("triton") is None:
            return "Triton, which is not installed", "pip install 'dtensor[kernels]'"
        if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
            return "a C compiler, and there is none here", "install gcc, or set CC to a compiler"
        return None
    get_cpp_compiler, missing = cpp_compiler()
    try:
        get_cpp_compiler()
    except missing as error:
        return (
            f"a C++ compiler, and there is none here: {error}",
            "install g++, or set CXX to a compiler",
        )
    return None


def compile_piece(source: PieceSource, device: torch.device) -> bytes | str:
    """Return the artifact of a piece for this device, or why it cannot be compiled."""
    try:
        data = _artifact(source, device)
        _check_layouts(source, _loaded(data), device)
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {text[:200]}"
    return data


_artifacts: dict[str, Callable[[list[Tensor]], Sequence[Tensor]]] = {}
"""The loaded artifacts of this process, by the hash of their data."""


def _loaded(data: bytes) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    key = hashlib.sha256(data).hexdigest()
    if key not in _artifacts:
        with tempfile.TemporaryDirectory() as folder, without_trace():
            path = Path(folder) / "artifact"
            path.write_bytes(data)
            _artifacts[key] = loaded_artifact(str(path))
    return _artifacts[key]


def _artifact(source: PieceSource, device: torch.device) -> bytes:
    from torch.fx.experimental.proxy_tensor import make_fx

    compile_alone, settings = standalone_compile(SETTINGS)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        without_trace(),
        settings,
        tempfile.TemporaryDirectory() as folder,
    ):
        inputs = [layout.zeros(device) for layout in source.inputs]
        graph = make_fx(source.function.build())(*inputs)
        artifact: Any = compile_alone(
            graph, inputs, dynamic_shapes="from_example_inputs", options={}
        )
        path = Path(folder) / "artifact"
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def _check_layouts(
    source: PieceSource,
    run: Callable[[list[Tensor]], Sequence[Tensor]],
    device: torch.device,
) -> None:
    """Raise ValueError if the results of the piece do not have the declared layouts. Runs it on
    zeros, which are valid indices."""
    with unset_fake_temporarily(), torch.no_grad():
        results = run([layout.zeros(device) for layout in source.inputs])
        for number, (x, declared) in enumerate(zip(results, source.outputs, strict=True)):
            layout = Layout.of(x)
            if layout[:3] != declared[:3]:
                raise ValueError(f"result {number} has the layout {layout}, not {declared}")
