#!/usr/bin/env python3
"""The pair of kernels beside its peers, cell by cell: a page for docs/performance.

    peer_cells.py OURS.json [PEERS.json] > docs/performance/cells.md

OURS is what bench_cuda writes, PEERS the peers' microseconds for the same cells
(bench/results/h200-peers.json by default). A cell is layer/rank/rows/adapters."""

import json
import os
import statistics
import sys

LAYERS = (("qkv", "qkv"), ("o", "o"), ("gu", "gate, up"), ("down", "down"))
HEAD = """# The pair beside its peers, cell by cell

Microseconds of shrink and expand of one group on an H200, Qwen3-8B's shapes, bf16, weights cold, by
graph replay: ours ([{ours}](../../bench/results/{ours}), commit {commit}, {date}; in brackets the
aim where there is one), the best peer's and which one that was
([{peers}](../../bench/results/{peers}), {peers_date}, another run on the same kind of machine; the
file has every peer's figure and how each was set up), and the peer's time over ours.
`bench/peer_cells.py` writes this page.

{ahead} of {count} cells are ahead of every peer; median ratio {median:.2f}, least {least:.2f}
({least_cell}), most {most:.2f} ({most_cell}).
"""


def best_of(case):
    peers = [(us, name) for name, us in case.items() if name != "cell"]
    return min(peers)


def row_of(shape, ours, aims, peers, ratios):
    rank, rows, adapters = shape
    line = [f"{int(rows[1:]):,} × {adapters[1:]}, rank {rank}"]
    for layer, _ in LAYERS:
        cell = "/".join((layer, rank, rows, adapters))
        if cell not in ours or cell not in peers:
            line.append("")
            continue
        us, name = best_of(peers[cell])
        ratio = us / ours[cell]
        ratios[cell] = ratio
        aim = f" ({aims[cell]:.3g})" if aims[cell] else ""
        mark = "**" if ratio < 1 else ""
        line.append(f"{ours[cell]:.3g}{aim}, {us:.3g} {name}, {mark}{ratio:.2f}{mark}")
    return "| " + " | ".join(line) + " |"


def main():
    ours_path = sys.argv[1]
    here = os.path.dirname(os.path.abspath(__file__))
    peers_path = sys.argv[2] if len(sys.argv) > 2 else os.path.join(here, "results",
                                                                    "h200-peers.json")
    with open(ours_path, encoding="utf-8") as file:
        run = json.load(file)
    with open(peers_path, encoding="utf-8") as file:
        peer_run = json.load(file)
    ours = {case["cell"]: case["us"] for case in run["cases"]}
    aims = {case["cell"]: case.get("target_us", 0) for case in run["cases"]}
    peers = {case["cell"]: case for case in peer_run["cases"]}
    shapes = {tuple(cell.split("/")[1:]) for cell in ours if cell in peers}
    ratios = {}
    rows = [row_of(shape, ours, aims, peers, ratios)
            for shape in sorted(shapes, key=lambda s: (int(s[1][1:]), int(s[2][1:]), int(s[0])))]
    least, most = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    print(HEAD.format(ours=os.path.basename(ours_path), commit=run["commit"], date=run["date"],
                      peers=os.path.basename(peers_path), peers_date=peer_run["date"],
                      ahead=sum(r >= 1 for r in ratios.values()), count=len(ratios),
                      median=statistics.median(ratios.values()), least=ratios[least],
                      least_cell=least, most=ratios[most], most_cell=most))
    print("| rows × adapters | " + " | ".join(title for _, title in LAYERS) + " |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
