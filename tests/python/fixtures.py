"""The tree's fixtures and demo, as the tests of the package use them."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"
DEMO = ROOT / "demo"
INDEX = json.loads((FIXTURES / "index.json").read_text())["models"]


def adapters(model=None):
    """(model folder, adapter folder) of all fixtures, the broken ones included."""
    for name in sorted(INDEX) if model is None else [model]:
        for kind in ("adapters", "malformed"):
            for folder in sorted((FIXTURES / name / kind).glob("*")):
                if folder.is_dir():
                    yield FIXTURES / name, folder
