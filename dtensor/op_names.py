"""Ops by name, such as ``aten::add`` and ``dt::rope``."""

from __future__ import annotations

import importlib

import torch

from dtensor.private_torch import OpOverloadPacket


def op_packet(name: str) -> OpOverloadPacket:
    """Return ``torch.ops.aten.add`` for ``aten::add``. The first name of the namespace ``dt``
    registers all dt ops. Raises AttributeError if torch has no such op."""
    namespace, _, op = name.partition("::")
    if namespace == "dt":
        importlib.import_module("dtensor.sharding.ops.registered")
    return getattr(getattr(torch.ops, namespace), op)
