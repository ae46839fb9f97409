#!/bin/sh
# Keeps today's public headers and the examples as tests/abi/MINOR: from then on they are what a
# host of that minor version was compiled with (tests/abi/tests.cmake). It belongs to the commit
# that opens the minor version; --again writes a copy anew that no host has seen yet.
set -eu

cd "$(dirname "$0")/.."
number() { sed -n "s/^#define SP_VERSION_$1 *//p" include/sidepath/version.h; }
folder=tests/abi/$(number MAJOR).$(number MINOR)

if [ -e "$folder" ] && [ "${1:-}" != --again ]; then
    echo "$0: $folder is frozen; --again writes it anew" >&2
    exit 1
fi
rm -rf "$folder"
mkdir -p "$folder/include" "$folder/hosts"
cp -R include/sidepath "$folder/include/"
cp examples/*.c "$folder/hosts/"
echo "$folder: the headers, and $(ls "$folder/hosts" | wc -l) hosts"
