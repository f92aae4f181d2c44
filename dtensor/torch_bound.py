"""Warn if dtensor does not support the installed version of torch.

    import dtensor      # UserWarning: torch 2.14.1 is not supported ...
                        # fix: pip install 'torch>=2.11,<2.14'

Pip replaces torch silently if another package requires a newer version. The check does not import
torch: it reads torch's file `version.py`.
"""

from __future__ import annotations

import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

LOWEST, BELOW = (2, 11), (2, 14)
"""A copy of pyproject.toml's bounds. Reading them from the package's metadata takes longer than the
rest of `import dtensor`."""


def warn_of_torch() -> None:
    """Warn at the line that imports dtensor, with the command that installs a supported version."""
    version = torch_version()
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or LOWEST <= (int(match[1]), int(match[2])) < BELOW:
        return
    wanted = "torch>={}.{},<{}.{}".format(*LOWEST, *BELOW)
    warnings.warn(
        f"torch {version} is not supported: dtensor is tested with {wanted}, and uses parts of it "
        f"that other versions may not have. Installing another package may have replaced it.\n"
        f"fix: pip install '{wanted}'",
        stacklevel=3,
    )


def torch_version() -> str:
    """Return the installed version of torch, such as "2.13.0+cpu"; "" if it is not installed."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.exists() else ""
    match = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return "" if match is None else match[1]
