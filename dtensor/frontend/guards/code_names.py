"""Which code the guards follow, and the names that this code mentions.

    names = CodeNames([loss_fn.__code__])  # of `def loss_fn(x): return model(x) * config.beta`
    names.names                            # {"model", "config", "beta", ...}
    names.select(vars(config))             # ["beta"]: the attributes that the code may read

Guards follow the user's functions, installed libraries, and the layers in torch.nn.modules.
Bytecode lists the globals, attributes and methods that it uses (`co_names`), but not which object
each belongs to: a name counts for every object. Code that computes names (`getattr`, `vars`) may
read any attribute; then `select` returns all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from dtensor.frontend.source import OWN, owner_of_file

_NOT_FOLLOWED = (None, "numpy", "ray", "torch", "typing_extensions.py", "_pytest", "pluggy")
"""Owners of code that is not followed (`owner_of_file`); None stands for Python, torch and this
package. known_functions.py has entries for the state that it reads. The last two are import hooks,
whose code runs at any import."""
_COMPUTES_NAMES = {"getattr", "hasattr", "vars", "__dict__", "attrgetter", "globals", "locals"}
_COMPUTES_NAMES |= {"eval", "exec", "__getattribute__", "methodcaller", "setattr"}


class CodeNames:
    """The names that some code mentions. ``match_all``: it may read any other name as well."""

    def __init__(self, codes: Iterable[CodeType] = (), *, match_all: bool = False) -> None:
        self.names: set[str] = {"forward"}  # torch calls it
        self.match_all = match_all
        for code in codes:
            self.add(code)

    def add(self, code: CodeType) -> None:
        """Add the names that the code and its nested code read. If the code computes names, add its
        string constants and match all names."""
        for part in with_nested(code):
            self.names.update(part.co_names)
            if not _COMPUTES_NAMES.isdisjoint(part.co_names) and not is_layer(part):
                self.match_all = True
                self.names.update(string_constants(part))

    def select(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the keys of ``entries`` that the code may read."""
        if not self.match_all:
            return [name for name in list(entries) if name in self.names]
        return [n for n in list(entries) if isinstance(n, str) and not n.startswith("__")]


def is_followed(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith("<"):  # generated code, or typed at a prompt
        return not file.startswith("<frozen")
    return owner_of_file(file) not in _NOT_FOLLOWED or is_layer(code)


def is_users(code: CodeType) -> bool:
    """Return whether the code is the user's own, not a library's or a torch layer's."""
    file = code.co_filename
    return is_followed(code) and (file.startswith("<") or owner_of_file(file) == OWN)


def is_layer(code: CodeType) -> bool:
    return _is_layer_file(code.co_filename)


@functools.cache
def _is_layer_file(file: str) -> bool:
    path = file.replace("\\", "/")
    return "/torch/nn/modules/" in path and not path.endswith("/module.py")


def with_nested(code: CodeType) -> Iterator[CodeType]:
    """Yield the code, and the code of the functions, lambdas and classes that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_nested(constant)


def string_constants(code: CodeType) -> Iterator[str]:
    return (constant for constant in code.co_consts if isinstance(constant, str))
