#!/bin/sh
# Puts what run_on_device.sh needs on a machine without the tree into one directory.
#     gather.sh BUILD DIRECTORY [PTX_BUILD]
# BUILD is a build with -DSIDEPATH_CUDA=ON, PTX_BUILD one of its target sidepath_cuda alone with
# -DSIDEPATH_CUDA_ARCHITECTURES=80-virtual, for DIRECTORY/ptx. There, from DIRECTORY/..:
#     sh DIRECTORY/run_on_device.sh DIRECTORY OUTPUT DIRECTORY/ptx
# The engine's tests (engine_tests.txt) read fixtures and demo where the tree was when they were
# built: there has to be one, or a link to it.
set -eu
build=$1 directory=$2 ptx=${3:-}
tree=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$directory/lib" "$directory/fixtures"
for test in "$build"/tests/test_cuda*; do
    [ "$(basename "$test")" = test_cuda_choose ] || cp "$test" "$directory"
done
while read -r test; do
    cp "$build/tests/$test" "$directory"
done <"$tree"/tests/cuda/engine_tests.txt
cp "$build"/sidepath "$build"/bench_cuda* "$directory"
mkdir -p "$directory/tests" # where serve_on_device.sh looks for it
cp "$build"/tests/slow_files.so "$directory/tests"
cp "$build"/libsidepath_cuda.so.0 "$directory"
cp "$tree"/tests/cuda/run_on_device.sh "$tree"/tests/cuda/engine_tests.txt "$directory"
cp -r "$tree"/tests/fixtures/kernels "$directory/fixtures"
ldd "$directory/test_goldens" |
    awk '/libcmocka|libjansson|libcrypto|libpcre2|libutf8proc/ { print $3 }' |
    xargs -I{} cp -L {} "$directory/lib"
if [ -n "$ptx" ]; then
    mkdir -p "$directory/ptx"
    cp "$ptx"/libsidepath_cuda.so.0 "$directory/ptx"
fi
