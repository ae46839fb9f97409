#!/usr/bin/env python3
"""Two builds of the program against each other: `bench step` of each in turn, so that what the
machine does meanwhile falls on both alike.

    bench_pairs.py BEFORE AFTER PAIRS OUT.json -- ARGUMENTS of `bench step`

For each case the ratio of every pair (before's seconds over after's: above 1 is faster) and their
median. Which of the two begins changes from pair to pair."""

import json
import statistics
import subprocess
import sys


def run(program, arguments):
    result = subprocess.run([program, "bench", "step", "--json", *arguments], check=True,
                            capture_output=True, text=True)
    return json.loads(result.stdout)["cases"]


def name_of(case):
    return " ".join(str(case[key]) for key in ("kind", "rows", "adapters"))


def main():
    at = sys.argv.index("--")
    before, after, pairs, out = sys.argv[1:at]
    arguments = sys.argv[at + 1:]
    seconds = {}
    for pair in range(int(pairs)):
        programs = [(0, before), (1, after)]
        for which, program in programs if pair % 2 == 0 else reversed(programs):
            for case in run(program, arguments):
                seconds.setdefault(name_of(case), ([], []))[which].append(case["seconds"])
    cases = []
    for case, (old, new) in seconds.items():
        ratios = [a / b for a, b in zip(old, new)]
        cases.append({"case": case, "before_seconds": old, "after_seconds": new,
                      "ratio_median": round(statistics.median(ratios), 4)})
        print("%-24s %.3f  (%.3f .. %.3f)" % (case, statistics.median(ratios), min(ratios),
                                             max(ratios)))
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"bench": "pairs", "arguments": arguments, "pairs": int(pairs),
                   "cases": cases}, file, indent=1)
        file.write("\n")
    return 0 if cases else 1


if __name__ == "__main__":
    sys.exit(main())
