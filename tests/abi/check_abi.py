#!/usr/bin/env python3
"""Headers that are frozen (tests/abi/MINOR/include) against today's: a host that was compiled
against them must run with today's library. Within one minor version
- a function, struct, field, enumerator or macro never goes away;
- a function keeps its declaration, an enumerator and a macro without parameters their value;
- a field keeps its offset and size; a struct keeps its size, but for one that begins with
  struct_bytes, which may become longer;
- every function stays exported under the node of the minor version.
Where the minor version is another one by now, nothing is compared.
    check_abi.py FROZEN_INCLUDE INCLUDE CC NM LIBRARY.so...
    check_abi.py --self-test CC NM"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """#include <stddef.h>
#include <stdio.h>
%s
#define SIZE_OF_FIELD(type, field) sizeof(((type *)0)->field)
int main(void)
{
%s
    return 0;
}
"""


def run(*command, text=None):
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def split_outside(text, separator):
    """Parts of a text between separators that no bracket encloses."""
    parts, depth, part = [], 0, ""
    for symbol in text:
        depth += (symbol in "([{") - (symbol in ")]}")
        if symbol == separator and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += symbol
    return parts + [part]


def field_names(body):
    for declaration in split_outside(body, ";"):
        if not declaration.strip():
            continue
        pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)\s*\(", declaration)
        if pointer:
            yield pointer.group(1)
            continue
        for declarator in split_outside(declaration, ","):
            yield re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", declarator.strip()).group(1)


class Headers:
    """What the headers of one folder declare."""

    def __init__(self, include, cc):
        self.include = include
        self.names = sorted(header.name for header in (include / "sidepath").glob("*.h"))
        self.includes = "\n".join("#include <sidepath/%s>" % name for name in self.names)
        self.cc = [cc, "-std=c17", "-I", str(include)]
        text = run(*self.cc, "-E", "-P", "-DSP_API=SP_API", "-x", "c", "-", text=self.includes)
        self.structs = {
            name: list(field_names(body)) for name, body in
            re.findall(r"\btypedef\s+struct\s+(sp_\w+)\s*\{(.*?)\}\s*sp_\w+\s*;", text, re.S)}
        self.enumerators = [
            re.match(r"\s*(\w+)", part).group(1)
            for body in re.findall(r"\benum\s+(?:sp_\w+\s*)?\{(.*?)\}", text, re.S)
            for part in split_outside(body, ",") if re.match(r"\s*SP_\w+", part)]
        self.functions = {
            re.search(r"\b(sp_\w+)\s*\(", declaration).group(1): " ".join(declaration.split())
            for declaration in re.findall(r"\bSP_API\b([^;{]*);", text)}
        self.macros = {}
        for name in self.names:
            source = (include / "sidepath" / name).read_text()
            source = re.sub(r"/\*.*?\*/", " ", source, flags=re.S)
            for macro, value in re.findall(r"^#define (SP_\w+)((?:\\\n|.)*)$", source, re.M):
                if macro not in ("SP_API", "SP_VERSION_PATCH"):
                    self.macros[macro] = " ".join(value.replace("\\\n", " ").split())

    def minor(self):
        return self.macros["SP_VERSION_MAJOR"], self.macros["SP_VERSION_MINOR"]

    def measure(self, other):
        """{"struct.field": "offset size", "struct": "size", "enumerator": "value"} of what `other`
        has as well."""
        lines = ['    printf("%s %%d\\n", (int)%s);' % (name, name)
                 for name in self.enumerators if name in other.enumerators]
        for struct, fields in self.structs.items():
            if struct not in other.structs:
                continue
            lines.append('    printf("%s %%zu\\n", sizeof(%s));' % (struct, struct))
            lines += ['    printf("%s.%s %%zu %%zu\\n", offsetof(%s, %s), SIZE_OF_FIELD(%s, %s));'
                      % ((struct, field) * 3) for field in fields if field in other.structs[struct]]
        with tempfile.TemporaryDirectory() as folder:
            program = folder + "/measure"
            run(*self.cc, "-x", "c", "-", "-o", program,
                text=PROGRAM % (self.includes, "\n".join(lines)))
            return dict(line.split(" ", 1) for line in run(program).splitlines())


def compare(frozen, today, exported):
    """Sentences about what a host of the frozen headers would stumble over."""
    for name, declaration in frozen.functions.items():
        if name not in today.functions:
            yield "%s is not declared any more" % name
        elif today.functions[name] != declaration:
            yield "%s was `%s`, is `%s`" % (name, declaration, today.functions[name])
        if not exported.get(name, "").endswith("_" + ".".join(frozen.minor())):
            yield "%s is not exported under the minor version's node" % name
    for name, value in frozen.macros.items():
        if name not in today.macros or (today.macros[name] != value and value[:1] != "("):
            yield "the macro %s was %s, is %s" % (name, value, today.macros.get(name, "gone"))
    for name in set(frozen.enumerators) - set(today.enumerators):
        yield "the enumerator %s is gone" % name
    for struct, fields in frozen.structs.items():
        if struct not in today.structs:
            yield "the struct %s is gone" % struct
        for field in fields:
            if struct in today.structs and field not in today.structs[struct]:
                yield "%s.%s is gone" % (struct, field)
    now = today.measure(frozen)
    for name, before in frozen.measure(today).items():
        grows = name in frozen.structs and frozen.structs[name][0] == "struct_bytes" \
            and int(now[name]) > int(before)
        if now[name] != before and not grows:
            yield "%s was at or of %s, is %s" % (name, before, now[name])


def exported_symbols(nm, libraries):
    """{function: version node}"""
    symbols = {}
    for library in libraries:
        for line in run(nm, "-D", "--defined-only", library).splitlines():
            name, _, node = line.split()[-1].partition("@@")
            symbols[name] = node
    return symbols


def check(include, frozen_include, cc, exported):
    frozen, today = Headers(frozen_include, cc), Headers(include, cc)
    assert frozen.functions and frozen.structs and frozen.enumerators and frozen.macros
    if frozen.minor() != today.minor():
        return frozen, []
    return frozen, sorted(compare(frozen, today, exported))


GOOD = """#include <stddef.h>
#ifndef SP_API
#define SP_API
#endif
#define SP_VERSION_MAJOR 0
#define SP_VERSION_MINOR 2
#define SP_VERSION_PATCH 0
#define SP_LIMIT 7 /* of something */
#define SP_KINDS(X) \\
    X(SP_KIND_A) \\
    X(SP_KIND_B)
typedef enum sp_kind {
#define SP_ONE(name) name,
    SP_KINDS(SP_ONE)
#undef SP_ONE
} sp_kind;
typedef struct sp_view {
    size_t struct_bytes;
    int a, *b; /* two */
    void (*call)(void *user, int n);
    char text[16];
} sp_view;
typedef struct sp_pair {
    int first, second;
} sp_pair;
SP_API int sp_one(int a,
                  const sp_view *view);
SP_API void sp_two(void);
"""
CHANGES = [
    ("    char text[16];\n", "    char text[16];\n    int more;\n", []),
    ("SP_API void sp_two(void);", "SP_API void sp_two(void);\nSP_API void sp_three(void);", []),
    ("    X(SP_KIND_B)", "    X(SP_KIND_B) \\\n    X(SP_KIND_C)", []),
    ("#define SP_VERSION_PATCH 0", "#define SP_VERSION_PATCH 9", []),
    ("#define SP_VERSION_MINOR 2", "#define SP_VERSION_MINOR 3\n#define SP_LIMIT 8", []),
    ("SP_API void sp_two(void);", "", ["sp_two is not declared any more"]),
    ("int sp_one(int a,", "long sp_one(int a,", ["sp_one was"]),
    ("#define SP_LIMIT 7", "#define SP_LIMIT 8", ["the macro SP_LIMIT was 7, is 8"]),
    ("int a, *b;", "int *b, a;", ["sp_view.a was", "sp_view.b was"]),
    ("    char text[16];\n", "", ["sp_view was", "sp_view.text is gone"]),
    ("char text[16];", "char text[8];", ["sp_view was", "sp_view.text was"]),
    ("int first, second;", "int first, second, third;", ["sp_pair was at or of 8, is 12"]),
    ("} sp_pair;", "} sp_other;", ["the struct sp_pair is gone"]),
    ("    X(SP_KIND_A) \\\n", "", ["SP_KIND_B was at or of 1, is 0", "the enumerator SP_KIND_A"]),
]


def self_test(cc, nm):
    exported = {"sp_one": "SIDEPATH_0.2", "sp_two": "SIDEPATH_0.2"}
    with tempfile.TemporaryDirectory() as folder:
        for side in "frozen", "today":
            Path(folder, side, "sidepath").mkdir(parents=True)
        frozen, today = Path(folder, "frozen"), Path(folder, "today")
        (frozen / "sidepath" / "a.h").write_text(GOOD)
        for before, after, want in CHANGES:
            assert before in GOOD, before
            text = GOOD.replace(before, after)
            if "} sp_other;" in text:
                text = text.replace("typedef struct sp_pair", "typedef struct sp_other")
            (today / "sidepath" / "a.h").write_text(text)
            _, problems = check(today, frozen, cc, exported)
            assert len(problems) == len(want), (after, problems)
            for problem, start in zip(problems, want):
                assert problem.startswith(start), (after, problems)
        (today / "sidepath" / "a.h").write_text(GOOD)
        for symbols in {"sp_one": "SIDEPATH_0.2"}, {**exported, "sp_two": "SIDEPATH_0.3"}:
            _, problems = check(today, frozen, cc, symbols)
            assert problems == ["sp_two is not exported under the minor version's node"], problems
        script, library = Path(folder, "map"), Path(folder, "a.so")
        script.write_text("SIDEPATH_0.2 { global: sp_one; local: *; };")
        run(cc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library),
            "-Wl,--version-script=%s" % script, text="int sp_one(void) { return 1; }")
        assert exported_symbols(nm, [library])["sp_one"] == "SIDEPATH_0.2"
    print("check_abi: %d changes are told apart" % (len(CHANGES) + 2))


def main():
    if sys.argv[1] == "--self-test":
        self_test(*sys.argv[2:4])
        return 0
    frozen_include, include, cc, nm = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:5]
    frozen, problems = check(include, frozen_include, cc, exported_symbols(nm, sys.argv[5:]))
    for problem in problems:
        print(problem, file=sys.stderr)
    print("check_abi: %d functions, %d structs, %d enumerators, %d macros, %d problems" %
          (len(frozen.functions), len(frozen.structs), len(frozen.enumerators),
           len(frozen.macros), len(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
