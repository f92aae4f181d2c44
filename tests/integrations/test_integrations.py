"""Training loops of other libraries that are installed here; their docs page shows the code that
the scripts run.

`make integrations` runs all cases.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.integrations.__main__ import SCRIPTS
from tests.pages import blocks_of

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "howto" / "other_trainers.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize("name", SCRIPTS)
def test_library_loop_trains_with_dtensor(name: str) -> None:
    for package in ("transformers", "accelerate", SCRIPTS[name]):
        pytest.importorskip(package, reason=f"{package} is not installed; `make integrations`")
    script = importlib.import_module(f"tests.integrations.{name}")
    for case in script.CASES:
        if not case.slow:
            case.run().check()


def test_integrations_page_shows_code_of_scripts() -> None:
    shown = [block.text.strip() for block in blocks_of(PAGE.read_text()) if block.kind == "python"]
    texts = [(HERE / f"{name}.py").read_text() for name in SCRIPTS]
    own = [text.split("# begin\n")[1].split("# end\n")[0].strip() for text in texts]
    assert all(code in shown for code in own)
