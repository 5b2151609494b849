#!/bin/sh
# SPDX-License-Identifier: MIT
# Manual pages say what header and program say: functions and their prototypes, types, fields and constants, options,
# subcommands, environment variables. Their C examples compile, those of README.md are the files of examples/, and these
# run. Pages are linted where mandoc is there; where it is not, that is all that is missing, and the status is 77.
set -u
: "${srcdir:?}"
work=$PWD/tests/man.work
rm -rf "$work"
mkdir -p "$work"
failures=0
LC_ALL=C
export LC_ALL

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# same WHAT A B : two sorted lists, a line an entry, have the same entries, and some.
same() {
    [ -s "$2" ] || fail "$1: nothing was found"
    diff "$2" "$3" > "$work/diff" || fail "$1 (<, >): $(cat "$work/diff")"
    echo "$1: $(wc -l < "$2")"
}

# ---- functions and prototypes
# Both sides as "type name(arguments)" without blanks: of the header without comments and preprocessor lines, of a page
# from .Ft, .Fn, .Fo, .Fa and .Fc in its SYNOPSIS.
$AWK '{
    while (1) {
        if (inside) {
            if (!(end = index($0, "*/"))) next
            $0 = substr($0, end + 2); inside = 0
        }
        if (!(start = index($0, "/*"))) break
        rest = substr($0, start + 2)
        printf "%s ", substr($0, 1, start - 1)
        $0 = rest; inside = 1
    }
    print
}' "$srcdir/include/clattn.h" > "$work/header.h"
$AWK '/^ *#/ || more {more = /\\$/; next} {print}' "$work/header.h" | tr '\n' ' ' | tr ';' '\n' |
    sed -n 's/.*CLATTN_API *\(.*clattn_[a-z0-9_]*(.*)\) *$/\1/p' | tr -d ' \t' | sort > "$work/header"
$AWK '
    /^\.Sh / {synopsis = /SYNOPSIS/}
    !synopsis {next}
    /^\.Ft / {type = substr($0, 5)}
    /^\.Fo / {name = $2; list = ""; comma = ""}
    /^\.Fa / {list = list comma substr($0, 5); comma = ","}
    /^\.Fc/ {print type " " name "(" list ")"}
    /^\.Fn / {
        name = $2; list = ""; comma = ""
        rest = $0
        sub(/^\.Fn +[^ ]+ */, "", rest)
        while (rest != "") {
            if (rest ~ /^"/) {
                rest = substr(rest, 2); end = index(rest, "\"")
            } else
                end = index(rest " ", " ")
            list = list comma substr(rest, 1, end - 1); comma = ","
            rest = substr(rest, end + 1)
            sub(/^ +/, "", rest)
        }
        print type " " name "(" list ")"
    }' "$srcdir"/man/*.3 | tr -d ' "' | sort > "$work/pages"
same 'prototypes of header and pages' "$work/header" "$work/pages"

# Every function is in the NAME section of exactly one page and is found by its own name.
sed 's/.*[a-z*]*\(clattn_[a-z0-9_]*\)(.*/\1/; s/^clattn_status\(clattn_\)/\1/' "$work/header" | sort > "$work/functions"
for page in "$srcdir"/man/clattn_*.3; do
    sed -n -e '/^\.Sh LIBRARY/q' -e 's/^\.Nm \(clattn_[a-z0-9_]*\).*/\1/p' "$page"
done | sort > "$work/names"
same 'functions of header and NAME sections' "$work/functions" "$work/names"
while read -r name; do
    if [ -e "$srcdir/man/$name.3" ]; then
        page=$srcdir/man/$name.3
    elif [ -e "man/links/$name.3" ]; then
        page=$srcdir/man/$(sed -n 's/^\.so man3\///p' "man/links/$name.3")
    else
        fail "there is no page of the name $name"
        continue
    fi
    grep -q -x -E "\.Nm $name( ,)?" "$page" || fail "the page of the name $name does not have it"
done < "$work/functions"
for link in man/links/*.3; do
    grep -q -x "$(basename "$link" .3)" "$work/functions" || fail "$link is no function"
done

# Types and constants that a page marks as such are those of the header.
tr -c 'A-Za-z0-9_' '\n' < "$work/header.h" | grep -E '^(CLATTN|clattn)_' | sort -u > "$work/known"
cat "$srcdir"/man/*.3 "$srcdir"/man/*.7 | sed -n -E 's/^\.(It )?(Dv|Vt) (.*)/\3/p' | tr -c 'A-Za-z0-9_.' '\n' |
    grep -E '^(CLATTN|clattn)_' | grep -v '\.\.\.' | sort -u > "$work/used"
comm -13 "$work/known" "$work/used" > "$work/unknown"
[ ! -s "$work/unknown" ] || fail "not in the header: $(cat "$work/unknown")"
[ -s "$work/used" ] || fail 'no types and constants in the pages'
# And all of them are in some page.
grep -h -E -o "(CLATTN|clattn)_[A-Za-z0-9_]+" "$srcdir"/man/*.3 | sort -u > "$work/written"
grep -v -x -E 'CLATTN_(H|API)' "$work/known" | comm -23 - "$work/written" > "$work/missing"
[ ! -s "$work/missing" ] || fail "in the header but in no page: $(cat "$work/missing")"

# Every field of a structure is in a page that has the structure's name; but `size`, which libclattn(3) tells of all.
$AWK '
    /^typedef struct [a-z_]+ \{$/ {name = $3; next}
    /^\}/ {name = ""}
    name {
        gsub(/\[[^]]*\]/, "")
        for (n = split($0, part, /[,;]/); n > 0; n--) {
            sub(/ +$/, "", part[n])
            if (match(part[n], /[A-Za-z_0-9]+$/) && substr(part[n], RSTART) != "size")
                print name, substr(part[n], RSTART)
        }
    }' "$work/header.h" > "$work/fields"
while read -r name field; do
    pages=$(grep -l -w "$name" "$srcdir"/man/*.3)
    [ -n "$pages" ] && grep -q -w "$field" $pages || fail "$name.$field is in no page that has $name"
done < "$work/fields"
echo "fields of structures: $(wc -l < "$work/fields")"
[ -s "$work/fields" ] || fail 'no fields of structures in the header'

# ---- subcommands and options
./clattn --help > "$work/help" || fail 'clattn --help'
sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p' "$work/help" | sort > "$work/subcommands"
sed -n 's/^\.It Cm \([a-z]*\)$/\1/p' "$srcdir/man/clattn.1" | sort > "$work/listed"
same 'subcommands of the program and clattn.1' "$work/subcommands" "$work/listed"
grep -v -x help "$work/subcommands" > "$work/paged"
for page in "$srcdir"/man/clattn-*.1; do
    basename "$page" .1 | sed 's/^clattn-//'
done | sort > "$work/pages"
same 'subcommands and pages' "$work/paged" "$work/pages"

# flags : the long options of the lines on standard input, mdoc
flags() {
    grep -o -E 'Fl -[a-z][a-z-]*' | sed 's/Fl -/--/' | sort -u
}
options_of() {
    sed -n 's/^  \(--[a-z][a-z-]*\).*/\1/p' "$1" | sort
}
for name in '' $(cat "$work/paged"); do
    page=$srcdir/man/clattn${name:+-$name}.1
    ./clattn $name --help > "$work/help" || fail "clattn $name --help"
    options_of "$work/help" > "$work/options"
    grep '^\.It .*Fl -' "$page" | flags > "$work/described"
    same "options of clattn $name and their descriptions" "$work/options" "$work/described"
    [ -n "$name" ] || continue
    grep -v -x -e --help "$work/options" > "$work/options.own"
    sed -n '/^\.Sh SYNOPSIS/,/^\.Sh DESC/p' "$page" | flags > "$work/synopsis"
    same "options of clattn $name and its synopsis" "$work/options.own" "$work/synopsis"
done

# ---- environment
find "$srcdir/lib" "$srcdir/cpu" "$srcdir/bench" -name '*.[ch]' -exec cat {} + |
    grep -o -E 'getenv\("CLATTN_[A-Z_]+"\)' | sed 's/.*"\(.*\)".*/\1/' | sort -u > "$work/read"
grep '^\.It Ev' "$srcdir/man/clattn.7" | grep -o -E 'CLATTN_[A-Z_]+' | sort -u > "$work/variables"
same 'environment variables that are read, and clattn.7' "$work/read" "$work/variables"

# ---- C examples
cat > "$work/head.c" <<'CODE'
#include <clattn.h>
#include <stdio.h>
void example(clattn_context *context, clattn_status status, clattn_tensor q, clattn_tensor k, clattn_tensor v,
             clattn_tensor out, clattn_tensor lse, clattn_tensor dout, clattn_tensor dq, clattn_tensor dk,
             clattn_tensor dv, clattn_blocks *blocks);
void example(clattn_context *context, clattn_status status, clattn_tensor q, clattn_tensor k, clattn_tensor v,
             clattn_tensor out, clattn_tensor lse, clattn_tensor dout, clattn_tensor dq, clattn_tensor dk,
             clattn_tensor dv, clattn_blocks *blocks)
{
    (void)context, (void)status, (void)q, (void)k, (void)v, (void)out, (void)lse, (void)dout, (void)dq, (void)dk;
    (void)dv, (void)blocks;
    {
CODE
examples=0
# compile FILE WHERE
compile() {
    examples=$((examples + 1))
    # Quoting is off on purpose: the compiler and the flags are several words.
    $CC -std=c11 -Wall -Wextra -Werror $USER_CFLAGS -I"$srcdir/include" -c "$1" \
        -o "$work/example.o" 2> "$work/said" || fail "$2: $(cat "$work/said")"
}
for page in "$srcdir"/man/*.3; do
    name=$(basename "$page")
    # Each block behind a comment `C example` goes to a file of its own.
    $AWK -v to="$work/$name" '
        /^\.\\" C example/ {wanted = 1; next}
        /^\.Bd -literal/ && wanted {count++; file = to "-" count ".txt"; wanted = 0; next}
        /^\.Ed/ {if (file) close(file); file = ""}
        file {gsub(/\\e/, "\\"); gsub(/\\&/, ""); gsub(/\\-/, "-"); print > file}' "$page"
    marked=$(grep -c '^\.\\" C example' "$page")
    literal=$(sed '1,/^\.Sh EXAMPLES/d' "$page" | grep -c '^\.Bd -literal')
    [ "$marked" = "$literal" ] || fail "$name: $literal blocks below EXAMPLES, $marked marked as C"
    number=1
    while [ "$number" -le "$marked" ]; do
        text=$work/$name-$number.txt
        if grep -q 'int main(' "$text"; then
            cp "$text" "$work/example.c"
        else
            { cat "$work/head.c" "$text" && echo '}}'; } > "$work/example.c"
        fi
        compile "$work/example.c" "$name, example $number"
        number=$((number + 1))
    done
done
[ "$examples" -gt 0 ] || fail 'no C example was found'
echo "C examples: $examples"

# The example in README.md is examples/attention.c behind its licence line.
sed 1d "$srcdir/examples/attention.c" > "$work/file"
sed -n '/^```c$/,/^```$/p' "$srcdir/README.md" | sed -e '1d' -e '$d' > "$work/readme"
cmp "$work/file" "$work/readme" || fail 'README.md has another example than examples/attention.c'
for file in "$srcdir"/examples/*.c; do
    program=examples/$(basename "$file" .c)
    "$program" > "$work/said" 2>&1 || fail "$program: $(cat "$work/said")"
    [ -s "$work/said" ] || fail "$program says nothing"
done

# ---- lint
status=0
if [ -n "${MANDOC-}" ] && command -v "$MANDOC" > /dev/null; then
    for page in "$srcdir"/man/*.[1-9]; do
        "$MANDOC" -T lint -W warning "$page" || fail "$page"
    done
else
    echo 'mandoc is not there: pages are not linted'
    status=77
fi

[ "$failures" = 0 ] || exit 1
rm -rf "$work"
exit $status
