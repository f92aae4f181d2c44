"""The README's example runs as written and prints the plan shown below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_readme_example_prints_plan_shown_in_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    plan = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert code and plan
    script = tmp_path / "mlp.py"
    script.write_text(code[1])
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.rstrip() == plan[1].rstrip()
