#!/usr/bin/env python3
"""The documents against the tree: every path and link that a document names exists, and every room
of src/ and every public header stands in the README, and every reason code that a call gives is
said in a public header or a document.
    check_docs.py [ROOT]
    check_docs.py --self-test"""

import re
import sys
import tempfile
from pathlib import Path

TOPS = "src|include|tests|tools|docs|demo|examples|cmake|bench|bindings|\\.ci"
PATH = re.compile(r"`((?:%s)(?:/[\w.*<>-]+)*)(?:/)?`" % TOPS)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")

CODE = re.compile(r"\bsp_fail\(\s*\w+,\s*[\w>.-]+,\s*\"([\w-]+)\"")


def documents(root):
    return [root / "README.md"] + sorted((root / "docs").rglob("*.md"))


def named_paths(text):
    """Paths in backquotes; one with a placeholder (<room>) or a star is a pattern, not a path."""
    return [path for path in PATH.findall(text) if not re.search(r"[<>*]", path)]


def reason_codes(root):
    return {code: source.relative_to(root) for source in sorted((root / "src").rglob("*.c"))
            for code in CODE.findall(source.read_text(encoding="utf-8"))}


def unsaid_codes(root):
    texts = documents(root) + sorted((root / "include/sidepath").glob("*.h"))
    said = "".join(path.read_text(encoding="utf-8") for path in texts)
    for code, source in sorted(reason_codes(root).items()):
        if not re.search(r"(?<![\w-])%s(?![\w-])" % re.escape(code), said):
            yield "no header and no document says what `%s` of %s is" % (code, source)


def problems_of(root):
    for document in documents(root):
        if not document.is_file():
            yield "%s is missing" % document.name
            continue
        text = document.read_text(encoding="utf-8")
        for path in named_paths(text):
            if not (root / path).exists():
                yield "%s names %s, which does not exist" % (document.name, path)
        for link in LINK.findall(text):
            if not (document.parent / link).exists():
                yield "%s links to %s, which does not exist" % (document.name, link)
    readme = (root / "README.md").read_text(encoding="utf-8")
    for room in sorted((root / "src").iterdir()):
        if room.is_dir() and any(room.iterdir()) and "`src/%s`" % room.name not in readme:
            yield "README.md does not name src/%s" % room.name
    for header in sorted((root / "include/sidepath").glob("*.h")):
        if "`include/sidepath/%s`" % header.name not in readme:
            yield "README.md does not name include/sidepath/%s" % header.name
    yield from unsaid_codes(root)


def self_test():
    def put(name, text):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        good = "`src/pool` `include/sidepath/pool.h` [more](docs/MORE.md#part) `tests/<room>/x.c`"
        put("src/pool/pool.c", "")
        put("include/sidepath/pool.h", "")
        put("docs/MORE.md", "see `src/pool/pool.c` and [back](../README.md)")
        put("README.md", good)
        assert not list(problems_of(root)), list(problems_of(root))
        bad = {
            good + " `src/gone.c`": "README.md names src/gone.c, which does not exist",
            good + " [x](docs/GONE.md)": "README.md links to docs/GONE.md, which does not exist",
            good.replace("`src/pool`", ""): "README.md does not name src/pool",
            good.replace("`include/sidepath/pool.h`", ""):
                "README.md does not name include/sidepath/pool.h",
        }
        for text, want in bad.items():
            put("README.md", text)
            assert list(problems_of(root)) == [want], (text, list(problems_of(root)))
        put("README.md", good)
        put("src/pool/pool.c", 'return sp_fail(error, SP_ERR_STATE, "slot-on-fire",\n"slot", 0);')
        put("include/sidepath/pool.h", "/* `not-slot-on-fire` */")
        assert list(problems_of(root)) == [
            "no header and no document says what `slot-on-fire` of src/pool/pool.c is"]
        put("include/sidepath/pool.h", "/* SP_ERR_STATE with `slot-on-fire` */")
        assert not list(problems_of(root)), list(problems_of(root))
    print("check_docs: %d ways to break the rules are found" % (len(bad) + 1))


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    found = list(problems_of(root))
    for problem in found:
        print(problem, file=sys.stderr)
    print("check_docs: %d documents, %d problems" % (len(documents(root)), len(found)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
