#!/bin/sh
# SPDX-License-Identifier: MIT
# The functions of the public header, the version script and the shared library are the same; the static library has
# them, and nothing that could meet a name of the user's program.
set -eu
header=$srcdir/include/clattn.h
script=$srcdir/lib/clattn.map
work=tests/symbols.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

# Comments may name functions too, so they go first; a declaration is CLATTN_API ... clattn_name(.
awk '{
    while (1) {
        if (inside) {
            if (!(end = index($0, "*/"))) next
            $0 = substr($0, end + 2); inside = 0
        }
        if (!(start = index($0, "/*"))) break
        rest = substr($0, start + 2)
        printf "%s ", substr($0, 1, start - 1)
        $0 = rest; inside = 1
    }
    print
}' "$header" | tr '\n' ' ' | tr ';' '\n' |
    sed -n 's/.*CLATTN_API.*[ *]\(clattn_[a-z0-9_]*\)(.*/\1/p' | LC_ALL=C sort > "$work/header"
sed -n 's/^ *\(clattn_[a-z0-9_]*\);.*/\1/p' "$script" > "$work/script"
LC_ALL=C sort -c "$work/script"
test -s "$work/header"

if ! diff -u "$work/header" "$work/script"; then
    echo "include/clattn.h (-) and lib/clattn.map (+) differ" >&2
    exit 1
fi

# exports LIBRARY OPTION... : the names that it defines for others
exports() {
    library=$1
    shift
    $NM "$@" -g "$library" | awk 'NF > 2 && $(NF-1) ~ /^[TDBRVWCGSi]$/ {print $NF}' |
        sed -e 's/^_clattn/clattn/' -e 's/@.*//' | grep -v '^CLATTN_[0-9]*$' | LC_ALL=C sort
}

if test -e .libs/libclattn.a; then
    exports .libs/libclattn.a > "$work/all"
    grep -v '^clattn_internal_' "$work/all" > "$work/archive"
    # STATIC_OBJCOPY is empty where these tools cannot change the names.
    if test -n "${STATIC_OBJCOPY-}"; then
        grep -q '^clattn_internal_' "$work/all"
    else
        echo "static library: internal names are as in the sources here"
        grep '^clattn_' "$work/archive" | LC_ALL=C comm -12 - "$work/header" > "$work/public"
        mv "$work/public" "$work/archive"
    fi
    if ! diff -u "$work/header" "$work/archive"; then
        echo "include/clattn.h (-) and the names of libclattn.a (+) differ" >&2
        exit 1
    fi
fi

for library in .libs/libclattn.so .libs/libclattn.dylib; do
    test -e "$library" && break
done
if ! test -e "$library"; then
    echo "no shared library in this build: header and version script agree, exports not looked at"
    exit 0
fi
case $library in *.so) dynamic=-D ;; *) dynamic= ;; esac
exports "$library" $dynamic > "$work/library"
if ! diff -u "$work/header" "$work/library"; then
    echo "include/clattn.h (-) and the exports of $library (+) differ" >&2
    exit 1
fi
echo "$(wc -l < "$work/header") functions agree"
