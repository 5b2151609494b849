#!/bin/sh
# SPDX-License-Identifier: MIT
# clattn run: options of attention and neighborhoods, against values that are known and runs that must be equal.
set -u
: "${srcdir:?}"
sample=$srcdir/tests/data/retrieval16k
program=$PWD/clattn
work=$PWD/tests/run_options.work
rm -rf "$work"
mkdir -p "$work"
case $sample in /*) ;; *) sample=$PWD/$sample ;; esac
cd "$work" || exit 1
checks=0
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# run STATUS ARGUMENT... : runs `clattn run`; its output is in ./stdout and ./stderr.
run() {
    wanted=$1
    shift
    checks=$((checks + 1))
    "$program" run "$@" > stdout 2> stderr < /dev/null
    got=$?
    [ "$got" = "$wanted" ] || fail "clattn run $*: exit status $got instead of $wanted: $(cat stderr)"
}

# refused STATUS WORDS ARGUMENT...
refused() {
    wanted_status=$1 words=$2
    shift 2
    run "$wanted_status" "$@"
    [ ! -s stdout ] || fail "clattn run $*: something on standard output"
    grep -F -q -e "$words" stderr || fail "clattn run $*: '$words' is not in: $(cat stderr)"
}

same() {
    checks=$((checks + 1))
    cmp "$1" "$2" || fail "$3"
}

# numbers WANTED FILE WHAT : the float32 elements of a file, six digits each.
numbers() {
    checks=$((checks + 1))
    got=$(tail -c +129 "$2" | od -A n -v -t f4 | ${AWK:-awk} '{for (i = 1; i <= NF; i++) printf "%.6g ", $i}')
    [ "$got" = "$1 " ] || fail "$3: $got instead of $1"
}

# npy FILE DESCR SHAPE : standard input as the elements of a .npy file.
npy() {
    header="{'descr': '$2', 'fortran_order': False, 'shape': ($3), }"
    printf '\223NUMPY\001\000\166\000%-117s\n' "$header" > "$1"
    cat >> "$1"
}
elements() { tail -c +"$((129 + $2))" "$1" | head -c "$3"; }

# float32, little-endian
f32() {
    for number; do
        case $number in
        0) printf '\0\0\0\0' ;; 1) printf '\0\0\200\077' ;; 2) printf '\0\0\0\100' ;; 3) printf '\0\0\100\100' ;;
        4) printf '\0\0\200\100' ;; 5) printf '\0\0\240\100' ;; 6) printf '\0\0\300\100' ;; 7) printf '\0\0\340\100' ;;
        8) printf '\0\0\0\101' ;; 9) printf '\0\0\020\101' ;; -1e30) printf '\312\362\111\361' ;; *) fail "f32 $number" ;;
        esac
    done
}

# ---- neighborhoods: ten tokens with values 0 to 9 and all logits 0, so a result is the mean of a window
f32 1 1 1 1 1 1 1 1 1 1 | npy ones.npy '<f4' '1, 10, 1, 1'
f32 0 1 2 3 4 5 6 7 8 9 | npy digits.npy '<f4' '1, 10, 1, 1'
f32 4 9 | npy extra.npy '<f4' '1, 2, 1, 1'
line="--q ones.npy --k ones.npy --v digits.npy --scale 0 --out out.npy --lse lse.npy"
for backend in reference cpu; do
    run 0 $line --backend $backend --layout-dims 10 --window 4
    numbers '1.5 1.5 1.5 2.5 3.5 4.5 5.5 6.5 7.5 7.5' out.npy "window 4, $backend"
    numbers '1.38629 1.38629 1.38629 1.38629 1.38629 1.38629 1.38629 1.38629 1.38629 1.38629' lse.npy lse
    run 0 $line --backend $backend --layout-dims 10 --window 5 --stride 3
    numbers '2 2 2 4 4 4 7 7 7 7' out.npy "window 5, stride 3, $backend"
    run 0 $line --backend $backend --layout-dims 10 --window 5 --stride 3 --causal-axes 1
    numbers '0 0.5 1 2 2.5 3 5 5.5 6 7' out.npy "causal window 5, stride 3, $backend"
    run 0 $line --backend $backend --layout-dims 10 --window 3 --dilation 3
    numbers '3 4 5 3 4 5 6 4 5 6' out.npy "window 3, dilation 3, $backend"
    run 0 $line --backend $backend --layout-dims 2x5 --window 2x3 --q-tile 2x4 --kv-tile 2x8
    numbers '3.5 3.5 4.5 5.5 5.5 3.5 3.5 4.5 5.5 5.5' out.npy "layout 2x5, $backend"
    run 0 $line --backend $backend --layout-dims 10 --window 2 --stride 2 --extra-k extra.npy --extra-v extra.npy
    numbers '3.5 3.5 4.5 4.5 5.5 5.5 6.5 6.5 7.5 7.5' out.npy "extra keys, $backend"
    grep -q '^attention  layout 10, window 2, stride 2, .* 2 extra keys$' stdout || fail "text: $(cat stdout)"
done

# ---- what does not go together, or does not fit
files="--q ones.npy --k ones.npy --v digits.npy --backend reference"
refused 2 '--layout-dims AxBxC is missing; a sliding window is --window-tokens' $files --window 4
refused 2 '--window AxBxC is missing' $files --layout-dims 10
refused 2 'axis 0: window 6 * dilation 2 is beyond the length 10' $files --layout-dims 10 --window 6 --dilation 2
for option in '--selector pisa' '--blocks b.npy' --causal --no-causal '--forced none' '--topk 3' '--leaf 16' \
    '--softcap 1' '--window-tokens 3' '--sink s.npy' '--bias b.npy' '--cu-seqlens-q 0,10'; do
    name=${option%% *}
    refused 2 "--layout-dims does not go with $name" $files --layout-dims 10 --window 4 $option
done
refused 2 '--extra-k and --extra-v go together' $files --layout-dims 10 --window 4 --extra-k extra.npy
refused 2 '--extra-k and --extra-v need --layout-dims' $files --extra-k extra.npy --extra-v extra.npy
refused 1 'ones.npy has length 10 but the layout 4x4 has 16 tokens' $files --layout-dims 4x4 --window 2
f32 1 1 | npy wide.npy '<f4' '1, 1, 1, 2'
refused 1 'expected is the type, batch, heads and dim of --k' $files --layout-dims 10 --window 4 \
    --extra-k wide.npy --extra-v extra.npy
f32 1 | npy short.npy '<f4' '1, 1, 1, 1'
refused 1 'short.npy has length 1 but extra.npy has 2' $files --layout-dims 10 --window 4 --extra-k extra.npy \
    --extra-v short.npy
for cap in 0 -1 1e39; do
    refused 2 '--softcap: a positive number' $files --softcap $cap
done
refused 2 "--window-tokens: '0' is not a whole number from 1" $files --window-tokens 0
refused 2 '--cu-seqlens-q and --cu-seqlens-k go together' $files --cu-seqlens-q 0,10
refused 2 'is not a list of numbers' $files --cu-seqlens-q 0,,10 --cu-seqlens-k 0,10
refused 2 'is not a list of numbers' $files --cu-seqlens-q '' --cu-seqlens-k 0,10
refused 1 'entry 0 is 1; they begin with 0' $files --cu-seqlens-q 1,10 --cu-seqlens-k 0,10
refused 1 'entry 2 is 3; they begin with 0 and never descend' $files --cu-seqlens-q 0,4,3,10 --cu-seqlens-k 0,10
refused 1 '--cu-seqlens-k ends at 9, but ones.npy has length 10' $files --cu-seqlens-q 0,10 --cu-seqlens-k 0,9
refused 1 '--cu-seqlens-q has 3 numbers but --cu-seqlens-k has 2' $files --cu-seqlens-q 0,5,10 --cu-seqlens-k 0,10
refused 1 'none.npy: No such file' $files --cu-seqlens-q none.npy --cu-seqlens-k 0,10
refused 1 'expected is int32 of one dimension' $files --cu-seqlens-q ones.npy --cu-seqlens-k 0,10
refused 1 'expected is float32 [q_heads]' $files --sink digits.npy
refused 1 'expected is float32 [leaves][q_heads]' $files --bias digits.npy

refused 2 "pisa takes no ':beam=3'" $files --selector pisa:beam=3
refused 2 "beam: '0' is not a number from 1 to 512" $files --selector robust:beam=0
refused 2 "score: 'mean' is not one of lse, bound, blend, ahead" $files --selector robust:vote=0,score=mean
refused 2 "vote: '2' is not 0 (sum) or 1 (softmax)" $files --selector robust:vote=2
refused 2 "parts: '3' is not 1 or 4" $files --selector robust:parts=3
refused 2 "'' is not one of beam=" $files --selector robust:
refused 2 "'beams' is not one of beam=, score=, vote=, prefilter=, parts=" $files --selector robust:beams=3
refused 2 "prefilter: '513' is not a number from 0 to 512" $files --selector robust:beam=3,prefilter=513+local:1

# ---- 32 queries x 2 heads, 200 keys x 1 head, dim 64 of the sample
elements "$sample/q.npy" 0 8192 | npy q.npy '<f2' '1, 32, 2, 64'
elements "$sample/k.npy" 0 25600 | npy k.npy '<f2' '1, 200, 1, 64'
elements "$sample/v.npy" 0 25600 | npy v.npy '<f2' '1, 200, 1, 64'
files="--q q.npy --k k.npy --v v.npy --backend reference"

# Robust selection: what was asked for is told; without bounds and vote, a narrow beam is pisa and a wide one flat-lse.
for pair in pisa=robust:beam=1,score=lse,vote=sum,prefilter=0 flat-lse=robust:beam=64,vote=0,prefilter=0,parts=1; do
    for selector in ${pair%%=*} ${pair#*=}; do
        run 0 $files --leaf 16 --topk 4 --selector $selector --blocks ${selector%%:*}.npy
    done
    same ${pair%%=*}.npy robust.npy "$pair"
done
grep -q '^attention .* robust:beam=64,score=ahead,vote=0,prefilter=0,parts=1, at most 4 of 13' stdout || fail "robust: $(cat stdout)"
run 0 $files --leaf 16 --topk 4 --selector robust:beam=3+local:1 --out out.npy

# Packed sequences are as each alone; an empty one changes nothing.
elements q.npy 0 3072 | npy q0.npy '<f2' '1, 12, 2, 64'
elements q.npy 3072 5120 | npy q1.npy '<f2' '1, 20, 2, 64'
for name in k v; do
    elements $name.npy 0 10240 | npy ${name}0.npy '<f2' '1, 80, 1, 64'
    elements $name.npy 10240 15360 | npy ${name}1.npy '<f2' '1, 120, 1, 64'
done
printf '\0\0\0\0\014\0\0\0\014\0\0\0\040\0\0\0' | npy cu.npy '<i4' '4,'
run 0 $files --leaf 16 --topk 4 --cu-seqlens-q cu.npy --cu-seqlens-k 0,80,80,200 --out out.npy --blocks blocks.npy
grep -q '^attention  causal, scale 0.125, 3 sequences, pisa' stdout || fail "text: $(cat stdout)"
for n in 0 1; do
    run 0 --q q$n.npy --k k$n.npy --v v$n.npy --backend reference --leaf 16 --topk 4 --out out$n.npy --blocks blocks$n.npy
done
for name in out blocks; do
    tail -c +129 $name.npy > packed
    { tail -c +129 ${name}0.npy && tail -c +129 ${name}1.npy; } > alone
    same packed alone "packed $name"
done

# A full neighborhood is dense attention.
tokens="--q k.npy --k k.npy --v v.npy --backend reference"
run 0 $tokens --selector dense --no-causal --out dense.npy
run 0 $tokens --layout-dims 5x40 --window 5x40 --out out.npy
same dense.npy out.npy 'a full window differs from dense'
run 0 $tokens --selector dense --out dense.npy
run 0 $tokens --layout-dims 200 --window 200 --causal-axes 1 --out out.npy
same dense.npy out.npy 'a full causal window differs from dense'

# A window of one token gives its value.
run 0 $files --selector dense --window-tokens 1 --out value.npy
run 0 --q value.npy --k value.npy --v value.npy --backend reference --window-tokens 1 --out out.npy
same value.npy out.npy 'a window of one token differs from its value'
run 0 $files --selector dense --out dense.npy
run 0 $files --selector dense --window-tokens 200 --out out.npy
same dense.npy out.npy 'a window of all tokens differs from none'

# Logits bounded by almost nothing are all alike.
run 0 $files --selector dense --softcap 1e-30 --out out.npy
run 0 $files --selector dense --scale 0 --out other.npy
same out.npy other.npy 'a tiny soft cap differs from scale 0'

# A sink of 0 beside 200 logits of 0; one far below changes nothing.
f32 0 -1e30 | npy sink.npy '<f4' '2,'
run 0 $files --selector dense --no-causal --scale 0 --sink sink.npy --lse lse.npy
{ head -c 128 lse.npy && tail -c 8 lse.npy; } > last.npy
numbers '5.3033 5.29832' last.npy sink

# A bias that leaves the first 64 keys to one head and keys 64 to 191 to the other.
f32 0 -1e30 -1e30 0 -1e30 0 -1e30 -1e30 | npy bias.npy '<f4' '4, 2'
run 0 $files --selector dense --no-causal --scale 0 --bias bias.npy --lse lse.npy
{ head -c 128 lse.npy && tail -c 8 lse.npy; } > last.npy
numbers '4.15888 4.85203' last.npy bias

echo "$checks checks, $failures failed"
[ "$failures" = 0 ] || exit 1
cd .. && rm -rf "$work"
