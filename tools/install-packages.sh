#!/bin/sh
# Installs by name the packages that are missing for the groups given as arguments:
#     library what a build of the library alone needs
#     build   what a build of the library and the program needs
#     test    what a build of the tests needs besides
#     peers   what adapters from other hosts need besides (optional: a build does without)
#     style   what the style checks among the tests need besides
#     client  the openai client, jsonschema, cffi and numpy for tests, into build/client-venv
#     ci      what .ci/run needs besides
# Quiet and without root when everything is there. Debian 12 is tested; the names for Ubuntu 24.04
# are the same and untested.
set -eu

library="gcc libc6-dev make cmake ninja-build pkg-config libjansson-dev libssl-dev libxxhash-dev
libpcre2-dev"
build="$library libutf8proc-dev python3"
test="libcmocka-dev python3-jinja2 iproute2 nftables"
peers="libucx-dev"
style="clang-format-14 g++"
ci="clang-14 libclang-rt-14-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user git
prometheus"

client="python3-venv curl"

packages=""
venv=""
for group in "$@"; do
    case "$group" in
    library) packages="$packages $library" ;;
    build) packages="$packages $build" ;;
    test) packages="$packages $test" ;;
    peers) packages="$packages $peers" ;;
    style) packages="$packages $style" ;;
    client) packages="$packages $client" venv="build/client-venv" ;;
    ci) packages="$packages $ci" ;;
    *)
        echo "usage: $0 library|build|test|peers|style|client|ci ..." >&2
        exit 2
        ;;
    esac
done

fail() {
    echo "$0: $1" >&2
    echo "Needed, by their Debian 12 names:" $packages >&2
    exit 1
}

system="unknown"
if [ -r /etc/os-release ]; then
    system=$(. /etc/os-release && echo "${ID:-unknown} ${VERSION_ID:-}")
fi
case "$system" in
"debian 12") ;;
"ubuntu 24.04") echo "$0: the package names for Ubuntu 24.04 are untested" >&2 ;;
*) fail "this system is \"$system\": packages are installed on Debian 12 and Ubuntu 24.04 only" ;;
esac

missing=""
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done

# The versions stand in one file; what is there already is left alone.
make_venv() {
    [ -n "$venv" ] || return 0
    wanted="$(dirname "$0")/../tests/server/requirements.txt"
    cmp -s "$wanted" "$venv/installed.txt" && return 0
    echo "Installing the packages of $wanted into $venv"
    python3 -m venv "$venv" || fail "cannot make $venv"
    "$venv/bin/pip" install -q --disable-pip-version-check -r "$wanted" || fail "pip failed"
    cp "$wanted" "$venv/installed.txt"
}

if [ -z "$missing" ]; then
    make_venv
    exit 0
fi

root=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "not root and no sudo; missing:$missing"
    root="sudo"
fi

echo "Installing:$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {
    $root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 "$@" \
        >"$log" 2>&1 </dev/null || {
        cat "$log" >&2
        fail "apt-get $1 failed"
    }
}
apt update
apt install --no-install-recommends $missing
make_venv
