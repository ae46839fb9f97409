"""What cffi believes of every struct, enumerator and function is what the compiler says."""

import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import make_declarations
import sidepath
from fixtures import ROOT
from sidepath import _library
from sidepath._declarations import ffi

CC = os.environ["SIDEPATH_CC"]


def structs():
    """The library's structs whose fields are known, and those fields."""
    for name in ffi.list_types()[0]:
        if not name.startswith("sp_") or ffi.typeof(name).kind != "struct":
            continue
        try:
            ffi.sizeof(name)
        except ffi.error:
            continue  # opaque
        yield name, [field for field, _ in ffi.typeof(name).fields]


def enumerators():
    for name in ffi.list_types()[0]:
        if ffi.typeof(name).kind == "enum":
            yield from ffi.typeof(name).relements.items()


def as_cffi_has_it():
    lines = {}
    for name, fields in structs():
        lines[name] = ffi.sizeof(name)
        for field in fields:
            lines["%s.%s" % (name, field)] = ffi.offsetof(name, field)
    return {**lines, **dict(enumerators())}


def as_the_compiler_has_it(include):
    """The same numbers, printed by a program that includes these headers."""
    rows = []
    for name, fields in structs():
        rows.append('P("%s", sizeof(%s));' % (name, name))
        rows += ['P("%s.%s", offsetof(%s, %s));' % (name, field, name, field) for field in fields]
    rows += ['P("%s", %s);' % (name, name) for name, _ in enumerators()]
    headers = sorted(path.name for path in (include / "sidepath").glob("*.h"))
    source = "".join("#include <sidepath/%s>\n" % name for name in headers) + (
        "#include <stddef.h>\n#include <stdio.h>\n"
        '#define P(name, value) printf("%%s %%lld\\n", name, (long long)(value))\n'
        "int main(void)\n{\n%s\nreturn 0;\n}\n" % "\n".join(rows))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "layout"
        subprocess.run([CC, "-std=c17", "-w", "-I", str(include), "-x", "c", "-", "-o",
                        str(program)], input=source, text=True, check=True)
        printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in map(str.split, printed.splitlines())}


class Declarations(unittest.TestCase):
    def test_layouts_and_enumerators(self):
        have = as_cffi_has_it()
        self.assertGreater(len(list(structs())), 50)
        self.assertEqual(have, as_the_compiler_has_it(ROOT / "include"))

    def test_a_changed_struct_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            include = Path(folder) / "include"
            shutil.copytree(ROOT / "include", include)
            header = include / "sidepath/route.h"
            text = header.read_text()
            changed = text.replace("    int32_t n_rows;        /* >= 1 */",
                                   "    int64_t n_rows;        /* >= 1 */")
            self.assertNotEqual(text, changed)
            header.write_text(changed)
            other = as_the_compiler_has_it(include)
            have = as_cffi_has_it()
            self.assertEqual({name for name in have if have[name] != other[name]},
                             {"sp_route_span", "sp_route_span.scale"})
            # And what is made from those headers follows them.
            out = Path(folder) / "_other.py"
            make_declarations.write(CC, include, out)
            space = {}
            exec(out.read_text(), space)  # pylint: disable=exec-used
            self.assertEqual(space["ffi"].sizeof("sp_route_span"), other["sp_route_span"])

    def test_functions(self):
        headers = "".join(path.read_text() for path in (ROOT / "include/sidepath").glob("*.h"))
        names = set(re.findall(r"\bSP_API\b[^;(]*?\b(sp_\w+)\s*\(", headers))
        self.assertGreater(len(names), 200)
        for name in sorted(names):
            self.assertEqual(ffi.typeof(getattr(_library.lib, name)).kind, "function", name)

    def test_version(self):
        numbers = [int(word) for word in sidepath.__version__.split(".")]
        self.assertEqual(_library.VERSION, numbers[0] * 10000 + numbers[1] * 100 + numbers[2])
        self.assertEqual(_library.lib.sp_library_version(), _library.VERSION)

    def test_other_versions_are_refused(self):
        was = _library.VERSION
        try:
            for other in was + 1, was + 100, was - 100:
                _library.VERSION = other
                with self.assertRaisesRegex(ImportError, "install both from one"):
                    _library._load()
        finally:
            _library.VERSION = was

    def test_no_library(self):
        found = os.environ.pop("SIDEPATH_LIBRARY")
        try:
            with self.assertRaisesRegex(ImportError, "SIDEPATH_LIBRARY"):
                _library._find()
            os.environ["SIDEPATH_LIBRARY"] = __file__
            with self.assertRaisesRegex(ImportError, "cannot be loaded"):
                _library._load()
        finally:
            os.environ["SIDEPATH_LIBRARY"] = found


if __name__ == "__main__":
    unittest.main()
