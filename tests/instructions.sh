#!/bin/sh
# SPDX-License-Identifier: MIT
# Instructions of the main CPU kernels, counted by callgrind, against a bound for each: a kernel that takes a third more
# than it did has lost something, on any machine and without a clock.
#
#   tests/instructions.sh            from the build folder, by make check
#   tests/instructions.sh --measure  prints the counts in the form of the table below
#
# The table has what GCC 12 needed at -O2. To update it after a change that is meant: run --measure, put its lines here, and
# say in the commit why a count rose. Other compilers and versions stay within the margin. valgrind knows no AVX-512, whose
# kernels come from the same sources.
set -u
: "${srcdir:=..}"
margin=33 # per cent

# variant, operation, function that is counted, instructions for 100 units
table() {
    cat <<'TABLE'
avx2 forward clattn_attention_forward 8980
avx2 backward clattn_attention_backward 24276
avx2 select clattn_select 3807
avx2 pyramid clattn_pyramid_build 86
c forward clattn_attention_forward 34446
c backward clattn_attention_backward 88080
c select clattn_select 16291
c pyramid clattn_pyramid_build 204
TABLE
}

command -v valgrind > /dev/null 2>&1 || { echo "valgrind is not here"; exit 77; }
[ "$(uname -m)" = x86_64 ] || { echo "the table is for x86-64"; exit 77; }
case " ${USER_CFLAGS-} " in *" -fsanitize"* | *" -O0 "* | *" -Og "* | *" -O1 "*) echo "not built for speed"; exit 77 ;; esac

work=$PWD/tests/instructions.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
table > "$work/table"

# Without debug information, which valgrind may not be able to read: names are enough.
program="./libtool --mode=execute valgrind" file=tests/instructions
if [ -e .libs/libclattn.so.0 ] && [ -e tests/.libs/instructions ] && command -v strip > /dev/null 2>&1; then
    cp .libs/libclattn.so.0 tests/.libs/instructions "$work"
    strip -g "$work/libclattn.so.0" "$work/instructions"
    program="env LD_LIBRARY_PATH=$work valgrind" file=$work/instructions
fi
status=0 counted=0
while read -r variant operation function usual; do
    CLATTN_CPU=$variant OMP_NUM_THREADS=1 $program --tool=callgrind --callgrind-out-file=/dev/null \
        --toggle-collect="$function" "$file" "$operation" > "$work/units" 2> "$work/err"
    got=$?
    if [ $got = 77 ]; then continue; fi
    count=$(sed -n 's/.*Collected *: *\([0-9]*\).*/\1/p' "$work/err")
    units=$(cat "$work/units")
    if [ $got != 0 ] || [ -z "$count" ] || [ "$count" = 0 ]; then
        echo "FAIL: $variant $operation: exit status $got: $(tail -n 5 "$work/err")"
        status=1
        continue
    fi
    counted=$((counted + 1))
    each=$((count * 100 / units))
    if [ "${1-}" = --measure ]; then
        echo "$variant $operation $function $each"
    elif [ "$each" -gt $((usual * (100 + margin) / 100)) ]; then
        echo "FAIL: $variant $operation: $each instructions for 100 units; usual are $usual"
        status=1
    else
        echo "ok: $variant $operation: $each instructions for 100 units; usual are $usual"
    fi
done < "$work/table"
[ $counted -gt 0 ] || { echo "nothing could be counted"; exit 77; }
exit $status
