#!/bin/sh
# SPDX-License-Identifier: MIT
# The interface of the shared library against that of the last release, tests/abi/clattn-VERSION.abi. Functions, types
# and fields may be added; what a program uses that was built for the release stays.
#   abi.sh check     compare (needs abidiff of libabigail, and a library with debugging information)
#   abi.sh dump      write the file of this version; a part of making a release
# Environment: srcdir, PACKAGE_VERSION.
set -eu
: "${srcdir:?}" "${PACKAGE_VERSION:?}"
library=.libs/libclattn.so
for tool in abidw abidiff; do
    command -v $tool > /dev/null || { echo "$tool is not there (Debian: abigail-tools)"; exit 77; }
done
test -e "$library" || { echo "no shared library in this build"; exit 77; }

# dump FILE : only what the public header declares; without folders, so that the file is the same wherever it is made.
dump() {
    abidw --type-id-style hash --headers-dir "$srcdir/include" --drop-private-types --no-corpus-path --no-comp-dir-path \
        --no-show-locs --out-file "$1" "$library"
    grep -q clattn_context_create "$1" || { echo "$library tells nothing of its interface" >&2; exit 1; }
}

case ${1-} in
dump)
    dump "$srcdir/tests/abi/clattn-$PACKAGE_VERSION.abi"
    ;;
check)
    last=$(ls "$srcdir"/tests/abi/clattn-*.abi | LC_ALL=C sort -V | tail -n 1)
    work=tests/abi.work
    mkdir -p "$work"
    trap 'rm -rf "$work"' EXIT
    dump "$work/now.abi"
    status=0
    abidiff --no-show-locs --suppressions "$srcdir/tests/abi/suppressions" "$last" "$work/now.abi" > "$work/report" || status=$?
    cat "$work/report"
    # Bits: 1 error, 2 usage, 4 changed, 8 incompatible. Where functions were only added, 4 is all right.
    if [ $((status & 11)) != 0 ] || { [ "$status" != 0 ] &&
        grep -E '^(Functions|Variables) changes summary:' "$work/report" | grep -q -v ': 0 Removed, 0 Changed'; }; then
        echo "the interface of $(basename "$last") has changed" >&2
        exit 1
    fi
    echo "compatible with $(basename "$last")"
    ;;
*)
    sed -n '5,6s/^# *//p' "$0" >&2
    exit 2
    ;;
esac
