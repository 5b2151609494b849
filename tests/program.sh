#!/bin/sh
# SPDX-License-Identifier: MIT
# The command-line program: usage errors, files that do not fit, exit statuses, round trips through files, JSON.
set -u
: "${srcdir:?}"
sample=$srcdir/tests/data/retrieval16k
program=$PWD/clattn
json_value=$PWD/tests/json_value
[ -x "$json_value" ] || json_value=''
work=$PWD/tests/program.work
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

# run_clattn STATUS ARGUMENT... : runs the program; its output is in ./stdout and ./stderr.
run_clattn() {
    wanted=$1
    shift
    checks=$((checks + 1))
    "$program" "$@" > stdout 2> stderr < /dev/null
    got=$?
    [ "$got" = "$wanted" ] || fail "clattn $*: exit status $got instead of $wanted: $(cat stderr)"
}

# refused STATUS WORDS ARGUMENT... : one line on standard error that begins with the program's name and has
# WORDS in it, and nothing on standard output.
refused() {
    wanted_status=$1
    words=$2
    shift 2
    run_clattn "$wanted_status" "$@"
    [ ! -s stdout ] || fail "clattn $*: something on standard output"
    [ "$(wc -l < stderr)" = 1 ] || fail "clattn $*: not one line: $(cat stderr)"
    case $(cat stderr) in
    'clattn: '* | "clattn ${1-}: "*) ;;
    *) fail "clattn $*: no name in front: $(cat stderr)" ;;
    esac
    grep -F -q -e "$words" stderr || fail "clattn $*: '$words' is not in: $(cat stderr)"
}

same() {
    checks=$((checks + 1))
    cmp "$1" "$2" || fail "$3"
}

# npy FILE DESCR SHAPE : standard input as the elements of a .npy file, version 1.0.
npy() {
    header="{'descr': '$2', 'fortran_order': False, 'shape': ($3), }"
    printf '\223NUMPY\001\000\166\000%-117s\n' "$header" > "$1"
    cat >> "$1"
}

# elements FILE FIRST COUNT : COUNT bytes of the elements of a sample's file.
elements() { tail -c +"$((129 + $2))" "$1" | head -c "$3"; }

# ---- the program itself
run_clattn 0 help
grep -q '^  run ' stdout || fail 'help does not name run'
run_clattn 0 --version
grep -Eq '^clattn [0-9]+\.[0-9]+\.[0-9]+$' stdout || fail 'no version'
run_clattn 2
for name in info doctor run decode check demo pattern simulate bench; do
    run_clattn 0 "$name" --help
    grep -q "^Usage: clattn $name" stdout || fail "$name --help has no usage line"
    cp stdout help
    run_clattn 0 help "$name"
    same stdout help "help $name differs from $name --help"
done
refused 2 "unknown subcommand 'walk'" walk
refused 2 "unknown option '--walk'" --walk
refused 2 "unknown subcommand 'walk'" help walk
refused 2 "unexpected argument 'me'" help run me
if [ -w /dev/full ]; then
    checks=$((checks + 1))
    "$program" help > /dev/full 2> stderr && fail 'a full disk is not noticed'
    grep -q 'No space left' stderr || fail 'a full disk is not named'
fi

# ---- options
files="--q q.npy --k k.npy --v v.npy"
refused 2 '--q FILE is missing' run
refused 2 '--v FILE is missing' run --q q.npy --k k.npy
refused 2 "unknown option '--frobnicate'" run $files --frobnicate
refused 2 "option '--topk' needs a value" run $files --topk
refused 2 "'--causal' takes no value" run $files --causal=1
refused 2 "unexpected argument 'x.npy'" run $files x.npy
for value in 0 -1 8x '' ' 8' +8 1e1 513 99999999999999999999; do
    refused 2 "'$value' is not a whole number from 1 to 512" run $files --topk "$value"
done
for value in '' x 1,5 nan inf 0x10 1e999 '1 ' 1.5.5; do
    refused 2 "--scale: '$value' is not a number" run $files --scale "$value"
done
refused 2 'beyond float32' run $files --scale 1e300
refused 2 "'best' is not one of pisa, pisa1, pisa2, flat-mean, flat-lse, dense, robust" run $files --selector best
refused 2 "--leaf: '48' is not one of 16, 32, 64, 128" run $files --leaf 48
refused 2 "'htbd' is not one of bthd, bhtd" run $files --layout htbd
refused 2 "'tpu' is not one of auto, reference, cpu, opencl" run $files --backend tpu
refused 2 "'middle' is not one of" run $files --forced first,middle
refused 2 'previous needs current' run $files --forced previous
refused 2 'does not go with --backend cpu' run $files --backend cpu --device 0
refused 2 'an empty name' run $files --device ''
refused 2 'makes no block lists' run $files --selector dense --blocks b.npy
refused 2 'nor a pattern: column 7: ' run $files --selector local:x
refused 2 "'+' is missing in 'pisa local'" run $files --selector 'pisa local'
refused 2 'no fixed length' run $files --selector pisa+local --blocks b.npy
refused 2 "unknown option '--frobnicate'" check --frobnicate
refused 2 'is what the others are compared with' check --backend reference
refused 2 "unknown option '--frobnicate'" demo --frobnicate
refused 2 "unknown option '--frobnicate'" info --frobnicate

# ---- small inputs cut from the sample: 32 queries x 2 heads, 200 keys x 1 head, dim 64
elements "$sample/q.npy" 0 8192 | npy q.npy '<f2' '1, 32, 2, 64'
elements "$sample/k.npy" 0 25600 | npy k.npy '<f2' '1, 200, 1, 64'
elements "$sample/v.npy" 0 25600 | npy v.npy '<f2' '1, 200, 1, 64'
reference="--backend reference --leaf 16 --topk 4"

# ---- files that do not fit
refused 1 'none.npy: No such file or directory' run --q none.npy --k k.npy --v v.npy
refused 1 'is a directory' run --q . --k k.npy --v v.npy
: > empty.npy
refused 1 'empty.npy: is empty' run --q q.npy --k empty.npy --v v.npy
head -c 10000 k.npy > cut.npy
refused 1 'cut.npy: is truncated' run --q q.npy --k cut.npy --v v.npy
elements "$sample/k.npy" 0 25600 | npy bad.npy '<f2' '1, 100, 2, 64'
refused 1 'v.npy has length 200 but bad.npy has 100' run --q q.npy --k bad.npy --v v.npy
elements "$sample/k.npy" 0 25600 | npy bad.npy '<f2' '1, 200, 2, 32'
refused 1 'v.npy has heads 1 but bad.npy has 2' run --q q.npy --k bad.npy --v v.npy
elements "$sample/k.npy" 0 12800 | npy bad.npy '<f2' '1, 200, 1, 32'
refused 1 'bad.npy has dim 32 but q.npy has 64' run --q q.npy --k bad.npy --v v.npy
elements "$sample/k.npy" 0 25600 | npy bad.npy '<f2' '2, 100, 1, 64'
refused 1 'bad.npy has batch 2 but q.npy has 1' run --q q.npy --k bad.npy --v v.npy
elements "$sample/q.npy" 0 6144 | npy bad.npy '<f2' '1, 16, 3, 64'
elements "$sample/k.npy" 0 25600 | npy bad2.npy '<f2' '1, 100, 2, 64'
refused 1 'bad.npy has 3 heads, which is not a multiple of the 2 heads of bad2.npy' \
    run --q bad.npy --k bad2.npy --v bad2.npy
elements "$sample/k.npy" 0 25600 | npy bad.npy '<f2' '200, 64'
refused 1 '3 or 4 dimensions' run --q q.npy --k bad.npy --v v.npy
elements "$sample/k.npy" 0 51200 | npy bad.npy '<f4' '1, 200, 1, 64'
refused 1 'the types must be the same' run --q q.npy --k bad.npy --v v.npy
elements "$sample/k.npy" 0 51200 | npy bad.npy '<i4' '1, 200, 1, 64'
refused 1 'holds int32' run --q bad.npy --k bad.npy --v bad.npy
refused 1 'is not what --dtype asks for' run $files --dtype f32
refused 1 'No such file or directory' run $files $reference --out none/out.npy
refused 2 'to the same file' run $files $reference --out here.npy --lse here.npy
[ ! -e here.npy ] || fail 'a refused output was made'
elements "$sample/q.npy" 0 10280 | npy wide.npy '<f2' '1, 20, 1, 257'
refused 1 '257' run --q wide.npy --k wide.npy --v wide.npy --backend reference

# ---- a round trip, and results that must be equal
run_clattn 0 run $files $reference --out out.npy --lse lse.npy --blocks blocks.npy
[ ! -s stderr ] || fail "noise on standard error: $(cat stderr)"
[ "$(wc -c < out.npy)" = $((128 + 32 * 2 * 64 * 4)) ] || fail 'size of out'
has_head() {
    head -c 128 "$1" | grep -a -q "{'descr': '$2', 'fortran_order': False, 'shape': ($3), }" ||
        fail "head of $1"
}
has_head out.npy '<f4' '1, 32, 2, 64'
has_head lse.npy '<f4' '1, 32, 2'
has_head blocks.npy '<i4' '1, 32, 1, 4'
# The last query stands at 199, in leaf 12 of 16 tokens: 0, 11 and 12 are forced, one more is chosen.
last=$(tail -c 16 blocks.npy | od -A n -t d4)
set -- $last
if [ "$1" != 0 ] || [ "$2" -le 0 ] || [ "$2" -ge 11 ] || [ "$3" != 11 ] || [ "$4" != 12 ]; then
    fail "last list: $last"
fi
[ "$(ls | grep -c 'npy\.')" = 0 ] || fail 'temporaries are left'

# Three dimensions are one sequence.
elements "$sample/q.npy" 0 8192 | npy q3.npy '<f2' '32, 2, 64'
run_clattn 0 run --q q3.npy --k k.npy --v v.npy $reference --out other.npy
same out.npy other.npy 'three dimensions differ from four'

# Heads before tokens: the rows of each head together.
: > rows0
: > rows1
row=0
while [ $row -lt 32 ]; do
    elements "$sample/q.npy" $((row * 256)) 128 >> rows0
    elements "$sample/q.npy" $((row * 256 + 128)) 128 >> rows1
    row=$((row + 1))
done
cat rows0 rows1 | npy bhtd.npy '<f2' '1, 2, 32, 64'
elements "$sample/k.npy" 0 25600 | npy bhtd_k.npy '<f2' '1, 1, 200, 64'
elements "$sample/v.npy" 0 25600 | npy bhtd_v.npy '<f2' '1, 1, 200, 64'
run_clattn 0 run --q bhtd.npy --k bhtd_k.npy --v bhtd_v.npy --layout bhtd $reference --out other.npy
same out.npy other.npy 'layout bhtd differs from bthd'

# Options that say what is the default anyway.
run_clattn 0 run $files $reference --causal --scale 0.125 --selector pisa --forced first,previous,current \
    --dtype f16 --out other.npy
same out.npy other.npy 'defaults differ when they are given'
run_clattn 0 run $files $reference --forced last:2,first:1 --out other.npy
same out.npy other.npy 'counted forced leaves differ'
run_clattn 0 run $files $reference --forced none --blocks other.npy
cmp -s blocks.npy other.npy && fail '--forced none changes nothing'
run_clattn 0 run $files $reference --no-causal --out other.npy
cmp -s out.npy other.npy && fail '--no-causal changes nothing'
run_clattn 0 run $files $reference --topk 13 --out all.npy
run_clattn 0 run $files --backend reference --selector dense --out other.npy
same all.npy other.npy 'all leaves differ from dense'

# Static patterns as selectors, alone and joined with a selector's lists.
run_clattn 0 run $files --backend reference --selector 'strided:1; 1=dense' --leaf 16 --out other.npy
same all.npy other.npy 'a pattern of all blocks differs from dense'
run_clattn 0 run $files $reference --selector 'pisa + dense' --out other.npy
same all.npy other.npy 'a selector and all blocks differ from dense'
run_clattn 0 run $files $reference --selector local:1+log-stride+anchors:first --out other.npy
cmp -s all.npy other.npy && fail 'a pattern changes nothing'

# What was written can be read: float32 in.
run_clattn 0 run --q out.npy --k out.npy --v out.npy --backend reference --dtype f32 --out other.npy

# The same bits as bfloat16.
sed 's/<f2/<u2/' q.npy > qb.npy
sed 's/<f2/<u2/' k.npy > kb.npy
sed 's/<f2/<u2/' v.npy > vb.npy
bf16="--q qb.npy --k kb.npy --v vb.npy"
refused 1 'need --dtype bf16' run $bf16 $reference
run_clattn 0 run $bf16 $reference --dtype bf16 --out bf16.npy
cmp -s out.npy bf16.npy && fail '--dtype bf16 changes nothing'

if [ -n "$json_value" ]; then
    # safetensors with both types; the header's length is odd, so nothing is aligned.
    for type in F16 BF16; do
        header='{"q":{"dtype":"'$type'","shape":[1,32,2,64],"data_offsets":[0,8192]},'
        header=$header'"kv.0":{"dtype":"'$type'","shape":[1,200,1,64],"data_offsets":[8192,33792]},'
        header=$header'"v":{"dtype":"'$type'","shape":[1,200,1,64],"data_offsets":[33792,59392]}}'
        [ $((${#header} % 2)) = 1 ] || header="$header "
        {
            printf "\\$(printf %o $((${#header} & 255)))\\$(printf %o $((${#header} >> 8)))"
            printf '\0\0\0\0\0\0%s' "$header"
            elements "$sample/q.npy" 0 8192
            elements "$sample/k.npy" 0 25600
            elements "$sample/v.npy" 0 25600
        } > $type.safetensors
        run_clattn 0 run --q $type.safetensors:q --k $type.safetensors:kv.0 --v $type.safetensors:v $reference \
            --out $type.npy
    done
    same out.npy F16.npy 'safetensors differs from .npy'
    same bf16.npy BF16.npy 'safetensors differs from .npy in bfloat16'
    refused 1 "has no tensor 'w'; it holds q, kv.0, v" run --q F16.safetensors:w --k k.npy --v v.npy
    refused 1 "needs a tensor's name" run --q F16.safetensors --k k.npy --v v.npy

    # JSON, also where the user's language writes a decimal comma.
    LOCPATH=$work
    export LOCPATH
    localedef -i de_DE -f UTF-8 "$work/de_DE.UTF-8" > /dev/null 2>&1 || echo 'no German locale can be made here'
    LC_ALL=de_DE.UTF-8 "$program" run $files $reference --scale 0.25 --json > stdout 2> stderr ||
        fail "--json: $(cat stderr)"
    "$json_value" device.backend sizes.q_len sizes.kv_len sizes.q_heads sizes.dim_v scale causal \
        selection.selector selection.leaves dtype inputs.q.nan outputs.out < stdout > values ||
        fail 'JSON lacks something'
    printf '%s\n' reference 32 200 2 64 0.25 true pisa 13 float16 0 null | cmp - values ||
        fail "JSON: $(cat values)"
    "$json_value" seconds.build seconds.transfer seconds.pyramid seconds.select seconds.attend seconds.total \
        device.name device.variant version peak_memory_bytes < stdout > values || fail 'JSON lacks something'
    run_clattn 0 info --json
    "$json_value" devices.0.backend devices.1.backend built_in.jansson threads < stdout > values ||
        fail 'info --json lacks something'
    [ "$(head -n 3 values | tr '\n' ' ')" = 'reference cpu true ' ] || fail "info --json: $(cat values)"
    unset LOCPATH
else
    refused 2 'built without JSON' run $files --json
    cp q.npy q.safetensors
    refused 1 'built without safetensors' run --q q.safetensors:q --k k.npy --v v.npy
fi

# ---- NaN and infinite values are counted
cp q.npy nan.npy
printf '\000\176\000\174' | dd of=nan.npy bs=1 seek=1000 conv=notrunc 2> /dev/null
run_clattn 0 run --q nan.npy --k k.npy --v v.npy $reference --out other.npy
grep -q '^clattn run: warning: nan.npy: 1 of 4096 values are NaN$' stderr || fail "NaN: $(cat stderr)"
grep -q '^clattn run: warning: nan.npy: 1 of 4096 values are infinite$' stderr || fail "infinite: $(cat stderr)"

# ---- a failure leaves the old results as they were
if [ -w /dev/full ]; then
    cp out.npy kept.npy
    refused 1 'No space left' run $files $reference --no-causal --out kept.npy --lse /dev/full
    same out.npy kept.npy 'a failed run replaced a file'
fi
cp out.npy kept.npy
"$program" run --q "$sample/q.npy" --k "$sample/k.npy" --v "$sample/v.npy" --backend reference \
    --selector flat-lse --out kept.npy > /dev/null 2>&1 &
child=$!
while [ -z "$(ls | grep 'kept\.npy\.')" ] && kill -0 $child 2> /dev/null; do sleep 0.05; done
kill -TERM $child
wait $child
[ $? = 143 ] || fail 'a signal does not end the program'
same out.npy kept.npy 'an interrupted run replaced a file'
[ -z "$(ls | grep 'kept\.npy\.')" ] || fail 'an interrupted run leaves a temporary'

# ---- devices
refused 77 'no-such-device' run $files --device no-such-device
refused 77 'no-such-device' check --device no-such-device
run_clattn 0 info
grep -q '^reference ' stdout || fail 'info does not name the reference'
grep -q '^cpu ' stdout || fail 'info does not name the CPU'
run_clattn 0 run $files --leaf 16 --topk 4 --backend cpu
CLATTN_PLATFORMS=no-such-platform
export CLATTN_PLATFORMS
refused 77 'opencl' run $files --backend opencl
refused 77 'opencl' check --backend opencl
run_clattn 0 info
run_clattn 0 run $files --leaf 16 --topk 4
run_clattn 0 check --quick --failures
tail -n 1 stdout | grep -q '^PASS: [1-9][0-9]* passed, 0 failed' || fail "check: $(cat stdout)"
refused 1 'No such file or directory' demo --data none
run_clattn 0 demo --data "$sample"
grep -q '^reference .* pisa .* good$' stdout || fail "demo: $(cat stdout)"
grep -q '^All backends agree' stdout || fail "demo: $(cat stdout)"

echo "$checks checks, $failures failed"
[ "$failures" = 0 ] || exit 1
cd .. && rm -rf "$work"
