#!/bin/sh
# Runs nvcc and holds the registers that it spills against the list of those that are known.
#     nvcc_spills.sh LIST STRICT NVCC ARGUMENT...
# A line of LIST is "FUNCTION BYTES": a mangled name, and how many bytes of spill stores it may have
# on any architecture. More, or another function, fails the build where STRICT is ON, and is only
# printed elsewhere: for an architecture that nobody has counted yet.
set -u

list=$1 strict=$2
shift 2
printed=$("$@" -Xptxas -warn-spills 2>&1)
code=$?
[ -z "$printed" ] || printf '%s\n' "$printed" >&2
[ "$code" -eq 0 ] || exit "$code"
unknown=$(printf '%s\n' "$printed" | awk -v list="$list" '
    BEGIN { while ((getline line < list) > 0) {
                split(line, part, " ")
                if (line !~ /^#/ && part[1] != "") most[part[1]] = part[2] } }
    /Registers are spilled/ {
        name = $0; sub(/.*function .?/, "", name); sub(/[^A-Za-z0-9_$].*/, "", name)
        bytes = $0; sub(/.*, /, "", bytes)
        if (match($0, /[0-9]+ bytes spill stores/)) bytes = substr($0, RSTART, RLENGTH) + 0
        if (!(name in most) || bytes > most[name]) print name ": " bytes " bytes" }')
[ -n "$unknown" ] || exit 0
printf 'spills that %s does not count:\n%s\n' "$list" "$unknown" >&2
[ "$strict" != ON ]
