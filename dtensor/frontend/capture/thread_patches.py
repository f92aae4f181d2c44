"""Patch torch for the thread that captures and for no other, and undo the patches in all cases.

    with patch_attributes([(fx.GraphModule, "recompile", if_capturing(ours, plain))]):
        ...

Each replacement calls the original unless `is_capturing()`. There are patches for attributes, for
functions that torch has imported by name, for warning filters and for log filters.

Invariants: all originals are saved before the first change, so an exception or interrupt at any
point leaves nothing patched. Only one thread captures at a time (call_lock.py).
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


def if_capturing(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``ours`` in the thread that captures, else ``original``."""

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (ours if is_capturing() else original)(*args, **kwargs)

    return dispatch


@contextmanager
def patch_attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, given as (owner, name, value), in this context."""
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
def patch_flags(functions: Sequence[FunctionType]) -> Iterator[None]:
    """In this context, these functions without arguments, which return process-wide flags, return
    False in all threads but the one that captures. Their code is replaced, because torch's modules
    have imported them by name."""
    changes: list[tuple[Any, str, Any]] = []
    for function in functions:
        original = FunctionType(function.__code__, function.__globals__)
        defaults = {"_here": is_capturing, "_plain": original}
        # Restored in reverse order: the old code does not take these keyword arguments.
        changes += [(function, "__kwdefaults__", defaults), (function, "__code__", _flag.__code__)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        with defer_signals():
            _restore_attributes(originals)


def _flag(*, _here: Callable[[], bool], _plain: Callable[[], bool]) -> bool:
    return _here() and _plain()


# -- warnings and logs -----------------------------------------------------------------------------


class _ThreadPattern:
    """A regular expression for warning filters that only matches in the thread that captures."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._match = re.compile(pattern).match

    def match(self, text: str) -> Any:
        return is_capturing() and self._match(text)


@contextmanager
def filter_warnings(*filters: tuple[str, str, str]) -> Iterator[None]:
    """Add filters, given as (action, message, module), for warnings of the thread that captures.
    The last one has precedence.

    The list of filters is shared by all threads. `warnings.catch_warnings` would undo changes by
    other threads.
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
    """In this context, drop the records for which ``silent(record)`` is true, given as (logger,
    silent), if the thread that captures logs them."""
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
