"""Triton kernels for dtensor's ops, and the registry that chooses the kernel of an op.

registry.py chooses a kernel; docs/kernels.md says how to add a kernel and what is checked.
"""
