#!/bin/sh
# SPDX-License-Identifier: MIT
# Every source file names its licence in its first lines.
set -eu
cd "$srcdir"
bad=$(find bench cl cpu examples include lib m4 man packaging tests \( -name '*.c' -o -name '*.h' -o -name '*.cl' -o -name '*.sh' -o -name '*.awk' \
    -o -name '*.py' -o -name 'clattn_*.m4' -o -name 'Makefile.inc' -o -name '*.map' -o -name '*.[1-9]' \) \
    ! -path '*.work/*' -type f -exec awk '
    FNR == 1 {seen = 0}
    FNR <= 3 && /SPDX-License-Identifier: MIT/ {seen = 1}
    FNR == 3 && !seen {print FILENAME}' {} +)
if [ -n "$bad" ]; then
    echo "no SPDX-License-Identifier in: $bad" >&2
    exit 1
fi
