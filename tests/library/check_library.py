#!/usr/bin/env python3
"""The tests of the whole library against the public headers:
- test_misuse*.c refuses every function that returns a status, and gives each of its pointers NULL
  once, but for those in null_allowed.txt, which says why;
- test_struct_sizes.c has a row for every struct that begins with struct_bytes, but for those that
  the library owns, which null_allowed.txt names as well.
Both lists may only hold what is true: a line without a reason to be there is a problem.
    check_library.py ROOT
    check_library.py --self-test"""

import re
import sys
from pathlib import Path

ALLOWED = "tests/library/null_allowed.txt"
REFUSED = re.compile(r"\bREFUSED\(\s*SP_\w+,\s*\"[^\"]*\",\s*(sp_\w+)\(")
FUNCTION = re.compile(r"\bSP_API\s+sp_status\s+(sp_\w+)\s*\(([^;{]*)\)\s*;")
STRUCT = re.compile(r"\btypedef\s+struct\s+(sp_\w+)\s*\{\s*size_t\s+struct_bytes\b")


def without_comments(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def arguments(text, begin):
    """The arguments of a call whose opening bracket is just before `begin`."""
    parts, depth, part = [], 1, ""
    for symbol in text[begin:]:
        depth += (symbol in "([{") - (symbol in ")]}")
        if depth == 0:
            return parts + [part.strip()]
        if symbol == "," and depth == 1:
            parts.append(part.strip())
            part = ""
        else:
            part += symbol
    raise ValueError("a call without an end")


def pointers(parameters):
    """{index: name} of the pointers that a host passes; the error may always be NULL."""
    return {index: re.search(r"(\w+)$", parameter.strip()).group(1)
            for index, parameter in enumerate(parameters.split(","))
            if ("*" in parameter or "_fn " in parameter) and
            not re.search(r"\bsp_error \*error$", parameter.strip())}


def check(headers, misuse, sizes, allowed):
    functions, structs = {}, set()
    for text in headers:
        text = without_comments(text)
        functions.update((name, pointers(its)) for name, its in FUNCTION.findall(text))
        structs.update(STRUCT.findall(text))
    excuses = {" ".join(line.split(":")[0].split()): line.partition(":")[2].strip()
               for line in allowed.splitlines() if line.strip()}
    calls, nulls = set(), set()
    for text in misuse:
        for match in REFUSED.finditer(text):
            name = match.group(1)
            calls.add(name)
            nulls |= {"%s %s" % (name, functions[name][index])
                      for index, argument in enumerate(arguments(text, match.end()))
                      if argument == "NULL" and index in functions.get(name, {})}
    rows = set(re.findall(r"\b(?:TAKEN|GIVEN)\(\s*(sp_\w+)", sizes))
    wanted = {"%s %s" % (name, pointer): "is never NULL in test_misuse"
              for name, its in functions.items() for pointer in its.values()}
    wanted.update((name, "is not refused in test_misuse") for name in functions)
    wanted.update((name, "has no row in test_struct_sizes") for name in structs)
    have = calls | nulls | rows
    for what in sorted(set(wanted) - have - set(excuses)):
        yield "%s %s" % (what, wanted[what])
    for what, reason in sorted(excuses.items()):
        if what not in wanted or what in have or not reason:
            yield "%s has no place, or no reason, in %s" % (what, ALLOWED)


def self_test():
    header = """/* SP_API sp_status sp_no(int *a); */
typedef struct sp_view {
    size_t struct_bytes;
    int a;
} sp_view;
SP_API sp_status sp_one(const sp_view *view, int n,
                        sp_run_fn run, sp_error *error);
SP_API const char *sp_two(const char *text);
"""
    misuse = 'REFUSED(SP_ERR_ARGUMENT, "view",\n    sp_one(NULL, f(1, 2), run, &error));\n'
    run = 'REFUSED(SP_ERR_ARGUMENT, "run", sp_one(&view, 1, NULL, &error));\n'
    sizes = "TAKEN(sp_view, a),"
    assert not list(check([header], [misuse, run], sizes, ""))
    assert not list(check([header], [misuse], sizes, "sp_one run: it means the caller\n"))
    assert list(check([header], [misuse], sizes, "")) == [
        "sp_one run is never NULL in test_misuse"]
    assert list(check([header], [], sizes, "sp_one run: x\nsp_one view: x")) == [
        "sp_one is not refused in test_misuse"]
    assert list(check([header], [misuse, run], "", "")) == [
        "sp_view has no row in test_struct_sizes"]
    for excuse in "sp_one run: it is checked", "sp_gone: it was there", "sp_one error: any":
        assert len(list(check([header], [misuse, run], sizes, excuse))) == 1, excuse
    assert len(list(check([header], [misuse], sizes, "sp_one run:"))) == 1
    print("check_library: 7 ways to break the rules are found")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root = Path(sys.argv[1])
    headers = [path.read_text() for path in sorted((root / "include/sidepath").glob("*.h"))]
    tests = root / "tests/library"
    problems = list(check(headers, [path.read_text() for path in tests.glob("test_misuse*.c")],
                          (tests / "test_struct_sizes.c").read_text(),
                          (root / ALLOWED).read_text()))
    for problem in problems:
        print(problem, file=sys.stderr)
    print("check_library: %d headers, %d problems" % (len(headers), len(problems)))
    return 1 if problems or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
