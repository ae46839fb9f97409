#!/bin/sh
# One batch on the demo model: six requests for the base and three adapters, of different prompts
# and lengths, decoded together. Prints the texts, the rates and what each adapter took.
#     tools/demo.sh [PATH-OF-SIDEPATH]
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
sidepath=${1:-$root/build/release/sidepath}
[ -x "$sidepath" ] || {
    echo "$0: $sidepath is not there; run make build first" >&2
    exit 1
}

"$sidepath" generate --model "$root/demo/base" \
    --adapter scripture="$root/demo/adapters/scripture" \
    --adapter csource="$root/demo/adapters/csource" \
    --adapter sqldoc="$root/demo/adapters/sqldoc" \
    --temperature 0.7 --top-p 0.9 --seed 7 --json <"$root/demo/requests.jsonl" |
    python3 "$root/tools/demo_table.py"
