#!/bin/sh
# nvcc.sh LOG COMMAND...: runs the compiler, keeps what it says in LOG, and shows it if it fails.
log=$1
shift
"$@" 2>"$log" || {
    cat "$log" >&2
    exit 1
}
