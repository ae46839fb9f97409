#!/bin/sh
# Builds the library inside another project, as Release and with warnings as errors, where none of
# the packages can be found that only the engine, the program or the tests need; installs that. The
# compiler optimises little here: the project's own builds see its other warnings.
# Then lets FetchContent configure the same project with the engine.
#     check_subproject.sh CMAKE CC SOURCE SCRATCH
set -eu

cmake=$1 cc=$2 source=$3 scratch=$4

fail() {
    echo "check_subproject: $1" >&2
    exit 1
}

quietly() {
    "$@" >"$scratch/log" 2>&1 || {
        cat "$scratch/log" >&2
        fail "$1 failed"
    }
}

configure() {
    build=$1
    shift
    quietly "$cmake" -S "$source/tests/install/subproject" -B "$build" -G Ninja \
        -DCMAKE_C_COMPILER="$cc" -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE="-O1 -DNDEBUG" \
        -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
        -DSIDEPATH_SOURCE="$source" "$@"
}

rm -rf "$scratch"
mkdir -p "$scratch/pkgconfig"

# pkg-config sees the library's own packages and what those require.
for module in $(pkg-config --print-requires --print-requires-private libcrypto) \
    jansson libcrypto libpcre2-8; do
    ln -sf "$(pkg-config --variable=pcfiledir "$module")/$module.pc" "$scratch/pkgconfig/"
done
PKG_CONFIG_LIBDIR=$scratch/pkgconfig
export PKG_CONFIG_LIBDIR
configure "$scratch/build" -DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON -DSIDEPATH_INSTALL=ON
quietly "$cmake" --build "$scratch/build"
for program in host_sidepath host_static; do
    [ "$("$scratch/build/$program")" = SP_ERR_INPUT ] || fail "$program failed"
done
quietly "$cmake" --install "$scratch/build" --prefix "$scratch/prefix"
[ -e "$scratch/prefix/include/sidepath/status.h" ] || fail "no headers were installed"
[ -z "$(find "$scratch/prefix" -name '*engine.so*' -o -name '*engine.pc' -o -type d -name bin)" ] ||
    fail "more than the library was installed"
unset PKG_CONFIG_LIBDIR

configure "$scratch/fetched" -DFETCH=ON -DSIDEPATH_LIBRARY_ONLY=OFF
rm -rf "$scratch"
echo "check_subproject: the library alone inside another project, and by FetchContent"
