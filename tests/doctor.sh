#!/bin/sh
# SPDX-License-Identifier: MIT
# `clattn doctor` with drivers that work, crash, hang, are missing or name nothing, and without any.
set -u
: "${srcdir:?}"
program=$PWD/clattn
json_value=$PWD/tests/json_value
[ -x "$json_value" ] || json_value=''
work=$PWD/tests/doctor.work
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1
failures=0
unset CLATTN_DEVICE CLATTN_PLATFORMS CLATTN_TIER OPENCL_VENDOR_PATH OCL_ICD_FILENAMES

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# examine STATUS FOLDER OPTION... : the doctor with the drivers of a folder; its output is in ./stdout
examine() {
    wanted=$1 vendors=$2
    shift 2
    OCL_ICD_VENDORS=$vendors "$program" doctor "$@" > stdout 2> stderr < /dev/null
    got=$?
    [ "$got" = "$wanted" ] || fail "$vendors: exit status $got instead of $wanted: $(cat stdout stderr)"
    [ ! -s stderr ] || fail "$vendors: $(cat stderr)"
}
says() { grep -q -e "$1" stdout || fail "'$1' is not in: $(cat stdout)"; }

if "$program" info | grep -q '^built in.* opencl'; then has_opencl=1; else has_opencl=0; fi

# ---- no driver at all: healthy
mkdir none
examine 0 "$work/none"
says '^healthy$'
says '^automatic  cpu '
if [ "$has_opencl" = 0 ]; then
    says '^hint: this build has no OpenCL'
    [ "$failures" = 0 ] || exit 1
    rm -rf "$work"
    exit 0
fi
says '^hint: no OpenCL driver in '
examine 0 "$work/not-there.d/"
"$program" doctor --timeout 0 > stdout 2>&1
[ $? = 2 ] || fail 'a time limit of 0 is not refused'

# ---- drivers of ours, which are no good
cat > bad.c <<'CODE'
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
/* What a loader asks a driver first. */
static int suffer(void)
{
    if (BAD == 1) {
        fputs("bad driver: assertion failed\n", stderr);
        abort();
    }
    for (;;)
        sleep(1);
}
int clIcdGetPlatformIDsKHR(unsigned count, void *platforms, unsigned *found);
int clIcdGetPlatformIDsKHR(unsigned count, void *platforms, unsigned *found)
{
    (void)count, (void)platforms, (void)found;
    return suffer();
}
void *clGetExtensionFunctionAddress(const char *name);
void *clGetExtensionFunctionAddress(const char *name)
{
    (void)name;
    suffer();
    return NULL;
}
CODE
# A compiler is there, since the program was built; the flags are several words.
for kind in 1 2; do
    $CC -shared -fPIC -DBAD=$kind -o "libbad$kind.so" bad.c 2> said || fail "a driver for the test: $(cat said)"
done
mkdir crash hang missing empty
echo "$work/libbad1.so" > crash/crash.icd
echo "$work/libbad2.so" > hang/hang.icd
echo "$work/no-such-library.so" > missing/missing.icd
: > empty/empty.icd

examine 1 "$work/crash"
says '^not healthy$'
says '^crash.icd .* crashed '
says '^problem: .*crash/crash.icd crashed while .*Aborted; it said: bad driver: assertion failed'
says '^problem: the automatic choice crashed'
examine 1 "$work/hang" --timeout 2 --quick
says '^problem: .*hang/hang.icd hangs while .*no end after 2 s'
examine 1 "$work/missing"
says '^problem: .*missing/missing.icd: .*no-such-library.so'
says '^automatic  cpu '
examine 1 "$work/empty"
says '^problem: .*empty/empty.icd: the file names no library'
# One file or library in place of a folder, as ocl-icd takes it.
examine 1 "$work/missing/missing.icd" --quick
says 'missing.icd: .*no-such-library.so'

# ---- the machine's own drivers, and one bad among them: the others are still tried
found=0
mkdir both
for icd in "${OCL_ICD_VENDORS:-/etc/OpenCL/vendors}"/*.icd; do
    [ -e "$icd" ] || continue
    cp "$icd" both/
    found=$((found + 1))
done
if [ "$found" -gt 0 ]; then
    OCL_ICD_VENDORS=$work/both "$program" doctor --quick > alone 2> stderr || fail "drivers of this machine: $(cat alone)"
    cp crash/crash.icd both/
    examine 1 "$work/both" --quick
    for icd in both/*.icd; do
        name=$(basename "$icd")
        [ "$name" = crash.icd ] && continue
        state=$(sed -n "s/^$name  *[^ ]*  *\(.*[^ ]\)  *[0-9]*\$/\1/p" alone)
        says "^$name .* $state "
    done
    # What of the quirk table applies to which device, and why.
    if grep -q '^[^ ].*\.icd .* works  *[1-9]' stdout; then
        printf '[of this test]\ndriver =\ntier = portable\nquirks = none-such\n' > quirks.conf
        CLATTN_QUIRKS=$work/quirks.conf OCL_ICD_VENDORS=$work/both "$program" doctor --quick > stdout 2> stderr
        says '^quirks     of .*of this test (driver = ): tier = portable, quirks = none-such'
        says "not understood: $work/quirks.conf:4: there is no quirk 'none-such'"
    fi
fi

# ---- JSON
if [ -n "$json_value" ]; then
    examine 1 "$work/crash" --json --quick
    "$json_value" healthy drivers.0.state drivers.0.ended automatic.state cpu.devices.0.variant < stdout > values ||
        fail 'JSON lacks something'
    printf '%s\n' false crashed Aborted crashed ref | cmp - values || fail "JSON: $(cat values)"
    examine 0 "$work/none" --json --quick
    "$json_value" healthy automatic.device.backend < stdout > values || fail 'JSON lacks something'
    printf '%s\n' true cpu | cmp - values || fail "JSON: $(cat values)"
fi

# ---- the program cache
if "$program" info | grep -q '^built in.* xxhash'; then
    unset CLATTN_CACHE_SIZE
    mkdir -m 700 open-cache
    chmod 777 open-cache
    CLATTN_CACHE_DIR=$work/open-cache examine 0 "$work/none" --quick
    says '^hint: programs are compiled every time: others may write to it'
    says 'mode 0777; not used$'
    CLATTN_CACHE_DIR=/dev/null/no examine 0 "$work/none" --quick
    says 'compiled every time: it cannot be reached'
    CLATTN_CACHE_DIR=$work/one/two examine 0 "$work/none" --quick
    says '^cache .*one/two: not made yet$'
    [ ! -e one ] || fail 'the doctor made a folder'
fi

leftover=$(ls -d "${TMPDIR:-/tmp}"/clattn-doctor-* 2> /dev/null | head -n 1)
[ -z "$leftover" ] || echo "note: $leftover is there; another run may own it"
[ "$failures" = 0 ] || exit 1
cd / && rm -rf "$work"
