"""The flags that control torch's kernels are read in one process and set in another."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator

import pytest
import torch

from dtensor.kernel_flags import kernel_flags, set_kernel_flags

CHANGES: dict[str, Callable[[], object]] = {
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32 of cudnn": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "every precision": lambda: setattr(torch.backends, "fp32_precision", "ieee"),
    "precision of mkldnn": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "precision of cudnn": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "bfloat16 sums": lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "float16 sums": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "float16 accumulation": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_accumulation", True
    ),
    "cudnn deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "math attention": lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
}
ASKED: dict[str, Callable[[], object]] = {
    "matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "precision": torch.get_float32_matmul_precision,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn deterministic": lambda: torch.backends.cudnn.deterministic,
    "float16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "bfloat16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "math attention": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    "conv": lambda: torch.backends.cudnn.conv.fp32_precision,
}


def answers() -> dict[str, object]:
    """Return torch's answers about its settings, including its complaint if two ways of setting are
    mixed."""
    found: dict[str, object] = {}
    for name, ask in ASKED.items():
        try:
            found[name] = ask()
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.fixture
def before() -> Iterator[bytes]:
    kept = marshal.dumps(kernel_flags(), 2)
    # in a process in which somebody has called torch.backends.disable_global_flags(), too
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        yield kept
    set_kernel_flags(marshal.loads(kept))
    assert marshal.dumps(kernel_flags(), 2) == kept


@pytest.mark.parametrize("name", CHANGES)
def test_changed_kernel_flag_is_read_and_can_be_set(name: str, before: bytes) -> None:
    at_first = answers()
    CHANGES[name]()
    changed, told = marshal.dumps(kernel_flags(), 2), answers()
    assert changed != before
    set_kernel_flags(marshal.loads(before))
    assert marshal.dumps(kernel_flags(), 2) == before
    assert answers() == at_first
    set_kernel_flags(marshal.loads(changed))
    assert marshal.dumps(kernel_flags(), 2) == changed
    assert answers() == told
