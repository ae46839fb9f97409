#!/usr/bin/env python3
"""Lays the output of `sidepath generate --json` out for a person: texts side by side, then the
summary. Reads the JSON lines on standard input."""

import json
import shutil
import sys
import textwrap

COLUMNS_MAX = 3
GAP = 3


def cell(result, width):
    """One result as lines of at most `width` characters."""
    title = "[%d] %s" % (result["index"], result["adapter"] or "base")
    detail = "%d prompt tokens, %d new, %s" % (
        len(result["prompt_tokens"]), len(result["tokens"]), result["finish_reason"])
    lines = [title, detail, "-" * width]
    for paragraph in (result.get("prompt", "") + result["text"]).split("\n"):
        lines += textwrap.wrap(paragraph, width, drop_whitespace=False) or [""]
    return lines


def print_side_by_side(results, total_width):
    columns = min(COLUMNS_MAX, len(results))
    width = (total_width - GAP * (columns - 1)) // columns
    for first in range(0, len(results), columns):
        cells = [cell(result, width) for result in results[first:first + columns]]
        for row in range(max(len(lines) for lines in cells)):
            parts = [lines[row] if row < len(lines) else "" for lines in cells]
            print((" " * GAP).join(part.ljust(width) for part in parts).rstrip())
        print()


def print_summary(summary):
    """Every number of the summary by its own name; lists of objects become tables."""
    for key, value in summary.items():
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            names = list(value[0])
            rows = [names] + [[text_of(v.get(name)) for name in names] for v in value]
            widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
            print("%s:" % key)
            for row in rows:
                print("  " + "  ".join(item.ljust(w) for item, w in zip(row, widths)).rstrip())
        elif isinstance(value, dict):
            print("%s:" % key)
            for name, inner in value.items():
                print("  %-28s %s" % (name, text_of(inner)))
        else:
            print("%-30s %s" % (key, text_of(value)))


def text_of(value):
    if isinstance(value, float):
        return "%.4g" % value
    return "-" if value is None else str(value)


def main():
    lines = [json.loads(line) for line in sys.stdin if line.strip()]
    results = [line for line in lines if "index" in line]
    if not results:
        return 1
    print_side_by_side(results, max(60, shutil.get_terminal_size((110, 24)).columns))
    for line in lines:
        if "summary" in line:
            print_summary(line["summary"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
