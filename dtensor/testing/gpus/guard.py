"""A CUDA device guard that does nothing. A build of torch for CPUs needs it for "cuda" tensors.

    install()     # raises CompilerMissing without a C++ compiler

The guard is C++ code that is compiled once into a folder of the user. It tells torch that GPU 0 and
the default stream are current. The simulator keeps the real ones (`torch_cuda.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

SOURCE = """\
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Nothing final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device) const override { return Device(static_type, 0); }
  Device getDevice() const override { return Device(static_type, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const noexcept override {
    return Stream(Stream::DEFAULT, s.device());
  }
  DeviceIndex deviceCount() const noexcept override { return 64; }
};
static impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Nothing());
"""


class CompilerMissing(RuntimeError):
    """Raised if simulated GPUs need a C++ compiler and there is none."""


@cache
def install() -> None:
    """Load the guard into this process, and compile it first if that was not done before. On a
    machine with a GPU this does nothing, because torch has its own guard. Raises CompilerMissing if
    the guard cannot be compiled."""
    if torch.version.cuda is not None and torch.cuda.is_available():
        return
    folder = Path(tempfile.gettempdir()) / f"dtensor-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256(f"{SOURCE}{torch.__version__}".encode()).hexdigest()[:16]
    library = folder / f"no_device_guard-{digest}.so"
    if not library.exists():
        _compile(library)
    ctypes.CDLL(str(library))


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise CompilerMissing(
            "simulated GPUs need a C++ compiler once, and there is none.\n"
            "fix: install g++ or clang++, or name one in the environment variable CXX"
        )
    lib = Path(torch.__file__).parent / "lib"
    abi = int(torch.compiled_with_cxx11_abi())
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, compiled = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(SOURCE)
        command = [
            compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            *(f"-I{path}" for path in include_paths()), str(source), f"-L{lib}", "-lc10",
            f"-Wl,-rpath,{lib}", "-o", str(compiled),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise CompilerMissing(f"{compiler} could not compile a device guard:\n{result.stderr}")
        compiled.rename(library)  # atomic, because other processes may compile it too
