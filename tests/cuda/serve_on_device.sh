#!/bin/sh
# The server's tests, those that need Python's standard library alone, with the demo model on a GPU:
# the same checks, greedy texts and counts as on a CPU.
#     serve_on_device.sh SIDEPATH OUTPUT
# Run in the tree. One log each is left in OUTPUT; the exit status is 1 if anything failed.
set -u
sidepath=$1 output=$2
server=$(cd "$(dirname "$0")/../server" && pwd)
limit=${SP_LIMIT_S:-120} # of one check
failed=$output/failed_serve.txt
: >"$failed"

SIDEPATH_DEVICE=${SP_TEST_DEVICE:-cuda}
export SIDEPATH_DEVICE

run() {
    began=$(date +%s)
    timeout "$limit" python3 -B "$server/$1.py" "$sidepath" ${2:-} >"$output/serve_$1.log" 2>&1
    status=$?
    [ $status -eq 0 ] || echo "$1" >>"$failed"
    echo "serve $1: status $status, $(($(date +%s) - began)) s"
    [ $status -eq 0 ] || tail -5 "$output/serve_$1.log"
}

for check in check_http_api check_http_clients check_http_robust check_metrics check_operate \
    check_process check_responses check_speculative check_structured; do
    run $check &
done
run soak_server 400 &
wait
[ ! -s "$failed" ]
