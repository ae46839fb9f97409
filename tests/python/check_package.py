#!/usr/bin/env python3
"""Runs one of the test files beside it against the package of bindings/python, put together from
the tree: its sources, declarations made from the headers with this compiler, and the library of
this build. Needs cffi and numpy; exit status 77, with a word, where they are missing:
`tools/install-packages.sh client` puts them into build/client-venv.
    check_package.py SIDEPATH LIBRARY CC NAME"""

import os
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build/client-venv/bin/python"

try:
    import cffi
    import numpy
except ImportError:
    if VENV.is_file() and Path(sys.prefix) != VENV.parents[1]:
        os.execv(VENV, [str(VENV), "-B"] + sys.argv)
    print("cffi or numpy is not installed: tools/install-packages.sh client")
    sys.exit(77)

sys.path[:0] = [str(ROOT / "bindings/python")]
import make_declarations  # noqa: E402


def put_together(folder, compiler):
    """The package as a wheel has it, without the library."""
    package = Path(folder) / "sidepath"
    package.mkdir()
    for source in (ROOT / "bindings/python/src/sidepath").iterdir():
        (package / source.name).symlink_to(source)
    make_declarations.write(compiler, ROOT / "include", package / "_declarations.py")


def main():
    binary, library, compiler, name = sys.argv[1:5]
    os.environ.update(SIDEPATH_LIBRARY=library, SIDEPATH_BINARY=binary, SIDEPATH_CC=compiler)
    with tempfile.TemporaryDirectory() as folder:
        put_together(folder, compiler)
        sys.path.insert(0, folder)
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
        result = unittest.TextTestRunner(verbosity=1).run(suite)
    print("%s: cffi %s, numpy %s" % (name, cffi.__version__, numpy.__version__))
    sys.exit(not result.wasSuccessful() or result.testsRun == 0)


if __name__ == "__main__":
    main()
