#!/usr/bin/env python3
"""The public headers against the libraries and the tests:
- every function that a header declares with SP_API is in its library;
- the shared library exports nothing else;
- every one is called by some test, but for those in uncalled.txt: that list may only shrink, so a
  name in it that is called, or that no header declares, is a problem too.
    check_api.py ROOT NM LIBSIDEPATH.so [LIBSIDEPATH_ENGINE.a]
    check_api.py --self-test"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import c_source

UNCALLED = Path(__file__).with_name("uncalled.txt")
ENGINE_HEADERS = {"engine.h"}
DECLARED = re.compile(r"\bSP_API\b[^;{]*?\b(sp_\w+)\s*\(")


def declared_functions(folder):
    """{function: header name}"""
    functions = {}
    for header in sorted(folder.glob("*.h")):
        text = c_source.code_only(header.read_text(encoding="utf-8"))
        for name in DECLARED.findall(text):
            functions[name] = header.name
    return functions


def called_functions(folder):
    names = set()
    for file in folder.rglob("*.c"):
        if "consumer" not in file.parts:
            names |= {name for _, name in c_source.calls(file.read_text(encoding="utf-8"))}
    return names


def symbols(nm, library):
    options = ["-D"] if ".so" in library else ["-g"]
    output = subprocess.run([nm, *options, "--defined-only", library], check=True, text=True,
                            capture_output=True).stdout
    return {line.split()[2] for line in output.splitlines() if len(line.split()) == 3}


def compare(declared, exported, engine, called, excused=frozenset()):
    """Sentences about what does not fit; `engine` is None for a build without one."""
    for name in sorted(excused):
        if name in called or name not in declared:
            yield "uncalled.txt: %s has no place in it any more" % name
    for name, header in sorted(declared.items()):
        if header in ENGINE_HEADERS:
            if engine is not None and name not in engine:
                yield "%s: %s is not in the engine's library" % (header, name)
        elif name not in exported:
            yield "%s: %s is not in the shared library" % (header, name)
        if name not in called and name not in excused:
            yield "%s: no test calls %s" % (header, name)
    for name in sorted(exported - set(declared)):
        yield "the shared library exports %s, which no header declares" % name


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "a.h").write_text("SP_API int\nsp_one(int a);\n/* SP_API int sp_no(void); */\n"
                                  "SP_API const char *sp_two(void);\n#define SP_API x\n")
        (root / "engine.h").write_text("SP_API void sp_engine_go(void);\n")
        (root / "test.c").write_text('f(sp_one(1)); "sp_no("; /* sp_two() */ sp_engine_go();\n')
        declared, called = declared_functions(root), called_functions(root)
    assert declared == {"sp_one": "a.h", "sp_two": "a.h", "sp_engine_go": "engine.h"}, declared
    assert called >= {"sp_one", "sp_engine_go"} and "sp_two" not in called, called
    all_called = called | {"sp_two"}
    both = {"sp_one", "sp_two"}
    assert not list(compare(declared, both, {"sp_engine_go"}, all_called))
    assert not list(compare(declared, both, None, all_called))
    assert list(compare(declared, both, None, called)) == ["a.h: no test calls sp_two"]
    assert list(compare(declared, {"sp_one"}, None, all_called)) == [
        "a.h: sp_two is not in the shared library"]
    assert list(compare(declared, both, set(), all_called)) == [
        "engine.h: sp_engine_go is not in the engine's library"]
    assert list(compare(declared, both | {"sp_three"}, None, all_called)) == [
        "the shared library exports sp_three, which no header declares"]
    assert not list(compare(declared, both, None, called, {"sp_two"}))
    assert list(compare(declared, both, None, all_called, {"sp_two", "sp_old"})) == [
        "uncalled.txt: sp_old has no place in it any more",
        "uncalled.txt: sp_two has no place in it any more"]
    print("check_api: 6 ways to break the rules are found")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root, nm, shared = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    engine = symbols(nm, sys.argv[4]) if len(sys.argv) > 4 else None
    declared = declared_functions(root / "include" / "sidepath")
    problems = list(compare(declared, symbols(nm, shared), engine,
                            called_functions(root / "tests"),
                            set(UNCALLED.read_text().split())))
    for problem in problems:
        print(problem, file=sys.stderr)
    print("check_api: %d functions, %d problems" % (len(declared), len(problems)))
    return 1 if problems or not declared else 0


if __name__ == "__main__":
    sys.exit(main())
