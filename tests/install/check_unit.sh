#!/bin/sh
# The installed unit by systemd's own tools: it parses, its program is there, and its sandbox is as
# closed as it is meant to be. Ends with 77, and says so, where there is no systemd-analyze.
#     check_unit.sh CMAKE BUILD SCRATCH
set -eu

cmake=$1 build=$2 scratch=$3

command -v systemd-analyze >/dev/null || {
    echo "skipped: systemd-analyze is not installed"
    exit 77
}
rm -rf "$scratch"
mkdir -p "$scratch"
"$cmake" --install "$build" --prefix "$scratch/prefix" >"$scratch/log"
unit=$scratch/prefix/lib/systemd/system/sidepath.service
grep -q "^ExecStart=$scratch/prefix/bin/sidepath serve" "$unit" || {
    echo "the unit does not start the installed program" >&2
    exit 1
}
[ -f "$(sed -n 's/^Documentation=file://p' "$unit")" ] || {
    echo "the unit's documentation is not installed" >&2
    exit 1
}
# Units of the system itself may be missing here; what is said about this one counts.
said=$(systemd-analyze verify --man=no "$unit" 2>&1 | grep -F sidepath.service || true)
[ -z "$said" ] || {
    echo "$said" >&2
    exit 1
}
# In tenths: 15 is "OK", where 100 is a unit without a sandbox.
systemd-analyze security --offline=yes --threshold=15 --no-pager "$unit" >"$scratch/security" || {
    grep -v "^✓" "$scratch/security" >&2
    exit 1
}
tail -n 1 "$scratch/security"
rm -rf "$scratch"
