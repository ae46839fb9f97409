#!/bin/sh
# Runs the CUDA tests, the same through PTX, the sanitizers on small steps, and the benches, on a
# machine with a GPU.
#     run_on_device.sh DIRECTORY OUTPUT [PTX_DIRECTORY]
# DIRECTORY holds test_cuda*, bench_cuda*, and libsidepath_cuda.so.0 beside them; PTX_DIRECTORY the
# same programs beside a build of that library with PTX alone (-DSIDEPATH_CUDA_ARCHITECTURES=
# 80-virtual). SP_PARTS names what to run, by default "tests ptx sanitizers benches". Goes on after
# a failure; the exit status is 1 if anything failed. A log of each run is left in OUTPUT.
set -u
directory=$1 output=$2 ptx=${3:-}
parts=${SP_PARTS:-tests ptx sanitizers benches}
bad=0

# run NAME PROGRAM...: one line with the status and seconds, and the lines that matter.
run() {
    name=$1
    shift
    began=$(date +%s)
    timeout 200 "$@" >"$output/$name.log" 2>&1
    status=$?
    echo "$name: status $status, $(($(date +%s) - began)) s"
    grep -E "FAILED|ERROR|SUMMARY|skipped|differ from|error:" "$output/$name.log" | sort |
        uniq -c | head -20
    [ $status -eq 0 ] || bad=1
}

wants() {
    case " $parts " in *" $1 "*) return 0 ;; esac
    return 1
}

export LD_LIBRARY_PATH="$directory:${LD_LIBRARY_PATH:-}"
if wants tests; then
    for program in "$directory"/test_cuda*; do
        run "$(basename "$program")" "$program"
    done
fi
if wants ptx && [ -n "$ptx" ]; then
    for program in "$ptx"/test_cuda*; do
        run "ptx_$(basename "$program")" "$program"
    done
fi
if wants sanitizers; then
    for tool in memcheck racecheck initcheck synccheck; do
        for program in test_cuda test_cuda_delta test_cuda_grouped test_cuda_tokens; do
            run "${tool}_$program" compute-sanitizer --tool $tool --error-exitcode 9 \
                "$directory/$program" 'a_small*'
        done
    done
fi
if wants benches; then
    for program in "$directory"/bench_cuda*; do
        name=$(basename "$program")
        timeout 200 "$program" >"$output/$name.json" 2>"$output/$name.err" || bad=1
        echo "$name: $(grep -c case "$output/$name.json") cases"
    done
fi
exit $bad
