#!/bin/sh
# Runs the CUDA tests, the same through PTX, the sanitizers on small steps, and the benches, on a
# machine with a GPU.
#     run_on_device.sh DIRECTORY OUTPUT [PTX_DIRECTORY]
# DIRECTORY holds test_cuda*, bench_cuda*, and libsidepath_cuda.so.0 beside them, and, where the
# machine lacks them, lib/ with the shared libraries that the programs need (cmocka, jansson,
# libcrypto) and fixtures/ as in tests/fixtures. PTX_DIRECTORY holds a build of the library with PTX
# alone (-DSIDEPATH_CUDA_ARCHITECTURES=80-virtual); the programs are copied beside it. SP_PARTS
# names what to run, by default "tests engine eager ptx sanitizers benches". All but the benches run
# beside each other, as they are not timed, in chains; the benches run behind them, alone. Goes
# on after a failure; the exit status is 1 if anything failed. A log of each run is left in OUTPUT.
set -u
directory=$1 output=$2 ptx=${3:-}
parts=${SP_PARTS:-tests engine eager ptx sanitizers benches}
limit=${SP_LIMIT_S:-200} # of one program
failed=$output/failed.txt
: >"$failed"

# run NAME PROGRAM...: one line with the status and seconds, and the lines that matter.
run() {
    name=$1
    shift
    began=$(date +%s)
    timeout "$limit" "$@" >"$output/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] || echo "$name" >>"$failed"
    echo "$name: status $status, $(($(date +%s) - began)) s
$(grep -E "FAILED|ERROR|SUMMARY|skipped|differ from|error:" "$output/$name.log" | sort | uniq -c |
        head -20)"
}

# run_tests PREFIX DIRECTORY: in three chains, of which the first takes longest.
run_tests() {
    run "${1}test_cuda_delta" "$2/test_cuda_delta" &
    run "${1}test_cuda_engine" "$2/test_cuda_engine" &
    for test in test_cuda test_cuda_host test_cuda_fixtures test_cuda_fold test_cuda_gemm \
        test_cuda_grouped test_cuda_partial test_cuda_pool test_cuda_rows test_cuda_choose_tokens \
        test_cuda_choice_paths test_cuda_tokens test_cuda_views test_cuda_attention test_cuda_moe \
        test_cuda_experts test_cuda_expert_pool test_cuda_delta_rule; do
        run "$1$test" "$2/$test"
    done &
}

# run_engine PREFIX: the engine's own tests, with bf16 engines on the GPU.
run_engine() {
    while read -r test; do
        run "$1$test" env -u SP_FIXTURES SP_TEST_DEVICE=cuda "$directory/$test" &
    done <"$directory/engine_tests.txt"
}

wants() {
    case " $parts " in *" $1 "*) return 0 ;; esac
    return 1
}

export LD_LIBRARY_PATH="$directory:$directory/lib:${LD_LIBRARY_PATH:-}"
[ ! -d "$directory/fixtures" ] || export SP_FIXTURES="$directory/fixtures"
if wants tests; then
    run_tests "" "$directory"
fi
if wants engine; then
    run_engine engine_
fi
if wants eager; then
    (SP_TEST_EAGER=1 && export SP_TEST_EAGER && run_engine eager_ && wait) &
fi
if wants ptx && [ -n "$ptx" ]; then
    cp "$directory"/test_cuda* "$ptx"
    run_tests ptx_ "$ptx"
fi
if wants sanitizers; then
    for tool in memcheck racecheck initcheck synccheck; do
        for program in test_cuda test_cuda_delta test_cuda_engine test_cuda_fold test_cuda_gemm \
            test_cuda_host test_cuda_grouped test_cuda_partial test_cuda_rows \
            test_cuda_choose_tokens test_cuda_choice_paths test_cuda_tokens test_cuda_views \
            test_cuda_attention test_cuda_moe test_cuda_experts test_cuda_expert_pool \
            test_cuda_delta_rule; do
            # It does not follow bar.arrive (docs/KERNELS.md, "What ran on a GPU").
            [ "$tool $program" != "racecheck test_cuda_fold" ] || continue
            run "${tool}_$program" compute-sanitizer --tool $tool --error-exitcode 9 \
                "$directory/$program" 'a_small*'
        done &
    done
fi
wait
if wants benches; then
    for program in "$directory"/bench_cuda*; do
        name=$(basename "$program")
        timeout "$limit" "$program" >"$output/$name.json" 2>"$output/$name.err" ||
            echo "$name" >>"$failed"
        echo "$name: $(grep -c '^  {"' "$output/$name.json") lines"
    done
fi
[ ! -s "$failed" ]
