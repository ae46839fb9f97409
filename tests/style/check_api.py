#!/usr/bin/env python3
"""The public headers against the libraries and the tests:
- every function that a header declares with SP_API is exported from its shared library, under the
  node of the minor version, and the static engine has it, too;
- the shared libraries export nothing else, but for what internal headers declare with SP_PRIVATE,
  under a node of the whole version;
- every one is called by some test, but for those in uncalled.txt: that list may only shrink, so a
  name in it that is called, or that no header declares, is a problem too.
    check_api.py ROOT NM LIBSIDEPATH.so [LIBSIDEPATH_ENGINE.so LIBSIDEPATH_ENGINE.a]
    check_api.py --self-test"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import c_source

UNCALLED = Path(__file__).with_name("uncalled.txt")
ENGINE_HEADERS = {"engine.h"}
DECLARED = r"\b%s\b[^;{]*?\b(sp_\w+)\s*\("


def declared_functions(folder, mark="SP_API", pattern="*.h"):
    """{function: header name}"""
    functions = {}
    for header in sorted(folder.glob(pattern)):
        text = c_source.code_only(header.read_text(encoding="utf-8"))
        for name in re.findall(DECLARED % mark, text):
            functions[name] = header.name
    return functions


def version(root):
    """("0.2", "0.2.0")"""
    text = (root / "include" / "sidepath" / "version.h").read_text()
    numbers = re.findall(r"^#define SP_VERSION_[A-Z]+ +(\d+)$", text, re.M)
    return ".".join(numbers[:2]), ".".join(numbers)


def called_functions(folder):
    names = set()
    for file in folder.rglob("*.c"):
        if "consumer" not in file.parts:
            names |= {name for _, name in c_source.calls(file.read_text(encoding="utf-8"))}
    return names


def symbols(nm, library):
    """{name: its version node, or ""}"""
    options = ["-D"] if ".so" in library else ["-g"]
    output = subprocess.run([nm, *options, "--defined-only", library], check=True, text=True,
                            capture_output=True).stdout
    lines = [line.split() for line in output.splitlines()]
    return {name: node for line in lines if len(line) == 3 and line[1] != "A"
            for name, _, node in [line[2].partition("@@")]}


def compare_exports(declared, exported):
    """Sentences about the difference; both are {name: node}."""
    for name, node in sorted(declared.items()):
        if name not in exported:
            yield "%s is not exported" % name
        elif exported[name] != node:
            yield "%s is exported under %s, not %s" % (name, exported[name] or "no node", node)
    for name in sorted(set(exported) - set(declared)):
        yield "%s is exported, but no header declares it" % name


def compare_calls(declared, called, excused=frozenset()):
    for name in sorted(excused):
        if name in called or name not in declared:
            yield "uncalled.txt: %s has no place in it any more" % name
    for name in sorted(declared):
        if name not in called and name not in excused:
            yield "%s: no test calls %s" % (declared[name], name)


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "a.h").write_text("SP_API int\nsp_one(int a);\n/* SP_API int sp_no(void); */\n"
                                  "SP_API const char *sp_two(void);\n#define SP_API x\n")
        (root / "b.h").write_text("SP_PRIVATE void *sp_three(void);\n")
        (root / "test.c").write_text('f(sp_one(1)); "sp_no("; /* sp_two() */\n')
        declared, called = declared_functions(root), called_functions(root)
        private = declared_functions(root, "SP_PRIVATE")
        (root / "include" / "sidepath").mkdir(parents=True)
        (root / "include" / "sidepath" / "version.h").write_text(
            "#define SP_VERSION_MAJOR 1\n#define SP_VERSION_MINOR  20\n"
            "#define SP_VERSION_PATCH 3\n#define SP_VERSION_TEXT 4 5\n")
        assert version(root) == ("1.20", "1.20.3"), version(root)
    assert declared == {"sp_one": "a.h", "sp_two": "a.h"}, declared
    assert private == {"sp_three": "b.h"}, private
    assert "sp_one" in called and "sp_two" not in called, called
    both = {"sp_one": "N", "sp_two": "P"}
    assert not list(compare_exports(both, dict(both)))
    assert list(compare_exports(both, {"sp_one": "N"})) == ["sp_two is not exported"]
    assert list(compare_exports(both, {"sp_one": "P", "sp_two": ""})) == [
        "sp_one is exported under P, not N", "sp_two is exported under no node, not P"]
    assert list(compare_exports(both, {**both, "sp_three": "N"})) == [
        "sp_three is exported, but no header declares it"]
    assert not list(compare_calls(declared, called | {"sp_two"}))
    assert list(compare_calls(declared, called)) == ["a.h: no test calls sp_two"]
    assert not list(compare_calls(declared, called, {"sp_two"}))
    assert list(compare_calls(declared, called | {"sp_two"}, {"sp_two", "sp_old"})) == [
        "uncalled.txt: sp_old has no place in it any more",
        "uncalled.txt: sp_two has no place in it any more"]
    print("check_api: 6 ways to break the rules are found")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root, nm, libraries = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    declared = declared_functions(root / "include" / "sidepath")
    minor, whole = version(root)
    library = {name: "SIDEPATH_" + minor for name, header in declared.items()
               if header not in ENGINE_HEADERS}
    private = declared_functions(root / "src", "SP_PRIVATE", "**/*.h")
    library.update((name, "SIDEPATH_PRIVATE_" + whole) for name in private)
    engine = {name: "SIDEPATH_ENGINE_" + minor for name, header in declared.items()
              if header in ENGINE_HEADERS}
    problems = list(compare_exports(library, symbols(nm, libraries[0])))
    if len(libraries) > 1:
        problems += compare_exports(engine, symbols(nm, libraries[1]))
        problems += ["the static engine lacks " + name
                     for name in sorted(set(engine) - set(symbols(nm, libraries[2])))]
    problems += compare_calls(declared, called_functions(root / "tests"),
                              set(UNCALLED.read_text().split()))
    for problem in problems:
        print(problem, file=sys.stderr)
    print("check_api: %d functions, %d problems" % (len(declared), len(problems)))
    return 1 if problems or not declared else 0


if __name__ == "__main__":
    sys.exit(main())
