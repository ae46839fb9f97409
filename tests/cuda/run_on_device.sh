#!/bin/sh
# Runs the CUDA tests, the sanitizers on a small step, and the bench, on a machine with a GPU.
#     run_on_device.sh DIRECTORY OUTPUT [PTX_DIRECTORY]
# DIRECTORY holds test_cuda, bench_cuda and libsidepath_cuda.so.0; PTX_DIRECTORY another build of
# the last, with PTX alone. Goes on after a failure; the exit status is 1 if anything failed.
set -u
directory=$1 output=$2 ptx=${3:-}
bad=0
run() {
    name=$1
    shift
    timeout 150 "$@" >"$output/$name.log" 2>&1
    status=$?
    echo "$name: $status"
    grep -E "FAILED|ERROR|PASSED|SUMMARY" "$output/$name.log" | head -20
    [ $status -eq 0 ] || bad=1
}
export LD_LIBRARY_PATH="$directory:${LD_LIBRARY_PATH:-}"
run tests "$directory/test_cuda"
timeout 150 "$directory/bench_cuda" >"$output/bench.json" || bad=1
if [ -n "$ptx" ]; then
    LD_LIBRARY_PATH="$ptx:$LD_LIBRARY_PATH" run tests_ptx "$directory/test_cuda"
fi
for tool in memcheck racecheck initcheck synccheck; do
    run "$tool" compute-sanitizer --tool $tool --error-exitcode 9 "$directory/test_cuda" 'a_small*'
done
exit $bad
