#!/usr/bin/env python3
"""The style that a machine can check. The rules are the functions named rule_*; each yields
(path, line, text). --self-test proves that every rule can fail; --fix-format formats the C files;
--update-ratchet writes the ratchet anew (look at the difference: it may only go down)."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import c_source

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
RATCHET = "tests/style/ratchet.json"

C_SUFFIXES = {".c", ".h", ".cu", ".cuh"}
SCRIPT_SUFFIXES = {".py", ".sh", ".cmake"}
TEXT_SUFFIXES = C_SUFFIXES | SCRIPT_SUFFIXES | {".md", ".json", ".in", ".txt", ".yml", ""}
LEFT_OUT = ("tests/fixtures/", "tests/fuzz/corpus/", "demo/", "build/", ".git/", ".cache/",
            "__pycache__/")

NEVER_CALLED = {
    "strcpy", "strcat", "sprintf", "vsprintf", "gets", "strtok", "alloca", "atoi", "atol", "atoll",
    "atof", "scanf", "sscanf", "fscanf", "tmpnam", "mktemp",
}
ALLOCATION = {
    "malloc", "calloc", "realloc", "reallocarray", "free", "strdup", "strndup", "aligned_alloc",
    "posix_memalign", "memalign", "valloc", "asprintf", "vasprintf", "getline",
}
ENVIRONMENT = {"getenv", "secure_getenv", "setenv", "putenv", "unsetenv"}
ENDING = {"exit", "_exit", "_Exit", "quick_exit", "abort", "assert"}


def tree_files(root):
    """Paths (relative, posix) of the files that the rules are about."""
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root).as_posix()
        if path == ".git" or any(path.startswith(part) or "/" + part in path for part in LEFT_OUT):
            continue
        if file.is_file() and not file.is_symlink() and file.suffix in TEXT_SUFFIXES:
            yield path


def is_c(path):
    return Path(path).suffix in C_SUFFIXES


def is_script(path):
    name = Path(path).name
    return Path(path).suffix in SCRIPT_SUFFIXES or name == "CMakeLists.txt"


# ---- rules --------------------------------------------------------------------------------------


def rule_columns(path, text):
    if is_c(path) or is_script(path):
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > COLUMNS_MAX:
                yield path, number, "%d columns; at most %d" % (len(line), COLUMNS_MAX)


def rule_blanks(path, text):
    if is_c(path) or is_script(path):
        for number, line in enumerate(text.split("\n"), 1):
            if line != line.rstrip():
                yield path, number, "blanks at the end of the line"
            if "\t" in line:
                yield path, number, "a tab"
        if text and not text.endswith("\n"):
            yield path, text.count("\n") + 1, "no newline at the end of the file"


def rule_calls(path, text):
    """Calls that are banned everywhere, or outside the one file that owns them."""
    if not is_c(path):
        return
    in_src = path.startswith("src/")
    for line, name in c_source.calls(text):
        if name in NEVER_CALLED:
            yield path, line, "%s is banned" % name
        elif in_src and name in ALLOCATION and path != "src/base/alloc.c":
            yield path, line, "%s outside src/base/alloc.c" % name
        elif in_src and name in ENVIRONMENT and path != "src/base/settings.c":
            yield path, line, "%s outside src/base/settings.c" % name
        elif in_src and name in ENDING and not path.startswith("src/cli/"):
            yield path, line, "%s: the library never ends the program" % name


def rule_words(path, text):
    """Open ends, and paths of somebody's machine. The words are spelt so that this file has none
    of them itself."""
    open_ends = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
    machine = re.compile(r"(?<![\w.~}$])/(?:wo" r"rk|ho" r"me|ro" r"ot|mn" r"t)/\w")
    for number, line in enumerate(text.split("\n"), 1):
        if open_ends.search(line):
            yield path, number, "an open end: %s" % open_ends.search(line).group(1)
        if machine.search(line):
            yield path, number, "a path of one machine"


def rule_unique_names(paths):
    seen = {}
    for path in paths:
        if path.startswith(("src/", "include/")) and is_c(path):
            name = Path(path).name
            if name in seen:
                yield path, 1, "the name %s is taken by %s" % (name, seen[name])
            seen.setdefault(name, path)


def long_functions(root, paths):
    """{path: number of functions above FUNCTION_LINES_MAX lines}, and a list of them."""
    counts, listed = {}, []
    for path in paths:
        if not is_c(path):
            continue
        text = (root / path).read_text(encoding="utf-8")
        for line, n, name in c_source.functions(text):
            if n > FUNCTION_LINES_MAX:
                counts[path] = counts.get(path, 0) + 1
                listed.append((path, line, "%s has %d lines" % (name, n)))
    return counts, listed


def rule_ratchet(root, paths):
    """A file may have as many long functions as the ratchet says: never more, and when it has
    fewer, the ratchet goes down with it."""
    file = root / RATCHET
    allowed = json.loads(file.read_text()) if file.is_file() else {}
    counts, listed = long_functions(root, paths)
    for path in sorted(set(counts) | set(allowed)):
        now, most = counts.get(path, 0), allowed.get(path, 0)
        if now > most:
            for entry in listed:
                if entry[0] == path:
                    yield path, entry[1], entry[2] + "; at most %d" % FUNCTION_LINES_MAX
        elif now < most:
            yield path, 1, "%d long functions, the ratchet allows %d: lower it with " \
                "--update-ratchet" % (now, most)


def clang_format():
    for name in ("clang-format-14", "clang-format"):
        if shutil.which(name):
            version = subprocess.run([name, "--version"], capture_output=True, text=True,
                                     check=True).stdout
            if re.search(r"version 14\.", version):
                return name
    return None


def rule_format(root, paths):
    program = clang_format()
    if not program:
        yield ".clang-format", 1, "clang-format 14 is not installed"
        return
    files = [str(root / path) for path in paths if is_c(path)]
    result = subprocess.run([program, "--dry-run", "-Werror", "--style=file"] + files,
                            capture_output=True, text=True, check=False)
    if result.returncode != 0:
        found = False
        for match in re.finditer(r"^(.*?):(\d+):\d+: error: (.*)$", result.stderr, re.MULTILINE):
            found = True
            name = Path(match.group(1))
            path = name.relative_to(root).as_posix() if name.is_absolute() else str(name)
            yield path, int(match.group(2)), "not formatted: run make format"
        if not found:
            yield ".clang-format", 1, result.stderr.strip()


# ---- running them -------------------------------------------------------------------------------


def check_tree(root):
    paths = list(tree_files(root))
    problems = []
    for path in paths:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            problems.append((path, 1, "not UTF-8"))
            continue
        for rule in (rule_columns, rule_blanks, rule_calls, rule_words):
            problems += rule(path, text)
    problems += rule_unique_names(paths)
    problems += rule_ratchet(root, paths)
    problems += rule_format(root, paths)
    return problems, paths


SELF_TEST_GOOD = {
    "src/base/alloc.c": "void *take(void)\n{\n    return malloc(1);\n}\n",
    "src/pool/good.c": "/* never strcpy( here */\nstatic const char text[] = \"gets(line)\";\n\n"
                       "void drop(struct table *table)\n{\n    table->free(table);\n"
                       "    sp_free(table);\n}\n",
    "src/cli/main.c": "int main(void)\n{\n    exit(0);\n}\n",
    "tests/pool/test_good.c": "void test(void)\n{\n    free(malloc(1));\n}\n",
}
LONG_BODY = "{\n" + "    step();\n" * 70 + "}\n"
SELF_TEST_BAD = {
    "src/pool/columns.c": ("/* " + "x" * 100 + " */\n", 1, "columns"),
    "src/pool/blanks.c": ("int a; \n", 1, "blanks"),
    "tools/tab.py": ("if 1:\n\tpass\n", 2, "a tab"),
    "tools/newline.py": ("pass", 1, "no newline"),
    "src/pool/copy.c": ("void f(char *a)\n{\n    strcpy(a, a);\n}\n", 3, "strcpy is banned"),
    "tests/pool/test_copy.c": ("int n(char *a)\n{\n    return atoi(a);\n}\n", 3, "atoi is banned"),
    "src/pool/macro.c": ("#define JOIN(a, b) strcat(a, b)\n", 1, "strcat is banned"),
    "src/pool/memory.c": ("void f(void *a)\n{\n    free(a);\n}\n", 3, "outside src/base/alloc.c"),
    "src/pool/variable.c": ("char *f(void)\n{\n    return getenv(\"A\");\n}\n", 3, "settings.c"),
    "src/pool/ending.c": ("void f(void)\n{\n    abort();\n}\n", 3, "never ends the program"),
    "docs/OPEN.md": ("This is TO" "DO.\n", 1, "an open end"),
    "docs/MACHINE.md": ("See /ho" "me/me/file.\n", 1, "a path of one machine"),
    "src/route/good.c": ("int a;\n", 1, "is taken by"),
    "src/pool/long.c": ("void f(void)\n" + LONG_BODY, 1, "f has 73 lines"),
    "src/pool/split.c": ("int a;\n\nstatic int *f(int (*g)(int),\n              int b)\n" +
                         LONG_BODY, 3, "f has 74 lines"),
    "src/pool/format.c": ("int  a;\n", 1, "not formatted"),
}


def self_test():
    def put(root, name, text):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        put(root, ".clang-format",
            (Path(__file__).resolve().parents[2] / ".clang-format").read_text())
        for name, text in SELF_TEST_GOOD.items():
            put(root, name, text)
        problems, paths = check_tree(root)
        assert not problems, problems
        assert len(paths) >= len(SELF_TEST_GOOD), paths
        for name, (text, line, want) in SELF_TEST_BAD.items():
            put(root, name, text)
            found = [p for p in check_tree(root)[0] if want in p[2]]
            assert len(found) == 1 and found[0][1] == line, (name, found, check_tree(root)[0])
            (root / name).unlink()
        put(root, RATCHET, json.dumps({"src/pool/good.c": 1}))
        problems, _ = check_tree(root)
        assert len(problems) == 1 and "lower it" in problems[0][2], problems
    print("check_style: %d ways to break the rules are found" % (len(SELF_TEST_BAD) + 1))


def main():
    root = Path(__file__).resolve().parents[2]
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        self_test()
        return 0
    if arguments == ["--fix-format"]:
        files = [str(root / path) for path in tree_files(root) if is_c(path)]
        return subprocess.run([clang_format() or "clang-format-14", "-i", "--style=file"] + files,
                              check=False).returncode
    if arguments == ["--update-ratchet"]:
        counts, _ = long_functions(root, list(tree_files(root)))
        (root / RATCHET).write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")
        return 0
    problems, paths = check_tree(root)
    for path, line, text in problems:
        print("%s:%d: %s" % (path, line, text), file=sys.stderr)
    print("check_style: %d files, %d problems" % (len(paths), len(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
