#!/bin/sh
# Installs a build into an empty prefix and builds against it as another project would, by
# pkg-config and by find_package, shared and static; then moves the prefix and does it again.
#     check_install.sh CMAKE CC BUILD SOURCE SCRATCH
set -eu

cmake=$1 cc=$2 build=$3 source=$4 scratch=$5
consumer=$source/tests/install/consumer

# Runs a program, with its arguments, that must print the name of one status.
expect() {
    status=$1 program=$2
    shift 2
    [ "$("$program" "$@")" = "$status" ] || {
        echo "$program failed" >&2
        exit 1
    }
}

expect_engine() {
    expect SP_ERR_NOT_FOUND "$1" "$source/demo/base" "$source/demo/adapters/sqldoc"
}

by_pkg_config() {
    pc_folder=$(dirname "$(find "$prefix" -name sidepath.pc)")
    PKG_CONFIG_PATH=$pc_folder
    LD_LIBRARY_PATH=$(dirname "$pc_folder")
    export PKG_CONFIG_PATH LD_LIBRARY_PATH
    flags=$(pkg-config --cflags --libs sidepath)
    # shellcheck disable=SC2086
    $cc -std=c17 "$consumer/consumer.c" $flags -o "$scratch/pc_shared"
    expect SP_ERR_INPUT "$scratch/pc_shared"
    flags="$(pkg-config --cflags sidepath) $LD_LIBRARY_PATH/libsidepath.a \
        $(pkg-config --static --libs sidepath | sed 's/-lsidepath//')"
    # shellcheck disable=SC2086
    $cc -std=c17 "$consumer/consumer.c" $flags -o "$scratch/pc_static"
    for example in "$source"/examples/*.c; do
        [ -e "$example" ] || continue
        # shellcheck disable=SC2046
        $cc -std=c17 -D_GNU_SOURCE "$example" $(pkg-config --cflags --libs sidepath) -lm \
            -o "$scratch/pc_example"
    done
    # shellcheck disable=SC2046
    $cc -std=c17 "$consumer/engine_consumer.c" $(pkg-config --cflags --libs sidepath-engine) \
        -o "$scratch/pc_engine"
    expect_engine "$scratch/pc_engine"
    unset LD_LIBRARY_PATH
    expect SP_ERR_INPUT "$scratch/pc_static"
}

# Programs without a shared library; the linker warns of dlopen and of the host's address functions.
all_static() {
    # shellcheck disable=SC2046
    $cc -std=c17 -static "$consumer/consumer.c" $(pkg-config --cflags --static --libs sidepath) \
        -o "$scratch/all_static" 2>"$scratch/log" || cat "$scratch/log" >&2
    # shellcheck disable=SC2046
    $cc -std=c17 -static "$consumer/engine_consumer.c" \
        $(pkg-config --cflags --static --libs sidepath-engine) -o "$scratch/all_static_engine" \
        2>"$scratch/log" || cat "$scratch/log" >&2
    expect SP_ERR_INPUT "$scratch/all_static"
    expect_engine "$scratch/all_static_engine"
}

by_find_package() {
    rm -rf "$scratch/consumer"
    "$cmake" -S "$consumer" -B "$scratch/consumer" -G Ninja -DCMAKE_C_COMPILER="$cc" \
        -DCMAKE_PREFIX_PATH="$prefix" -DEXAMPLES="$source/examples" \
        >"$scratch/log" 2>&1 &&
        "$cmake" --build "$scratch/consumer" >>"$scratch/log" 2>&1 || {
        cat "$scratch/log" >&2
        exit 1
    }
    expect SP_ERR_INPUT "$scratch/consumer/consumer_shared"
    expect SP_ERR_INPUT "$scratch/consumer/consumer_static"
    expect_engine "$scratch/consumer/consumer_engine"
    expect_engine "$scratch/consumer/consumer_engine_static"
}

rm -rf "$scratch"
mkdir -p "$scratch"
prefix=$scratch/first
"$cmake" --install "$build" --prefix "$prefix" >"$scratch/log"
for file in include/sidepath/status.h share/doc/sidepath/LICENSE; do
    [ -f "$prefix/$file" ] || { echo "$file was not installed" >&2; exit 1; }
done
for page in $(grep -oh 'docs/[A-Z]*\.md' "$prefix"/include/sidepath/*.h | sort -u); do
    [ -f "$prefix/share/doc/sidepath/${page#docs/}" ] || {
        echo "a header names $page, which was not installed" >&2
        exit 1
    }
done
for example in "$source"/examples/*.c "$source"/examples/*.py; do
    cmp "$example" "$prefix/share/doc/sidepath/examples/$(basename "$example")" || exit 1
done
if grep -rl "$source\|$prefix" "$prefix" --include=*.pc --include=*.cmake; then
    echo "a package file knows where it was built or installed" >&2
    exit 1
fi
by_pkg_config
mv "$prefix" "$scratch/moved"
prefix=$scratch/moved
by_pkg_config
all_static
by_find_package
rm -rf "$scratch"
echo "check_install: pkg-config and find_package, shared and static, also after a move; cc -static"
