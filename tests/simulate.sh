# SPDX-License-Identifier: MIT
# clattn simulate: known values, ranking, map, warning, usage errors.
set -eu
work=tests/simulate.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

fail() {
    echo "FAIL: $*" >&2
    exit 1
}

# known LAYOUT WINDOW STRIDE Q_TILE KV_TILE BOUND PERFECT
known() {
    ./clattn simulate --layout-dims "$1" --window "$2" --stride "$3" --q-tile "$4" --kv-tile "$5" --strides 0 \
        > "$work/out" 2> "$work/err"
    grep -q "^bound        $6 times dense, " "$work/out" || fail "$*: $(cat "$work/out")"
    grep -q "^perfect      $7: " "$work/out" || fail "$*: $(cat "$work/out")"
    [ ! -s "$work/err" ] || fail "$*: $(cat "$work/err")"
}
known 30x48x80 18x24x24 1 4x8x8 2x8x8 5.24 no
known 30x48x80 18x24x24 1x8x8 4x8x8 2x8x8 10.26 no
known 16x44x80 16x24x16 1x8x16 8x4x8 4x4x8 9.17 yes
known 256x256 80x80 16 16x16 16x8 10.24 yes
known 30x48x80 18x24x24 16x8x8 4x8x8 2x8x8 11.11 yes
grep -q '^ideal        11.11 times dense$' "$work/out" || fail "$(cat "$work/out")"
grep -q 'sparsity 91.00 %$' "$work/out" || fail "$(cat "$work/out")"

# The best stride of all; the best tiles need no mask even without a stride along the first axis.
./clattn simulate --layout-dims 30x48x80 --window 18x24x24 --q-tile 4x8x8 --kv-tile 2x8x8 --strides 1 > "$work/out"
grep -q '^Strides by bound, all 10368 examined:$' "$work/out" || fail "$(cat "$work/out")"
[ "$(tail -n 1 "$work/out")" = '16x8x8  11.11  11.11  6.2 %  yes      4x8x8   2x8x8' ] || fail "$(cat "$work/out")"
./clattn simulate --layout-dims 30x48x80 --window 18x24x24 --stride 1x8x8 --strides 0 > "$work/out"
grep -q '^tiles        q 1x8x8, kv 1x8x8: bound 11.11, waste 0.0 %, perfect$' "$work/out" || fail "$(cat "$work/out")"

# Maps that can be counted by eye: two groups of tiles; and two dilation classes that do not see each other.
for options in '--window 32 --stride 32' '--window 32 --dilation 2'; do
    ./clattn simulate --layout-dims 64 $options --q-tile 16 --kv-tile 16 --svg "$work/map.svg" > "$work/out"
    grep -q 'viewBox="0 0 4 4"' "$work/map.svg" || fail 'SVG of another size'
    grep -o '<rect x="[02]" y="[0-3]" width="2" height="1" fill="#[0-9a-f]*"' "$work/map.svg" |
        sed 's/.*#//' | tr '\n' ' ' > "$work/colours"
    [ "$(cat "$work/colours")" = '1f4468" e8e8e8" 1f4468" e8e8e8" e8e8e8" 1f4468" e8e8e8" 1f4468" ' ] ||
        fail "map of $options: $(cat "$work/colours")"
done

# Where nothing is gained.
./clattn simulate --layout-dims 8x8 --window 7x7 --strides 0 > "$work/out" 2> "$work/err"
grep -q '^clattn simulate: warning: dense attention is predicted' "$work/err" || fail "no warning: $(cat "$work/err")"

if [ -x tests/json_value ]; then
    ./clattn simulate --layout-dims 30x48x80 --window 18x24x24 --stride 16x8x8 --q-tile 4x8x8 --kv-tile 2x8x8 --json |
        tests/json_value tokens connections perfect dense_wins layout.2 strides.0.stride.0 strides.0.perfect \
            best_tiles.perfect > "$work/values" || fail 'JSON lacks something'
    [ "$(tr '\n' ' ' < "$work/values")" = '115200 1.1943936e+09 true false 80 16 true true ' ] ||
        fail "JSON: $(cat "$work/values")"
fi

# refused STATUS WORDS ARGUMENT...
refused() {
    wanted=$1 words=$2 status=0
    shift 2
    ./clattn simulate "$@" > "$work/out" 2> "$work/err" || status=$?
    [ "$status" = "$wanted" ] || fail "$*: exit status $status instead of $wanted"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
    grep -F -q -e "$words" "$work/err" || fail "$*: '$words' is not in: $(cat "$work/err")"
}

refused 2 '--layout-dims AxBxC is missing' --window 8
refused 2 '--window AxBxC is missing' --layout-dims 8
refused 2 "'8x8x8x8' is not one to three whole numbers from 2" --layout-dims 8x8x8x8 --window 4
refused 2 "'8x' is not" --layout-dims 8x --window 4
refused 2 "'4x4' has 2 numbers, but --layout-dims has 3" --layout-dims 8x8x8 --window 4x4
refused 2 "'1' is not one to three whole numbers from 2" --layout-dims 8 --window 1
refused 2 'axis 1: window 4 * dilation 3 is beyond the length 8' --layout-dims 16x8 --window 4 --dilation 3
refused 2 'axis 0: stride 5 is beyond the window 4' --layout-dims 16x8 --window 4 --stride 5x1
refused 2 '--causal-axes: 2 is neither 0 nor 1' --layout-dims 16x8 --window 4 --causal-axes 0x2
refused 2 'go together' --layout-dims 16x8 --window 4 --q-tile 4x4
refused 2 'at most 256 tokens' --layout-dims 64x64 --window 4 --q-tile 32x16 --kv-tile 4x4
refused 2 '40 tokens; a key tile has 16, 32, 64 or 128' --layout-dims 64x64 --window 4 --q-tile 4x4 --kv-tile 8x5
refused 2 'at most 2^35' --layout-dims 99999x99999x99999 --window 4
refused 1 'No such file' --layout-dims 64 --window 16 --svg "$work/none/map.svg"
echo 'simulate: known values, ranking, maps and refusals as expected'
