#!/bin/sh
# SPDX-License-Identifier: MIT
# Every command of README.md works as it stands there; a command that is not known here is a failure.
#   readme.sh quick     those of the installed program and the C program, with this build (a part of make check)
#   readme.sh all       also those that build, in a copy of the source, with a few of the tests; installs into a folder
# Environment: srcdir, prefix, MAKE, CC, USER_CFLAGS; README_TESTS, the tests that its `make check-package` runs.
set -u
unset MAKEFLAGS MFLAGS MAKELEVEL # not a part of the make that runs the tests
: "${srcdir:?}" "${prefix:?}" "${MAKE:=make}" "${README_TESTS=tests/symbols.sh tests/licence.sh tests/test_version}"
mode=${1-quick}
work=$PWD/tests/readme.work
rm -rf "$work"
mkdir -p "$work/root" "$work/data"
root=$work/root
readme=$srcdir/README.md
case $readme in /*) ;; *) readme=$PWD/$readme ;; esac
failures=0 commands=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

sed -n '/^```sh$/,/^```$/p' "$readme" | grep -v '^```' > "$work/commands"
sed -n '/^```c$/,/^```$/p' "$readme" | grep -v '^```' > "$work/data/attention.c"
[ "$(grep -c '[^ ]' "$work/data/attention.c")" -le 24 ] || fail 'the program is longer than about 20 lines'

# Files that are linked are there, and every manual page is linked.
grep -o '](\(man\|doc\)/[^)]*)' "$readme" | sed 's/](\(.*\))/\1/' | sort > "$work/links"
while read -r link; do
    [ -e "$(dirname "$readme")/$link" ] || fail "there is no $link"
done < "$work/links"
(cd "$srcdir" && ls man/*.[1-9]) | sort > "$work/pages"
grep '^man/' "$work/links" | diff "$work/pages" - || fail 'manual pages (<) and the links of README.md (>) differ'
# So are those that are only named.
for name in $(grep -o '`[a-z_-]*([1-9])`' "$readme" | sort -u | tr -d '`' | tr '()' '. '); do
    [ -e "$(dirname "$readme")/man/$name" ] || fail "there is no $name"
done
for name in $(grep -o '`[a-z]*/[a-z_./-]*`' "$readme" | sort -u | tr -d '`'); do
    [ -e "$(dirname "$readme")/$name" ] || fail "there is no $name"
done
# Selectors and backends of the tables are those of the program.
for selector in pisa pisa1 pisa2 flat-mean flat-lse robust robust:beam=64,score=blend dense local:1+log-stride \
    pisa+local:1; do
    grep -q -F "\`$selector\`" "$readme" || fail "the selector $selector is not in README.md"
    ./clattn run --q "$srcdir/tests/data/retrieval16k/q.npy" --k "$srcdir/tests/data/retrieval16k/k.npy" \
        --v "$srcdir/tests/data/retrieval16k/v.npy" --topk 3 --selector "$selector" --backend cpu \
        > "$work/said" 2>&1 || fail "--selector $selector: $(cat "$work/said")"
done
for name in $(./clattn run --help | sed -n 's/^  --backend auto|\([^ ]*\).*/\1/p' | tr '|' ' '); do
    grep -q "^| \`$name\` |" "$readme" || fail "the backend $name is not in the table of README.md"
done

# ---- where commands run: the installed build, found by the usual variables
$MAKE install DESTDIR="$root" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
bin=$(dirname "$(find "$root" -path '*/bin/clattn')")
pc=$(dirname "$(find "$root" -name clattn.pc)")
libdir=$(dirname "$(find "$root" -name 'libclattn.*' ! -name '*.la' ! -name '*.3' | head -n 1)")
for name in q k v; do
    cp "$(find "$root" -name $name.npy)" "$work/data/"
done
mkdir "$work/bin"
# pkg-config of an installation that lies elsewhere, and the compiler of this build.
cat > "$work/bin/pkg-config" <<CODE
#!/bin/sh
PKG_CONFIG_PATH=$pc exec $(command -v pkg-config) --define-variable=prefix=$root$prefix "\$@"
CODE
cat > "$work/bin/cc" <<CODE
#!/bin/sh
exec $CC $USER_CFLAGS "\$@"
CODE
chmod +x "$work/bin/pkg-config" "$work/bin/cc"
static=''
[ -e "$libdir/libclattn.so" ] || static=--static

# run TEXT FOLDER
run() {
    echo "\$ $1"
    commands=$((commands + 1))
    (cd "$2" && PATH=$work/bin:$bin:$PATH LD_LIBRARY_PATH=$libdir sh -c "$1") > "$work/said" 2>&1 < /dev/null ||
        fail "$1: $(tail -n 20 "$work/said")"
}

# The top of a source folder whose build/ has the program: of a copy, or what looks like it.
source=$work/source
top=$work/data
if [ "$mode" = all ]; then
    top=$source
    $MAKE distdir distdir="$source" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    chmod -R u+w "$source"
else
    mkdir "$top/build"
    ln -s "$bin/clattn" "$top/build/clattn"
    ln -s "$(dirname "$readme")/tests" "$top/tests"
fi
while read line; do # without -r: a backslash at a line's end joins it with the next
    case $line in
    'build/clattn '*) run "$line" "$top" ;;
    'clattn check'*) # on every device it takes minutes, where their programs must be compiled
        [ "$mode" = all ] || line="$line --backend cpu"
        run "$line" "$work/data"
        ;;
    'clattn bench'*) # minutes, on devices that must compile first
        if [ "$mode" != all ]; then
            ./clattn info --json > /dev/null 2>&1 || continue # a build without JSON
            line=$(echo "$line" | sed -e 's/--device all/--quick --backend cpu --suite forward,selection-scaling/')
        fi
        run "$line" "$work/data"
        ;;
    'clattn compare'*)
        ./clattn info --json > /dev/null 2>&1 || continue
        command -v gnuplot > /dev/null || line=$(echo "$line" | sed 's/ --charts [a-z]*//')
        case $line in
        *--baseline*) run "$line || [ \$? = 3 ]" "$work/data" ;; # two runs are never alike
        *) run "$line" "$work/data" ;;
        esac
        ;;
    'clattn '*) run "$line" "$work/data" ;;
    'cc '*) run "$(echo "$line" | sed "s/ --libs/ --libs $static/")" "$work/data" ;;
    ./attention)
        run "$line" "$work/data"
        grep -q '^success; the last number is -*[0-9]' "$work/said" || fail "$line says: $(cat "$work/said")"
        ;;
    ./bootstrap* | mkdir* | ../configure | make*) # one after the other, in the folder where the line before left off
        [ "$mode" = all ] || continue
        folder=$source/build
        case $line in
        ./bootstrap* | mkdir*) folder=$source ;;
        'make check-package') line="$line PACKAGE_TESTS='$README_TESTS' CLATTN_TEST_SIZE=tiny" ;;
        'make install') line="make install DESTDIR=$work/installed" ;;
        esac
        CLATTN_NO_INSTALL=1 run "$line" "$folder"
        ;;
    *) fail "this command is not tested: $line" ;;
    esac
done < "$work/commands"

# ---- commands within the text: subcommands that are there, and the two with options, in a small form
grep -o '`clattn [a-z][^`]*`' "$readme" | tr -d '`' | sort -u > "$work/commands"
while read -r line; do
    case $line in
    'clattn bench --suite selection-scaling --json | clattn compare'*)
        ./clattn info --json > /dev/null 2>&1 || continue
        command -v gnuplot > /dev/null || line=$(echo "$line" | sed 's/ --charts [a-z]*//')
        run "$(echo "$line" | sed 's/ bench / bench --quick --backend cpu /')" "$work/data"
        ;;
    'clattn run --selector') ;; # the heading of the table, whose selectors were tried
    'clattn '*' '*) fail "this command is not tested: $line" ;;
    *) run "clattn help ${line#clattn }" "$work/data" ;;
    esac
done < "$work/commands"
line=$(grep -o '`--layout-dims [^`]*`' "$readme" | tr -d '`')
[ -n "$line" ] || fail 'no neighborhood'
run "clattn simulate $line" "$work/data"
[ "$mode" != all ] || [ -n "$(find "$work/installed" -name clattn.h)" ] || fail 'make install'
echo "$commands commands"
[ $commands -gt 3 ] || fail 'no commands'
[ "$failures" = 0 ] || exit 1
rm -rf "$work"
