"""The parts of `make gpu`, in order: correctness first, then speed.

A part is a function that takes a `Where` and reports lines; it runs in its own process. Limits
are seconds with a margin, for one or two H100s; none is above eight minutes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """``function``: module:name."""

    name: str
    title: str
    limit_s: float
    function: str


PARTS = (
    Part("doctor", "The machine, and `dtensor doctor --gpu`", 300, "tests.gpu.right:doctor"),
    Part(
        "kernels", "Each kernel's numbers, compiled anew and again", 480, "tests.gpu.right:kernels"
    ),
    Part("memcheck", "Kernels under compute-sanitizer", 480, "tests.gpu.right:memcheck"),
    Part("in_process", "Ranks of this process on one GPU", 480, "tests.gpu.right:in_process"),
    Part("compiled", "Compiled code and graphs", 480, "tests.gpu.right:compiled"),
    Part("nccl", "NCCL between GPUs", 300, "tests.gpu.right:nccl"),
    Part("ray", "Training on Ray", 480, "tests.gpu.right:on_ray"),
    Part("schedules", "The first steps of each schedule", 480, "tests.gpu.right:schedules"),
    Part("profile", "The profile of 1F1B", 300, "tests.gpu.measured:profile"),
    Part("waits", "Waits of the host in a step", 300, "tests.gpu.measured:waits"),
    Part("killed", "An actor that is killed", 300, "tests.gpu.right:killed"),
    Part("memory", "Memory, beside the plan's", 300, "tests.gpu.measured:memory"),
    Part("replicas", "Replicas after 50 steps in bfloat16", 300, "tests.gpu.right:replicas"),
    Part("attention", "Attention by each of torch's kernels", 300, "tests.gpu.measured:attention"),
    Part("speed_kernels", "Kernels beside peers", 480, "tests.gpu.measured:speed_kernels"),
    Part("speed_llama", "A step of a Llama beside peers", 480, "tests.gpu.measured:speed_llama"),
    Part("speed_gpt", "A step of a GPT beside peers", 480, "tests.gpu.measured:speed_gpt"),
    Part(
        "speed_small", "A step of a small GPT beside peers", 480, "tests.gpu.measured:speed_small"
    ),
    Part(
        "speed_all_reduce",
        "An all_reduce beside torch.distributed",
        300,
        "tests.gpu.measured:speed_all_reduce",
    ),
    Part("speed_block", "A block on two GPUs beside peers", 480, "tests.gpu.measured:speed_block"),
)
