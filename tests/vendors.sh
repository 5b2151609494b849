#!/bin/sh
# SPDX-License-Identifier: MIT
# Compiles the programs that the library builds on GPUs with the offline compilers of vendors, for devices that are not
# here, and prints registers, local memory and spills of each kernel. Called by `make check-vendors` in the build folder.
#
#   TARGETS   of gfx90a gfx942 gfx1100 (AMD: clang and libclc), sm_90 (NVIDIA: clang, libclc and ptxas, with the matrix tier
#             up to wgmma, which is for sm_90a), dg2 (Intel: ocloc),
#             spirv (clang, llvm-spirv and spirv-val); by default all
#   KERNELS   a pattern of program names, "*select*"; by default all
#   CLATTN_NO_INSTALL=1  downloads nothing; otherwise Debian packages that are missing are unpacked into the build folder
#
# Exit status: 0 no kernel spills, 1 one does or does not compile, 77 no compiler is here. What is not here is a skip.
set -u
: "${srcdir:?}"
work=$PWD/tests/vendors.work
rm -rf "$work"/kernels* "$work/objects"
mkdir -p "$work/objects"
: "${TARGETS:=gfx90a gfx942 gfx1100 sm_90 dg2 spirv}"
LC_ALL=C
export LC_ALL

skip() { echo "skip  $*"; }

# unpack PACKAGE... : Debian packages below $work/PACKAGE of the first one, without installing them
unpack() {
    [ ! -d "$work/$1" ] || return 0
    [ -z "${CLATTN_NO_INSTALL-}" ] && command -v apt-get > /dev/null && command -v dpkg > /dev/null || return 1
    mkdir -p "$work/$1.debs"
    (cd "$work/$1.debs" && apt-get download "$@" > said 2>&1) || return 1
    mkdir "$work/$1.new"
    for deb in "$work/$1.debs"/*.deb; do
        dpkg -x "$deb" "$work/$1.new" || return 1
    done
    mv "$work/$1.new" "$work/$1"
    rm -rf "$work/$1.debs"
}

# clang and the libclc of the same version: $clang, $clc
find_clang() {
    clang=
    for version in 21 20 19 18 17 16 15 14; do
        command -v clang-$version > /dev/null || continue
        clc=/usr/lib/clc
        if ! dpkg -s libclc-$version > /dev/null 2>&1; then
            unpack libclc-$version || continue
            clc=$work/libclc-$version/usr/lib/clc
        fi
        clang=clang-$version
        return
    done
}
has_target() { "$clang" --print-targets | grep -q "^ *$1 "; }

programs() {
    for source in "$kernels"/*.cl; do
        name=$(basename "$source" .cl)
        case $name in ${KERNELS:-*}) ;; *) continue ;; esac
        echo "$name"
    done
}

# generate TARGET : the programs for it, in $kernels; see tests/vendor_kernels.c
generate() {
    case $1 in
    gfx9*) vendor='0x1002 3 64 mma_amd.cl' ;;
    gfx*) vendor='0x1002 3 32 mma_amd.cl' ;;
    sm_*) vendor='0x10de 4 32 mma_portable.cl' ;;
    spirv) vendor='0 1 32 mma_portable.cl' ;;
    *) vendor='0x8086 2 16 mma_intel.cl -DSG=8' ;;
    esac
    kernels=$work/kernels-$1
    mkdir -p "$kernels"
    tests/vendor_kernels "$kernels" $vendor > "$work/objects/$1.said" && return
    cat "$work/objects/$1.said"
    echo "FAIL  $1: the library does not build its programs"
}

# each TARGET COMPILE READ : calls COMPILE NAME SOURCE for each program, and READ "TARGET  NAME" OUTPUT to print its kernels
each() {
    target=$1
    for name in $(programs); do
        options=$(cat "$kernels/$name.options")
        said=$work/objects/$target-$name.said
        if $2 "$name" "$kernels/$name.cl" > "$said" 2>&1; then
            $3 "$target  $name" "$said"
        else
            echo "FAIL  $target  $name: $(grep -m 1 -i -E 'error|LLVM ERROR' "$said" || tail -n 1 "$said")"
        fi
    done
}

# Drivers inline everything, and know no C99 rule that would want `inline` functions defined a second time.
inline='-fgnu89-inline -mllvm -inline-threshold=100000'

# matrix_used NAME FILES PATTERN : a build of the matrix tier's verbs that does not use matrix units is none
matrix_used() {
    case $name in
    *canary_matrix) grep -q "$3" $2 || echo "FAIL  $1: no instruction of the matrix units" ;;
    esac
}

# ---- AMD
amd_compile() {
    "$clang" -x cl $options $inline -target amdgcn-amd-amdhsa -mcpu="$target" -nogpulib -O3 \
        -Xclang -mlink-builtin-bitcode -Xclang "$clc/amdgcn--amdhsa.bc" -Rpass-analysis=kernel-resource-usage -S "$2" \
        -o "$work/objects/$target-$1.s" &&
        "$clang" -target amdgcn-amd-amdhsa -mcpu="$target" -c "$work/objects/$target-$1.s" -o "$work/objects/$target-$1.o"
}
# Scratch memory is counted by the instructions that go there. Room for it is also set aside where scalar registers are
# kept in lanes of vector registers, and never used.
amd_read() {
    matrix_used "$1" "$work/objects/$target-$name.s" 'v_w*mf*ma_f32_16x16x16'
    {
        awk '/^[a-z_0-9]*:/ {name = substr($1, 1, length($1) - 1)}
            /^\tscratch_(load|store)/ || /^\tbuffer_(load|store).* s\[0:3\]/ {count[name]++}
            END {for (name in count) print "scratch of " name "|" count[name]}' "$work/objects/$target-$name.s"
        sed -n 's/.*remark: *\([A-Z][A-Za-z ]*[a-zA-Z]\)\( \[[a-z/A-Z]*\]\)*: \([A-Za-z_0-9]*\) \[-Rpass.*/\1|\3/p' "$2"
    } | awk -F'|' -v who="$1" '
        function show() {
            if (!name) return
            bad = v["VGPRs Spill"] + 0 || memory["scratch of " name] + 0
            printf "%s  %s %s: registers %d + %d, local %d, spills %d, scratch accesses %d, waves %d\n",
                bad ? "FAIL" : "ok  ", who, name, v["VGPRs"], v["AGPRs"], v["LDS Size"], v["VGPRs Spill"],
                memory["scratch of " name], v["Occupancy"]
        }
        /^scratch of / {memory[$1] = $2; next}
        $1 == "Function Name" {show(); split("", v); name = $2}
        {v[$1] = $2}
        END {show()}'
}
amd() {
    [ -n "$clang" ] || { skip "$1: no clang with its libclc" && return; }
    has_target amdgcn || { skip "$1: $clang has no AMD target" && return; }
    "$clang" -target amdgcn-amd-amdhsa -mcpu="$1" -nogpulib -x cl -fsyntax-only /dev/null 2> /dev/null ||
        { skip "$1: $clang does not know it" && return; }
    [ -e "$clc/amdgcn--amdhsa.bc" ] || { skip "$1: libclc has no AMD library" && return; }
    each "$1" amd_compile amd_read
}

# ---- NVIDIA
nvidia_compile() {
    ptx=$work/objects/$1 architecture=$target
    # wgmma belongs to sm_90a, as does static local memory above 48 KiB, which NVIDIA's OpenCL has on all cards.
    case $target in sm_90) architecture=sm_90a ;; esac
    "$clang" -x cl $options $inline -target nvptx64-nvidia-nvcl -O3 -Wno-linker-warnings -Xclang -target-cpu -Xclang "$target" \
        -Xclang -target-feature -Xclang +ptx80 -Xclang -mlink-builtin-bitcode -Xclang "$clc/nvptx64--nvidiacl.bc" \
        -S -emit-llvm "$2" -o "$ptx.ll" &&
        "$clang" -x ir -target nvptx64-nvidia-nvcl -O3 -Xclang -target-cpu -Xclang "$target" -Xclang -target-feature \
            -Xclang +ptx80 -S "$ptx.ll" -o "$ptx.raw" &&
        ${AWK:-awk} -f "$srcdir/tests/reqntid.awk" "$ptx.ll" "$ptx.raw" > "$ptx.ptx" || return
    # In the text of a program from OpenCL C wgmma is a comment: lib/opencl_hopper.c.
    if grep -q '//sm_90a ' "$2"; then
        mv "$ptx.ptx" "$ptx.plain" && tests/vendor_kernels --hopper "$ptx.plain" > "$ptx.ptx" || return
    fi
    "$ptxas" -v -arch="$architecture" "$ptx.ptx" -o "$ptx.cubin"
}
nvidia_read() {
    case $name in
    *canary_wgmma) grep -q '^[^/]*wgmma.mma_async' "$ptx.ptx" || echo "FAIL  $1: no wgmma in it" ;;
    *canary_mma) grep -q '^[^/]*mma.sync' "$ptx.ptx" || echo "FAIL  $1: no mma.sync in it" ;;
    esac
    awk -v who="$1" '
        /Compiling entry function/ {split($0, part, "\047"); name = part[2]}
        /bytes stack frame/ {stack = $1; stores = $5; loads = $9}
        /Used .* registers/ {
            match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
            local = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART) + 0 : 0
            bad = stack + stores + loads > 0
            printf "%s  %s %s: registers %d, local %d, spills %d, stack %d\n", bad ? "FAIL" : "ok  ", who, name, registers,
                local, stores + loads, stack
        }' "$2"
}
nvidia() {
    ptxas=$(command -v ptxas || ls /usr/local/cuda/bin/ptxas 2> /dev/null)
    [ -n "$ptxas" ] || { skip "$1: there is no ptxas" && return; }
    [ -n "$clang" ] && has_target nvptx64 || { skip "$1: no clang with its libclc and NVPTX" && return; }
    each "$1" nvidia_compile nvidia_read
}

# ---- Intel
find_ocloc() {
    ocloc=$(command -v ocloc) && return
    unpack intel-opencl-icd libigc1 libigdfcl1 libigdgmm12 libopencl-clang14 libllvmspirvlib14 || return
    ocloc=$work/intel-opencl-icd/usr/bin/ocloc
    ocloc_path=$(dirname "$(find "$work/intel-opencl-icd" -name 'libocloc.so' | head -n 1)")
}
intel_compile() {
    dump=$work/objects/$target-$1.dump
    mkdir -p "$dump"
    LD_LIBRARY_PATH=${ocloc_path:+$ocloc_path:}${LD_LIBRARY_PATH-} IGC_ShaderDumpEnable=1 IGC_DumpToCustomDir=$dump \
        "$ocloc" compile -q -file "$2" -device "$target" -options "$options" -out_dir "$work/objects/$target-$1" &&
        ls "$dump"/*.asm > /dev/null
}
# The assembly says how many registers a thread may take, and how many bytes went to memory; flags may spill to registers.
# A kernel is compiled again when it spills; the newest file is what the program contains.
intel_read() {
    matrix_used "$1" "$work/objects/$target-$name.dump/*.asm" dpas
    ls -tr "$work/objects/$target-$name".dump/*.asm | while read -r assembly; do
        awk '/^\/\/\.kernel/ {kernel = $2}
            /^\/\/\.thread_config/ {registers = substr($2, index($2, "=") + 1) + 0}
            /^\/\/\.spill size/ {spill = $3}
            END {print kernel, registers, spill + 0, FILENAME}' "$assembly"
    done | awk -v who="$1" '{
            simd = match($4, /simd[0-9]+/) ? substr($4, RSTART + 4, RLENGTH - 4) : 0
            last[$1] = $1 ": SIMD " simd ", registers of " $2 ", bytes spilled " $3
            word[$1] = $3 > 0 ? "FAIL" : "ok  "
        }
        END {for (kernel in last) print word[kernel] "  " who " " last[kernel]}'
}
intel() {
    find_ocloc || { skip "$1: ocloc is not here" && return; }
    each "$1" intel_compile intel_read
}

# ---- SPIR-V
spirv_compile() {
    # Not optimised: llvm-spirv does not order blocks as spirv-val wants them. 1.2 is what OpenCL 2.2 and older take; shuffles
    # came with 1.3.
    spirv_version=1.2 spirv_target=opencl1.2
    case $options in *CL3.0*) spirv_version=1.3 spirv_target=spv1.3 ;; esac
    "clang-$spirv" -x cl $options -target spir64-unknown-unknown -O0 -Xclang -finclude-default-header -emit-llvm -c "$2" \
        -o "$work/objects/$1.bc" &&
        "llvm-spirv-$spirv" --spirv-max-version=$spirv_version "$work/objects/$1.bc" -o "$work/objects/$1.spv" &&
        spirv-val --target-env $spirv_target "$work/objects/$1.spv"
}
spirv_read() { echo "ok    $1: valid, $(wc -c < "$work/objects/$name.spv") bytes"; }
spirv_all() {
    command -v spirv-val > /dev/null || { skip 'spirv: there is no spirv-val' && return; }
    for spirv in 19 18 17 16 15 14; do
        if command -v clang-$spirv > /dev/null && command -v llvm-spirv-$spirv > /dev/null; then
            each spirv spirv_compile spirv_read
            return
        fi
    done
    skip 'spirv: no clang with a llvm-spirv of its version'
}

# ---- all
find_clang
for wanted in $TARGETS; do
    generate "$wanted"
    case $wanted in
    gfx*) amd "$wanted" ;;
    sm_*) nvidia "$wanted" ;;
    spirv) spirv_all ;;
    *) intel "$wanted" ;;
    esac
done > "$work/result"
cat "$work/result"
failed=$(grep -c '^FAIL' "$work/result")
echo
echo "$(grep -c '^ok' "$work/result") kernels fit, $failed spill or do not compile, $(grep -c '^skip' "$work/result") targets skipped"
[ "$failed" = 0 ] || exit 1
grep -q '^ok' "$work/result" || exit 77
