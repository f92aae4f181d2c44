"""How torch is changed for the thread that captures, and for no other; put back whatever happens.

    with replaced([(fx.GraphModule, "recompile", here_alone(ours, plain))]):
        ...

Attributes, functions that others have by value, warning filters and log filters. Each replacement
asks `is_capturing` and else does what was there before.

Invariants: what was there is noted before anything is changed, so that an exception, an interrupt
too, at any place leaves nothing behind. One capture at a time (call_lock.py). Not here: what is
replaced (patches.py).
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from dtensor.frontend.call_lock import is_capturing
from dtensor.signals import defer_signals

_ABSENT = object()


def for_capturing_thread(ours: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``ours`` for the thread that captures, ``plain`` for others."""

    @functools.wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (ours if is_capturing() else plain)(*args, **kwargs)

    return dispatch


@contextmanager
def replace_attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within, owners have these attributes; those that they did not have go at the end."""
    originals = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        with defer_signals():
            _restore_attributes(originals)


def _restore_attributes(originals: list[tuple[Any, str, Any]]) -> None:
    while originals:
        owner, name, value = originals.pop()
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)


@contextmanager
def answered_here(functions: Sequence[FunctionType]) -> Iterator[None]:
    """Within, these flags of the process, functions without arguments, are False for all threads
    but the one that captures. They are changed themselves: torch has handed them out."""
    changes: list[tuple[Any, str, Any]] = []
    for function in functions:
        plain = FunctionType(function.__code__, function.__globals__)
        defaults = {"_here": is_capturing, "_plain": plain}
        # put back from the last: code that takes no such arguments first
        changes += [
            (function, "__kwdefaults__", defaults),
            (function, "__code__", _flag_for_thread.__code__),
        ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        with defer_signals():
            _restore_attributes(originals)


def _flag_for_thread(*, _here: Callable[[], bool], _plain: Callable[[], bool]) -> bool:
    return _here() and _plain()


# -- warnings and logs -----------------------------------------------------------------------------


class _ThreadPattern:
    """Stands for a pattern in a filter of warnings: that of C and Python ask it for `match`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._match = re.compile(pattern).match

    def match(self, text: str) -> Any:
        return is_capturing() and self._match(text)


@contextmanager
def filter_warnings(*filters: tuple[str, str, str]) -> Iterator[None]:
    """Within, what the thread that captures warns of: (action, message, module), the last first.

    The list of filters is the process's, and stays the same one: `warnings.catch_warnings` would
    put another thread's filters back.
    """
    thread_filters: list[Any] = [
        (action, _ThreadPattern(message), Warning, _ThreadPattern(module) if module else None, 0)
        for action, message, module in reversed(filters)
    ]
    try:
        warnings.filters[:0] = thread_filters  # type: ignore[index]
        _filters_changed()
        yield
    finally:
        for thread_filter in thread_filters:
            while thread_filter in warnings.filters:
                warnings.filters.remove(thread_filter)  # type: ignore[attr-defined]
        _filters_changed()


def _filters_changed() -> None:
    warnings._filters_mutated()  # type: ignore[attr-defined]


@contextmanager
def filter_logs(
    *silences: tuple[logging.Logger, Callable[[logging.LogRecord], bool]],
) -> Iterator[None]:
    """Within, these loggers do not say what the thread that captures logs, where the function is
    true of it."""
    log_filters = [
        (log, lambda record, silent=silent: not (is_capturing() and silent(record)))
        for log, silent in silences
    ]
    try:
        for log, log_filter in log_filters:
            log.addFilter(log_filter)
        yield
    finally:
        for log, log_filter in log_filters:
            log.removeFilter(log_filter)
