#!/bin/sh
# SPDX-License-Identifier: MIT
# cl/embed.awk keeps every byte of what kernels may hold: escapes, quotes, trigraphs, tabs, long and empty lines.
set -eu
work=tests/embed.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

awk 'BEGIN {
    print "/* \\ \\\\ \\n \\\" \"quoted\" */"
    print ""
    print "#define JOIN(a, b) a##b \\"
    print "\t/* ??/ ??= & \\& %d %% $x `y` */"
    for (i = 0; i < 3000; i++) printf "long %d ", i
    print "\n\n\nlast"
}' > "$work/first.cl"
echo 'one line' > "$work/second.cl"

$AWK -f "$srcdir/cl/embed.awk" /dev/null "$work/first.cl" "$work/second.cl" > "$work/sources.c"
cat > "$work/main.c" <<'MAIN'
#include <stdio.h>
#include <string.h>
#include "lib/kernel_sources.h"
int main(int argc, char **argv)
{
    for (unsigned i = 0; i < kernel_source_count; i++)
        if (argc == 2 && !strcmp(kernel_sources[i].name, argv[1])) fputs(kernel_sources[i].text, stdout);
    return kernel_source_count != 2 || kernel_sources[2].name || kernel_sources[2].text;
}
MAIN
$CC -I"$srcdir" -o "$work/print" "$work/main.c" "$work/sources.c"
for file in first.cl second.cl; do
    "$work/print" "$file" > "$work/printed"
    cmp "$work/$file" "$work/printed"
done
