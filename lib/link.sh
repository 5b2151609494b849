#!/bin/sh
# SPDX-License-Identifier: MIT
# Links the library by the command given. In the static library that comes of it every internal function and variable
# gets a prefix, lest it meet a function of the user's program that has the same name; a shared library hides them by
# itself. Environment: NM, OBJCOPY (empty: the names stay), AWK.
set -eu
"$@"
archive=.libs/libclattn.a
if [ -z "${OBJCOPY-}" ] || ! [ -e "$archive" ]; then exit 0; fi
names=.libs/libclattn.names
trap 'rm -f "$names" "$archive.new"' EXIT

# Of the lines of nm -g those that define something: value, kind, name; undefined ones have no value.
$NM -g "$archive" | $AWK 'NF == 3 && $2 != "U" && $3 !~ /^_?_?clattn_/ && !seen[$3]++ {
    print $3, "clattn_internal_" $3
}' > "$names"
# -D: no times, no owners, so that two builds give the same file.
$OBJCOPY -D --redefine-syms="$names" "$archive" "$archive.new"
mv -f "$archive.new" "$archive"
