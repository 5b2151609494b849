# SPDX-License-Identifier: MIT
# Gives kernels in PTX the work-group sizes that OpenCL's reqd_work_group_size asks for, as NVIDIA's compiler does and LLVM's
# does not: registers depend on them.
#
#   awk -f reqntid.awk PROGRAM.ll PROGRAM.ptx

# The program as LLVM's text: which kernel has which entry of the metadata, and what that says.
FNR == NR {
    if (/^define .*spir_kernel/ && match($0, /!reqd_work_group_size ![0-9]+/)) {
        id = substr($0, RSTART + 22, RLENGTH - 22)
        match($0, /@[A-Za-z_0-9]+\(/)
        kernel[substr($0, RSTART + 1, RLENGTH - 2)] = id
    }
    if (/^![0-9]+ = !\{i32 [0-9]+, i32 [0-9]+, i32 [0-9]+\}/) {
        id = $1
        gsub(/^.*!\{|i32 |\}.*$/, "")
        size[id] = $0
    }
    next
}
/^\.entry / {
    name = $2
    sub(/\(.*/, "", name)
}
/^\{/ && name {
    if (name in kernel) print ".reqntid " size[kernel[name]]
    name = ""
}
{ print }
