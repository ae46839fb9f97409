#!/bin/sh
# Each header compiles alone: the public ones as C and as C++, with include/ as the only folder and
# also where the host defines SP_API itself, the internal ones as C with src/ as well.
#     check_headers.sh CC CXX ROOT [FLAG...]      (flags of the libraries that headers include)
#     check_headers.sh --self-test CC CXX DIRECTORY
set -u

check_tree() {
    cc=$1 cxx=$2 root=$3
    shift 3
    failed=0
    n=0
    strict="-Wall -Wextra -Wpedantic -Werror -fsyntax-only"
    for header in "$root"/include/sidepath/*.h; do
        n=$((n + 1))
        name=${header#"$root"/include/}
        # The header is included, not compiled itself, so that "unused" warnings stay quiet.
        echo "#include <$name>" | $cc -std=c17 $strict -I"$root/include" -x c - || failed=1
        echo "#include <$name>" |
            $cc -std=c17 $strict -DSP_API= -I"$root/include" -x c - || failed=1
        echo "#include <$name>" | $cxx -std=c++11 $strict -I"$root/include" -x c++ - || failed=1
    done
    for header in "$root"/src/*/*.h; do
        [ -e "$header" ] || continue
        n=$((n + 1))
        name=${header#"$root"/src/}
        case "$name" in
        *_avx2.h) isa="-mavx2 -mfma -mf16c" ;;
        *_avx512.h) isa="-mavx512f -mavx512bw -mavx512vl -mavx512dq" ;;
        *_amx.h) isa="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mamx-tile -mamx-bf16" ;;
        *) isa="" ;;
        esac
        echo "#include \"$name\"" |
            $cc -std=c17 $strict -D_GNU_SOURCE $isa -I"$root/include" -I"$root/src" "$@" -x c - ||
            failed=1
    done
    [ "$n" -gt 0 ] || failed=1
    echo "check_headers: $n headers, failed: $failed"
    return $failed
}

if [ "$1" = --self-test ]; then
    cc=$2 cxx=$3 directory=$4
    rm -rf "$directory"
    mkdir -p "$directory/include/sidepath" "$directory/src/base"
    public="$directory/include/sidepath/a.h"
    internal="$directory/src/base/b.h"
    echo "int sp_a(int b);" >"$public"
    echo "int sp_b(int b);" >"$internal"
    check_tree "$cc" "$cxx" "$directory" || exit 1
    echo "uint32_t sp_a(void);" >"$public" # needs stdint.h
    check_tree "$cc" "$cxx" "$directory" 2>/dev/null && exit 1
    echo "int sp_a(int class);" >"$public" # not C++
    check_tree "$cc" "$cxx" "$directory" 2>/dev/null && exit 1
    echo "int sp_a(int b);" >"$public"
    echo "size_t sp_b(void);" >"$internal"
    check_tree "$cc" "$cxx" "$directory" 2>/dev/null && exit 1
    rm -f "$public" "$internal"
    check_tree "$cc" "$cxx" "$directory" 2>/dev/null && exit 1
    echo "check_headers: headers that do not stand alone are found"
    exit 0
fi

check_tree "$@"
