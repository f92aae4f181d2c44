"""The settings of torch under which ranks compute: `with local_execution(device): ...`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

CPU = torch.device("cpu")


@contextmanager
def local_execution(device: torch.device = CPU) -> Generator[None]:
    """Set up torch for a program on this thread: no autograd, no autocast of the caller, and one
    kernel thread (their number changes the bits of sums). A device such as cuda:1 becomes the
    current device, on which Triton launches kernels."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(torch.no_grad())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
                stack.enter_context(torch.cuda.device(device))
            yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
