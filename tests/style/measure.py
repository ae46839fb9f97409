#!/usr/bin/env python3
"""Measures src/ room by room, for the table in docs/ARCHITECTURE.md: files, lines, functions and
their lengths, the share of comments, assertions, and the exported functions of include/. Generated
tables are left out. It judges nothing.

    measure.py [ROOT]
"""

import math
import re
import sys
from pathlib import Path

import c_source
from check_layers import ROOMS, room_of_public
from check_style import is_generated

ASSERTION = re.compile(r"\b(?:SP_ASSERT|_Static_assert|static_assert)\s*\(")


def measure(files):
    lengths, lines, comment_lines, assertions, largest = [], 0, 0, 0, (0, "")
    for file in files:
        text = file.read_text(encoding="utf-8")
        n = text.count("\n")
        lines += n
        largest = max(largest, (n, file.name))
        comment_lines += len({line for comment in c_source.comments(text) for line, _ in comment})
        assertions += len(ASSERTION.findall(c_source.without_comments(text)))
        lengths += [(length, name) for _, length, name in c_source.functions(text)]
    return lengths, lines, comment_lines, assertions, largest


def row(name, files, exported):
    lengths, lines, comment_lines, assertions, largest = measure(files)
    lengths.sort()
    if not lengths:
        return None
    at = lambda share: lengths[min(len(lengths) - 1, math.ceil(share * len(lengths)) - 1)][0]
    longest = lengths[-1]
    return ("| %s | %d | %d | %d | %d | %d | %d `%s` | %d `%s` | %d %% | %.2f | %s |" % (
        name, len(files), lines, len(lengths), at(0.5), at(0.9), longest[0], longest[1],
        largest[0], largest[1], round(100 * comment_lines / lines), 100 * assertions / lines,
        exported))


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    exported = {}
    for header in sorted((root / "include/sidepath").glob("*.h")):
        text = c_source.code_only(header.read_text(encoding="utf-8"))
        room = room_of_public("sidepath/" + header.name)
        names = re.findall(r"\bSP_API\b[^;{]*?\b(sp_\w+)\s*\(", text)
        exported[room] = exported.get(room, 0) + len(set(names))
    print("| room | files | lines | functions | median | p90 | longest function | largest file | "
          "comments | assertions per 100 lines | public functions |")
    print("| --- |" + " ---: |" * 5 + " --- | --- |" + " ---: |" * 3)
    every = []
    for room in reversed(ROOMS):
        files = [f for f in sorted((root / "src" / room).rglob("*"))
                 if f.suffix in (".c", ".h", ".cu", ".cuh", ".inc")
                 and not is_generated(f.read_text(encoding="utf-8"))]
        every += files
        line = row(room, files, exported.get(room, 0) or "")
        if line:
            print(line)
    print(row("all", every, sum(exported.values())))


if __name__ == "__main__":
    main()
