"""A warning where dtensor does not support the torch that is installed.

    import dtensor      # UserWarning: torch 2.14.1 is not supported ...
                        # fix: pip install 'torch>=2.11,<2.14'

Pip replaces torch without a word where another package asks for a newer one.

Torch is not imported for it: where it is not yet, its file `version.py` is read.
"""

from __future__ import annotations

import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

LOWEST, BELOW = (2, 11), (2, 14)
"""As in pyproject.toml, whose metadata take longer to read than all else of `import dtensor`."""


def warn_of_torch() -> None:
    """UserWarning, at the line that imports dtensor, with the command that mends it."""
    version = torch_version()
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or LOWEST <= (int(found[1]), int(found[2])) < BELOW:
        return
    wanted = "torch>={}.{},<{}.{}".format(*LOWEST, *BELOW)
    warnings.warn(
        f"torch {version} is not supported: dtensor is tested with {wanted}, and uses parts of it "
        f"that other versions may not have. Installing another package may have replaced it.\n"
        f"fix: pip install '{wanted}'",
        stacklevel=3,
    )


def torch_version() -> str:
    """ "2.13.0+cpu"; "" where there is no torch."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.exists() else ""
    found = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return "" if found is None else found[1]
