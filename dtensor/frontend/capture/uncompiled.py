"""Within a capture, graphs are not turned into Python source unless they are called.

    with uncompiled():
        torch.export.export(...)       # makes some forty GraphModules on its way, and calls few

A GraphModule writes the source of its forward, and compiles it, whenever it is made or changed.
Capture reads graphs and runs them node by node, so nearly all of that is for nothing: it took a
fifth of the time. torch.fx has the same for its own use (_LazyGraphModule), which torch.export does
not take up.

Invariants: a module that is called runs what its graph was at its last `recompile`, or is now.
Modules do not outlive the capture. Not here: what is captured.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen


@contextmanager
def uncompiled() -> Generator[None]:
    compiled: Any = fx.GraphModule.recompile

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled(self)  # puts the real forward in the place of this one
        return self.forward(*args, **kwargs)

    def recompile(self: Any) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, PyTreeCodeGen):
            self._in_spec = codegen.pytree_info.in_spec
            self._out_spec = codegen.pytree_info.out_spec
        type(self).forward = forward  # each GraphModule has a class of its own

    with mock.patch.object(fx.GraphModule, "recompile", recompile):
        yield
