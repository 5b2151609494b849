#!/bin/sh
# SPDX-License-Identifier: MIT
# What stands in several files is the same in all of them: the version, in configure, NEWS and pkg-config's file; the
# library's soname and symbol version, in the packages' names and lists; its functions, in Debian's symbols file; the files
# of packaging/, in the release.
set -u
: "${srcdir:?}"
work=$PWD/tests/release.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
debian=$srcdir/packaging/debian
spec=$srcdir/packaging/rpm/clattn.spec
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

version=$(./clattn --version | sed 's/^clattn //')
case $version in [0-9]*.[0-9]*.[0-9]*) ;; *) fail "clattn --version: '$version'" ;; esac
case "$(sed 1q "$srcdir/NEWS") " in "clattn $version "*) ;; *) fail "NEWS begins with: $(sed 1q "$srcdir/NEWS")" ;; esac
grep -q -x "Version: $version" clattn.pc || fail 'the version in clattn.pc'
for file in "$debian/changelog" "$spec"; do
    grep -q @VERSION@ "$file" || fail "$file has a version of its own"
done

# Functions of the version script, and since which version; none is newer than this one.
sed -n 's/^ *\(clattn_[a-z0-9_]*\);.*/\1/p' "$srcdir/lib/clattn.map" > "$work/map"
sed -n 's/^ \(clattn_[a-z0-9_]*\)@CLATTN_[0-9]* [0-9.]*$/\1/p' "$debian"/libclattn*.symbols > "$work/symbols"
[ -s "$work/map" ] || fail 'no functions in the version script'
diff "$work/map" "$work/symbols" || fail 'lib/clattn.map (<) and the symbols file (>) differ'
for since in $(sed -n 's/^ .*@CLATTN_[0-9]* //p' "$debian"/libclattn*.symbols | sort -u); do
    newest=$(printf '%s\n' "$since" "$version" | LC_ALL=C sort -t. -k1,1n -k2,2n -k3,3n | tail -n 1)
    [ "$newest" = "$version" ] || fail "the symbols file has functions of $since"
done

# The library says libclattn.so.N and CLATTN_N; so do the packages.
if [ -e .libs/libclattn.so ] && command -v readelf > /dev/null; then
    number=$(readelf -d .libs/libclattn.so | sed -n 's/.*SONAME.*\[libclattn\.so\.\([0-9]*\)\].*/\1/p')
    [ -n "$number" ] || fail 'no soname'
    readelf --dyn-syms -W .libs/libclattn.so | grep -o 'clattn_[a-z0-9_]*@.*' | LC_ALL=C sort > "$work/versions"
    sed "s/\$/@@CLATTN_$number/" "$work/map" | LC_ALL=C sort | diff - "$work/versions" ||
        fail "wanted (<) and actual (>) symbol versions of the library"
    grep -q -x "Package: libclattn$number" "$debian/control" || fail "debian/control has no libclattn$number"
    for file in install symbols; do
        [ -e "$debian/libclattn$number.$file" ] || fail "there is no libclattn$number.$file"
    done
    grep -q -x "libclattn.so.$number libclattn$number #MINVER#" "$debian/libclattn$number.symbols" || fail 'the symbols file'
    grep -q -F "libclattn.so.$number*" "$spec" || fail "the spec has no libclattn.so.$number"
else
    echo 'no shared library, or no readelf: soname and symbol versions are not looked at'
fi

# Every file of packaging/ is distributed, and every source.
named() { grep -o '%D%/[^ ]*' "$srcdir/$1/Makefile.inc" | sed 's/^%D%\///' | sort -u; }
named packaging > "$work/named"
(cd "$srcdir/packaging" && find . -type f ! -name Makefile.inc) | sed 's/^\.\///' | sort > "$work/files"
diff "$work/files" "$work/named" || fail 'files of packaging/ (<) and those in its Makefile.inc (>) differ'
for folder in bench cl cpu examples lib; do
    named $folder > "$work/named"
    (cd "$srcdir/$folder" && ls | grep '\.\(c\|h\|cl\)$' | sort) | comm -23 - "$work/named" > "$work/forgotten"
    [ ! -s "$work/forgotten" ] || fail "not in $folder/Makefile.inc: $(cat "$work/forgotten")"
done

echo "$version: $(wc -l < "$work/map") functions"
[ "$failures" = 0 ]
