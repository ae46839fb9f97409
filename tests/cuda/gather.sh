#!/bin/sh
# Puts what run_on_device.sh needs on a machine without the tree into one directory.
#     gather.sh BUILD DIRECTORY [PTX_BUILD]
# BUILD is a build with -DSIDEPATH_CUDA=ON, PTX_BUILD one of its target sidepath_cuda alone with
# -DSIDEPATH_CUDA_ARCHITECTURES=80-virtual, for DIRECTORY/ptx. There, from DIRECTORY/..:
#     sh DIRECTORY/run_on_device.sh DIRECTORY OUTPUT DIRECTORY/ptx
set -eu
build=$1 directory=$2 ptx=${3:-}
tree=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$directory/lib" "$directory/fixtures"
for test in "$build"/tests/test_cuda*; do
    [ "$(basename "$test")" = test_cuda_choose ] || cp "$test" "$directory"
done
cp "$build"/bench_cuda "$build"/bench_cuda_gemm "$build"/bench_cuda_rows "$build"/bench_cuda_step \
    "$directory"
cp "$build"/libsidepath_cuda.so.0 "$directory"
cp "$tree"/tests/cuda/run_on_device.sh "$directory"
cp -r "$tree"/tests/fixtures/kernels "$directory/fixtures"
ldd "$directory/test_cuda_host" | awk '/libcmocka|libjansson|libcrypto/ { print $3 }' |
    xargs -I{} cp -L {} "$directory/lib"
if [ -n "$ptx" ]; then
    mkdir -p "$directory/ptx"
    cp "$ptx"/libsidepath_cuda.so.0 "$directory/ptx"
fi
