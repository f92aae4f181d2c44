"""Runs one of the small programs of this folder, and prints what it gives.

python -m examples.daft.run ring --backend ray
"""

from __future__ import annotations

import argparse
from importlib import import_module

from dtensor import daft

PROGRAMS = ["parameter_server", "ring", "streaming", "work_queue"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--backend", choices=["inprocess", "ray"], default="inprocess")
    given = parser.parse_args()
    with daft.launch(given.backend):
        print(import_module(f"examples.daft.{given.program}").run())
