#!/bin/sh
# Every symbol that the libraries show to a linker carries the prefix sp_.
#     check_symbols.sh NM LIBRARY...      (.so: dynamic symbols; .a: global symbols)
# With --no-network: no library asks for a function that opens a socket or looks up a host.
#     check_symbols.sh --no-network NM LIBRARY...
#     check_symbols.sh --self-test NM CC DIRECTORY
set -eu

# Prints the foreign symbols of one library; fails if the library has no symbol at all.
foreign() {
    case "$2" in
    *.so*) listing=$("$1" -D --defined-only "$2") ;;
    *) listing=$("$1" -g --defined-only "$2" 2>/dev/null) ;;
    esac
    printf '%s\n' "$listing" | awk -v library="$2" '
        NF == 3 && $2 != "A" { n++; if ($3 !~ /^sp_/) print library ": " $3 }
        END { if (n == 0) print library ": no symbols at all" }'
}

# Prints the functions that reach for a network and that a library takes from outside.
network() {
    case "$2" in
    *.so*) listing=$("$1" -D --undefined-only "$2") ;;
    *) listing=$("$1" -u "$2" 2>/dev/null) ;;
    esac
    printf '%s\n' "$listing" | awk -v library="$2" '
        NF == 2 { n++; sub(/@.*/, "", $2)
                  if ($2 ~ /^(socket|socketpair|connect|bind|listen|accept4?)$/ ||
                      $2 ~ /^(getaddrinfo|gethostby.*|res_.*|curl_.*|BIO_.*connect.*)$/ ||
                      $2 ~ /^(send(to|m?msg)|recv(from|m?msg))$/) print library ": " $2 }
        END { if (n == 0) print library ": takes nothing from outside" }'
}

if [ "$1" = --self-test ]; then
    nm=$2 cc=$3 directory=$4
    mkdir -p "$directory"
    cd "$directory"
    rm -f ./*
    echo 'int sp_good(void) { return 1; } int bad(void) { return 2; }' >bad.c
    echo 'int sp_good(void) { return 1; } static int one(void) { return 1; }
          int sp_more(void) { return one(); }' >good.c
    for name in good bad; do
        "$cc" -fPIC -c $name.c -o $name.o
        "$cc" -shared $name.o -o $name.so
        ar rc $name.a $name.o
    done
    [ -z "$(foreign "$nm" good.so)$(foreign "$nm" good.a)" ]
    [ "$(foreign "$nm" bad.so)" = "bad.so: bad" ]
    [ "$(foreign "$nm" bad.a)" = "bad.a: bad" ]
    echo "int unused;" | "$cc" -fvisibility=hidden -shared -fPIC -x c - -o empty.so
    [ "$(foreign "$nm" empty.so)" = "empty.so: no symbols at all" ]
    echo 'int socket(int, int, int); int sp_a(void) { return socket(1, 1, 0); }' >net.c
    echo 'int puts(const char *); int sp_a(void) { return puts("socket"); }' >quiet.c
    for name in net quiet; do
        "$cc" -fPIC -c $name.c -o $name.o
        "$cc" -shared $name.o -o $name.so
        ar rc $name.a $name.o
    done
    [ "$(network "$nm" net.so)" = "net.so: socket" ]
    [ "$(network "$nm" net.a)" = "net.a: socket" ]
    [ -z "$(network "$nm" quiet.so)$(network "$nm" quiet.a)" ]
    echo "check_symbols: foreign symbols and calls of the network are found"
    exit 0
fi

what=foreign
if [ "$1" = --no-network ]; then
    what=network
    shift
fi
nm=$1
shift
found=""
for library in "$@"; do
    found="$found$($what "$nm" "$library")"
done
if [ -n "$found" ]; then
    echo "$found" >&2
    exit 1
fi
echo "check_symbols: nothing $what in $# libraries"
