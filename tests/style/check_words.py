#!/usr/bin/env python3
"""The field's words: comments and names say what docs/GLOSSARY.md says. HELD lists the folders that
have got there; no word of the table may come back in them. A folder that is not listed is not
looked at yet.
    check_words.py [ROOT]
    check_words.py --self-test"""

import re
import sys
import tempfile
from pathlib import Path

import c_source

HELD = (
    "bench", "examples", "include", "src/adapter", "src/base", "src/chat", "src/checkpoint",
    "src/cli", "src/delta", "src/device", "src/engine", "src/kernels", "src/pool", "src/route",
    "src/server", "src/stage",
)
SUFFIXES = {".c", ".h", ".cu", ".cuh"}
SHOWN_MAX = 50

# Of comments: what may not be said, and what is said instead.
WORDS = (
    (r"behind", "after"),
    (r"ask(?:s|ed|ing)? for", "prefetches, loads, requests or requires"),
    (r"lies?|lying", "is, is stored"),
    (r"stands?|standing|stood", "is, follows, represents"),
    (r"turned over|turns? over", "transposed"),
    (r"get(?:s|ting)? on|got on", "continues"),
    (r"(?:held|holds?|holding) against", "compared with, checked against"),
    (r"under way", "in progress, in flight"),
    (r"by turns", "round-robin, alternating"),
    (r"no bank twice", "no bank conflicts"),
    (r"planes?", "split-K partials"),
    (r"trades?", "warp role"),
    (r"leaders?", "producer"),
)
# Parts of names, between underscores.
NAMES = {
    "plane": "partial", "planes": "partials", "leader": "producer", "trade": "role",
}
# The same in the kernels alone: elsewhere a note is on a receipt, and a client is turned away.
KERNEL_NAMES = {"note": "desc, or a verb", "notes": "descs", "noted": "described",
                "turned": "transposed"}

COMMENT = re.compile(r"\b(?:%s)\b" % "|".join("(?P<w%d>%s)" % (i, word) for i, (word, _) in
                                              enumerate(WORDS)), re.IGNORECASE)
NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def line_of(lines, offset):
    """The line that holds this character of the lines, joined by blanks."""
    for number, line in lines:
        if offset <= len(line):
            return number
        offset -= len(line) + 1
    return lines[-1][0]


def wrong_words(text):
    """(line, word, what is said instead); a line's break divides no phrase."""
    for lines in c_source.comments(text):
        joined = " ".join(line for _, line in lines)
        for match in COMMENT.finditer(joined):
            instead = WORDS[int(match.lastgroup[1:])][1]
            yield line_of(lines, match.start()), match.group(0), instead


def wrong_names(text, more):
    names = dict(NAMES, **more)
    for match in NAME.finditer(c_source.without_comments(text)):
        for part in match.group(0).lower().split("_"):
            if part in names:
                line = text.count("\n", 0, match.start()) + 1
                yield line, match.group(0), names[part]


def problems_of(root, held):
    for folder in held:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            path = file.relative_to(root).as_posix()
            text = file.read_text(encoding="utf-8")
            for line, word, instead in wrong_words(text):
                yield path, line, "a comment says \"%s\"; say: %s" % (word, instead)
            more = KERNEL_NAMES if folder == "src/kernels" else {}
            for line, name, instead in wrong_names(text, more):
                yield path, line, "the name %s; say: %s" % (name, instead)


SELF_TEST_GOOD = {
    "src/pool/good.c": "/* A note after it; stages believe. */\n"
                       "static const char t[] = \"behind\";\nint note, partial;\n",
    "src/kernels/good.cu": "/* denote, explanation, outstanding */\nint denote; // producer\n",
    "src/other/open.c": "/* It lies behind. */\n",
}
SELF_TEST_BAD = (
    ("src/pool/after.c", "/* What comes\n * behind it. */\n", 2, "\"behind\"; say: after"),
    ("src/pool/line.c", "int a; // it Stands here\n", 1, "say: is, follows"),
    ("src/pool/two.c", "int a;\n/* The line that is asked\n * for. */\n", 2, "prefetches"),
    ("src/pool/over.c", "/* a matrix, turned over */\n", 1, "say: transposed"),
    ("src/pool/name.c", "void a(void);\nint n_planes;\n", 2, "the name n_planes"),
    ("src/kernels/note.cu", "int write_note(void);\n", 1, "the name write_note"),
    ("src/kernels/bank.cuh", "/* rows: no bank twice */\n", 1, "no bank conflicts"),
)
# Every row of WORDS, in some form of it.
SELF_TEST_SAID = (
    "behind", "asked for", "asks for", "lies", "lie", "stands", "stood", "turned over", "gets on",
    "got on", "held against", "holds against", "under way", "by turns", "no bank twice", "plane",
    "planes", "trade", "leader",
)


def self_test():
    def put(root, name, text):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    held = ("src/pool", "src/kernels")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in SELF_TEST_GOOD.items():
            put(root, name, text)
        assert not list(problems_of(root, held)), list(problems_of(root, held))
        for name, text, line, want in SELF_TEST_BAD:
            put(root, name, text)
            found = list(problems_of(root, held))
            assert len(found) == 1 and found[0][0] == name and found[0][1] == line and \
                want in found[0][2], (name, found)
            (root / name).unlink()
    found = [list(wrong_words("/* It %s this. */" % said)) for said in SELF_TEST_SAID]
    assert all(len(one) == 1 for one in found), found
    assert {one[0][2] for one in found} == {instead for _, instead in WORDS}, found
    print("check_words: %d ways to say it otherwise are found" %
          (len(SELF_TEST_BAD) + len(SELF_TEST_SAID)))


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    missing = [folder for folder in HELD if not (root / folder).is_dir()]
    problems = [(folder, 1, "is held, but is not there") for folder in missing]
    problems += problems_of(root, HELD)
    for path, line, text in problems[:SHOWN_MAX]:
        print("%s:%d: %s" % (path, line, text), file=sys.stderr)
    print("check_words: %d folders, %d problems" % (len(HELD), len(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
