"""Kernels in Triton for the project's own ops, and the registry that chooses among kernels.

See registry.py for how one is chosen and how to add one, docs/kernels.md for what is checked.
"""
