#!/bin/sh
# One batch on the demo model: six requests for the base and three adapters, of different prompts
# and lengths, decoded together. Then the same prompts with one adapter for all of them, to see what
# each adapter costs. The work is done by the program; demo_table.py only lays out its --json.
#     tools/demo.sh [PATH-OF-SIDEPATH]
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
sidepath=${1:-$root/build/release/sidepath}
[ -x "$sidepath" ] || {
    echo "$0: $sidepath is not there; run make build first" >&2
    exit 1
}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# Requests on standard input, results in $results/NAME.
generate() {
    name=$1
    shift
    "$sidepath" generate --model "$root/demo/base" \
        --adapter scripture="$root/demo/adapters/scripture" \
        --adapter csource="$root/demo/adapters/csource" \
        --adapter sqldoc="$root/demo/adapters/sqldoc" \
        "$@" --json >"$results/$name"
}

generate batch --temperature 0.7 --top-p 0.9 --seed 7 <"$root/demo/requests.jsonl"

# The mixed batch's prompts, all for one adapter. Rounds of all four, so that a machine that is busy
# for a while slows each of them; the best round counts.
for run in 1 2 3 4 5; do
    for adapter in base scripture csource sqldoc; do
        sed -e 's/"adapter": "[a-z]*", //' -e "s/^{/{\"adapter\": \"$adapter\", /" \
            -e 's/"adapter": "base", //' "$root/demo/requests.jsonl" |
            generate "cost-$adapter-$run" --temperature 0 --ignore-eos 2>"$results/log" || {
            cat "$results/log" >&2
            exit 1
        }
    done
done

python3 -B "$root/tools/demo_table.py" "$root/demo/requests.jsonl" "$results"
