#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs the tests that use OpenCL on every implementation that this machine has, each alone in the loader's folder, and
# prints a table of them. Called by `make check-portability` in the build folder:
#
#   portability.sh PROGRAM...    of these, the ones whose source asks for an OpenCL device
#
#   IMPLEMENTATIONS  names of those to run; by default all: the .icd files of the loader's folder (pocl, rusticl, and so
#                    on), oclgrind, intel-cpu (of the Python package intel-opencl-rt, downloaded into the build folder)
#   ONLY             names of programs to run on them; by default all
#   CLATTN_TEST_SIZE  tiny: small cases everywhere; interpreters have small cases only anyway
#   LIMIT            seconds for one program, 900 by default
#   CLATTN_NO_INSTALL=1  downloads nothing
#
# Exit status: 0 all passed, 1 something failed, 77 no implementation is here.
set -u
: "${srcdir:?}"
. "$srcdir/tests/environment.sh"
: "${LIMIT:=900}"
work=$PWD/tests/portability.work
mkdir -p "$work"
if ! [ -x tests/json_value ]; then
    echo 'the program was built without JSON, which this reads'
    exit 77
fi
table=$work/table
printf '%s\n' 'implementation|version|tier|passed|failed|skipped|why' > "$table"
vendors=${OCL_ICD_VENDORS:-/etc/OpenCL/vendors}
unset OCL_ICD_VENDORS CLATTN_PLATFORMS CLATTN_DEVICE CLATTN_TIER OCL_ICD_FILENAMES OPENCL_VENDOR_PATH
CLATTN_TEST_BACKEND=opencl
export CLATTN_TEST_BACKEND
base_library_path=${LD_LIBRARY_PATH-}
status=0 ran=0 preload=${LD_PRELOAD-}

wanted() {
    case " ${IMPLEMENTATIONS-} " in '  ' | *" $1 "*) return 0 ;; *) return 1 ;; esac
}
row() { printf '%s|%s|%s|%s|%s|%s|%s\n' "$@" >> "$table"; }
limited() {
    if command -v timeout > /dev/null; then timeout -k 10 "$LIMIT" "$@"; else "$@"; fi
}

# Those of the arguments whose source looks for a device.
programs=
for program; do
    name=$(basename "$program")
    case " ${ONLY-} " in '  ' | *" $name "*) ;; *) continue ;; esac
    if grep -q -E 'targets_open|has_device\(' "$srcdir/tests/$name.c"; then programs="$programs $program"; fi
done

# What a simulator found in our kernels; its exit status does not say.
kernel_reports() {
    [ -s "$1" ] && grep -E \
        'Data race|Invalid (read|write|access)|Uninitialized|uninitialized|divergence|exceeds static array|Unaligned'
}

# run NAME ICD : all programs with the driver of one .icd file
run() {
    name=$1 folder=$work/$1
    rm -rf "$folder"
    mkdir -p "$folder/vendors"
    cp "$2" "$folder/vendors/" || return
    OCL_ICD_VENDORS=$folder/vendors
    export OCL_ICD_VENDORS
    if ! ./clattn info --json > "$folder/info" 2> "$folder/said"; then
        why="clattn info: $(tail -n 1 "$folder/said")"
        status=1
        row "$name" - - 0 1 0 "$why"
        return
    fi
    if ! tests/json_value devices.2.name devices.2.driver devices.2.variants < "$folder/info" > "$folder/values" 2> \
        "$folder/said"; then
        row "$name" - - - - - "skipped: it offers no device"
        return
    fi
    device=$(sed -n 1p "$folder/values") version=$(sed -n 2p "$folder/values") tiers=$(sed -n 3p "$folder/values")
    echo "== $name: $device, $version"
    ran=1
    logs= why=
    for program in $programs; do
        log=$folder/$(basename "$program").log reports=$folder/$(basename "$program").reports
        begin=$(date +%s)
        # These count memory, which has to come back; their buffers keep their sizes.
        case $program in *test_opencl_runtime | *test_cycles) library=${LD_PRELOAD-} ;; *) library=$preload ;; esac
        OCLGRIND_LOG=$reports LD_PRELOAD=$library limited "$program" > "$log" 2>&1
        code=$?
        case $code in
        0) result=PASS ;;
        77) result=SKIP ;;
        *) result=FAIL ;;
        esac
        found=
        [ "$code" != 124 ] || found=" no end after $LIMIT s"
        if kernel_reports "$reports" > "$reports.kernel"; then
            result=FAIL
            found=" $(head -n 1 "$reports.kernel")"
        fi
        found="$found$(sed -n 's/^\[  FAILED  \] \(test_[a-z_0-9]*\)$/ \1/p' "$log" | sort -u | tr -d '\n')"
        [ "$result" != FAIL ] || why="$why $(basename "$program"):$found;"
        echo ":global-test-result: $result" > "${log%.log}.trs"
        logs="$logs $log"
        echo "   $result $(basename "$program") ($(($(date +%s) - begin)) s)"
    done
    # A list of paths below the build folder, without blanks of our own making.
    counts=$($SHELL "$srcdir/tests/summary.sh" $logs) || status=1
    row "$name" "$version" "$tiers" $(echo "$counts" | tr -c '0-9\n' ' ') "${why# }"
}

# ---- the loader's folder
for icd in "$vendors"/*.icd; do
    [ -e "$icd" ] || continue
    name=$(basename "$icd" .icd)
    wanted "$name" || continue
    # Software rendering has to be asked for.
    if [ "$name" = rusticl ]; then RUSTICL_ENABLE=${RUSTICL_ENABLE-llvmpipe} && export RUSTICL_ENABLE; fi
    run "$name" "$icd"
done

# ---- oclgrind: checks every access, so that what others compute rightly by luck is found
if wanted oclgrind; then
    library=
    for place in /usr/lib/oclgrind /usr/lib64/oclgrind /usr/local/lib/oclgrind /usr/lib /usr/lib64 /usr/local/lib; do
        if [ -z "$library" ] && [ -e "$place/liboclgrind-rt-icd.so" ]; then library=$place/liboclgrind-rt-icd.so; fi
    done
    if [ -n "$library" ] && ! ${CC:-cc} -shared -fPIC -o "$work/oclgrind_memory.so" "$srcdir/tests/oclgrind_memory.c"; then
        row oclgrind - - 0 1 0 "tests/oclgrind_memory.c does not compile"
        status=1
    elif [ -n "$library" ]; then
        preload=$work/oclgrind_memory.so
        echo "$library" > "$work/oclgrind.icd"
        OCLGRIND_DATA_RACES=1 OCLGRIND_UNINITIALIZED=1 OCLGRIND_MAX_ERRORS=20
        export OCLGRIND_DATA_RACES OCLGRIND_UNINITIALIZED OCLGRIND_MAX_ERRORS
        run oclgrind "$work/oclgrind.icd"
        preload=${LD_PRELOAD-}
    else
        row oclgrind - - - - - 'skipped: liboclgrind-rt-icd.so is not here'
    fi
fi

# ---- Intel's runtime for CPUs, unpacked into the build folder
intel_install() {
    [ ! -e "$work/intel/lib/libintelocl.so" ] || return 0
    [ -z "${CLATTN_NO_INSTALL-}" ] || { echo 'it is not here, and nothing may be downloaded' && return 1; }
    command -v pip3 > /dev/null || { echo 'it is not here, and there is no pip3 to download it' && return 1; }
    rm -rf "$work/intel"
    mkdir -p "$work/intel/lib"
    # libintelocl.so needs libimf, libsvml, libirng and libintlc, which its package does not ask for.
    pip3 download -q --disable-pip-version-check --retries 1 --timeout 30 --only-binary :all: -d "$work/intel" \
        intel-opencl-rt intel-cmplr-lib-rt > "$work/intel/said" 2>&1 ||
        { echo "pip3 cannot download it: $(tail -n 1 "$work/intel/said")" && return 1; }
    python3 - "$work/intel" <<'CODE' || { echo 'its packages are not as expected' && return 1; }
import glob, os, sys, zipfile
folder = sys.argv[1]
for wheel in glob.glob(folder + "/*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = os.path.basename(name)
            # The loader and hwloc are those of the system.
            if "/data/lib/" in name and base and not base.startswith(("libOpenCL", "libhwloc", "libintelocl_emu")):
                with open(os.path.join(folder, "lib", base), "wb") as file:
                    file.write(archive.read(name))
    os.unlink(wheel)
sys.exit(not os.path.exists(os.path.join(folder, "lib", "libintelocl.so")))
CODE
}
if wanted intel-cpu; then
    case $(uname -s -m) in
    'Linux x86_64')
        if why=$(intel_install); then
            echo "$work/intel/lib/libintelocl.so" > "$work/intel-cpu.icd"
            LD_LIBRARY_PATH=$work/intel/lib${base_library_path:+:$base_library_path}
            export LD_LIBRARY_PATH
            run intel-cpu "$work/intel-cpu.icd"
        else
            row intel-cpu - - - - - "skipped: $why"
        fi
        ;;
    *) row intel-cpu - - - - - 'skipped: it is for Linux on x86-64' ;;
    esac
fi

echo
awk -F'|' '{for (i = 1; i < NF; i++) {cell[NR, i] = $i; if (length($i) > width[i]) width[i] = length($i)} last[NR] = $NF; n = NF}
    END {for (r = 1; r <= NR; r++) {for (i = 1; i < n; i++) printf "%-*s  ", width[i], cell[r, i]; print last[r]}}' "$table"
if [ "$ran" = 0 ]; then
    echo 'no OpenCL implementation is here'
    exit 77
fi
exit "$status"
