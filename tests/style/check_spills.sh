#!/bin/sh
# cmake/nvcc_spills.sh counts: with a compiler that prints what it is told, a spill in the list
# passes, one more byte, another function and a failure of the compiler do not.
#     check_spills.sh NVCC_SPILLS DIRECTORY
set -eu

script=$1 directory=$2
mkdir -p "$directory"
cd "$directory"
printf '# counted\n_Z3oneIiEvT_ 8\n' >list
cat >compiler <<'COMPILER'
#!/bin/sh
[ "$1" = fail ] && exit 3
[ "$1" = none ] && exit 0
printf "%s in function '%s', %s bytes spill stores, 400 bytes spill loads\n" \
    "ptxas warning : Registers are spilled to local memory" "$1" "$2" >&2
COMPILER
chmod +x compiler

expect() {
    wanted=$1 strict=$2
    shift 2
    code=0
    "$script" list "$strict" ./compiler "$@" >out 2>&1 || code=$?
    [ "$code" -eq "$wanted" ] || { echo "$* gave $code, not $wanted" >&2; cat out >&2; exit 1; }
}

expect 0 ON none
expect 0 ON _Z3oneIiEvT_ 8
expect 1 ON _Z3oneIiEvT_ 12
expect 1 ON _Z3twoIiEvT_ 4
expect 0 OFF _Z3twoIiEvT_ 4
grep -q '_Z3twoIiEvT_: 4 bytes' out
expect 3 OFF fail
echo "check_spills: what is not counted is found"
