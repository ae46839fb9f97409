#!/usr/bin/env python3
"""Lays out for a person what tools/demo.sh has measured: the texts of the mixed batch side by side,
its rates, and what each adapter costs.
    demo_table.py REQUESTS.jsonl RESULTS-DIRECTORY"""

import json
import shutil
import sys
import textwrap
from pathlib import Path

COLUMNS = 3
GAP = 3


def read_run(path):
    """(results, summary) of one run."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "index" in line], lines[-1]["summary"]


def cell(request, result, width):
    """One result as lines of at most `width` characters."""
    lines = ["%s: %d prompt tokens, %d new, %s" % (
        result["adapter"] or "base", len(result["prompt_tokens"]), len(result["tokens"]),
        result["finish_reason"]), "-" * width]
    for paragraph in (request["prompt"] + "|" + result["text"]).split("\n"):
        lines += textwrap.wrap(paragraph, width, replace_whitespace=False) or [""]
    return lines


def print_side_by_side(requests, results, total_width):
    width = (total_width - GAP * (COLUMNS - 1)) // COLUMNS
    for first in range(0, len(results), COLUMNS):
        cells = [cell(requests[result["index"]], result, width)
                 for result in results[first:first + COLUMNS]]
        for row in range(max(len(lines) for lines in cells)):
            parts = [lines[row] if row < len(lines) else "" for lines in cells]
            print((" " * GAP).join(part.ljust(width) for part in parts).rstrip())
        print()


def print_batch(summary):
    times, rates = summary["times"], summary["rates"]
    print("One batch: %d requests, %d steps, %d prefill rows and %d decode rows, %s, %s" % (
        summary["requests"], summary["steps"], summary["prefill_rows"], summary["decode_rows"],
        summary["precision"], summary["cpu_isa"]))
    print("%.0f tokens/s in the batch; first token %.0f ms after the start: opening took %.1f ms, "
          "of which the adapters %.1f ms" % (
              rates["tokens_per_second"], times["first_token_seconds"] * 1e3,
              times["open_seconds"] * 1e3, times["adapter_seconds"] * 1e3))
    print("memory beyond the mapped weights: %.1f MiB, of which adapter slots %.1f MiB" % (
        summary["memory"]["resident_beyond_weights_bytes"] / 2**20,
        summary["memory"]["pool_bytes"] / 2**20))
    print()


def print_costs(summary, folder):
    """The same prompts with one adapter for all six, against base."""
    def runs(name):
        return [read_run(path)[1] for path in sorted(folder.glob("cost-%s-*" % name))]

    def rate(name):
        return max(run["rates"]["tokens_per_second"] for run in runs(name))

    base = rate("base")
    print("What an adapter costs: the same six prompts, all for one adapter; best of %d runs" %
          len(runs("base")))
    print("  %-10s %5s %6s %9s %8s %9s %8s" % (
        "", "rank", "sites", "slot KiB", "load ms", "tokens/s", "of base"))
    print("  %-10s %5s %6s %9s %8s %9.0f %8s" % ("base", "", "", "", "", base, "1.00"))
    for adapter in summary["adapters"]:
        name = adapter["name"]
        print("  %-10s %5d %6d %9.0f %8.1f %9.0f %8.2f" % (
            name, adapter["rank"], adapter["sites"], adapter["slot_bytes"] / 1024,
            adapter["load_seconds"] * 1e3, rate(name), rate(name) / base))


def main():
    requests = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    folder = Path(sys.argv[2])
    results, summary = read_run(folder / "batch")
    print("Prompt|continuation, six requests of one batch, each with its own adapter:\n")
    print_side_by_side(requests, results, max(90, shutil.get_terminal_size((120, 24)).columns))
    print_batch(summary)
    print_costs(summary, folder)


if __name__ == "__main__":
    main()
