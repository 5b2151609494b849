#!/bin/sh
# SPDX-License-Identifier: MIT
# Adds up the test logs given (see check-summary) and prints "N passed, N failed, N skipped". A CMocka program counts its
# tests: one that began and neither passed nor was skipped has failed, even if the program died in it. A script counts as
# one, and so does a program that reports failure although none of its tests did. A test that left no result has failed.
set -eu
passed=0 failed=0 skipped=0
for log; do
    trs=${log%.log}.trs
    if ! [ -e "$trs" ] || ! [ -e "$log" ]; then
        failed=$((failed + 1))
        continue
    fi
    result=$(sed -n 's/^:global-test-result: *//p' "$trs")
    set -- $(awk '
        /^\[ RUN +\]/ {run++}
        /^\[ +OK \]/ {ok++}
        /^\[ +SKIPPED \] [0-9]+ test\(s\), listed/ {skipped += $4}
        END {print run + 0, ok + 0, skipped + 0}' "$log")
    run=$1 ok=$2 skip=$3 bad=$(($1 - $2 - $3))
    if [ "$run" = 0 ]; then
        case $result in PASS) ok=1 ;; SKIP) skip=1 ;; esac
    fi
    case $result in
    PASS | SKIP) ;;
    *) [ "$bad" -gt 0 ] || bad=1 ;;
    esac
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
