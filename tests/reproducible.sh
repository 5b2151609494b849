#!/bin/sh
# SPDX-License-Identifier: MIT
# Two builds of this source, in folders of other names, at other times, by other numbers of jobs, under another locale,
# time zone and umask, install the same bytes. Environment: srcdir, MAKE, CC, CONFIGURE_ARGUMENTS (of both).
set -eu
unset MAKEFLAGS MFLAGS MAKELEVEL
: "${srcdir:?}" "${MAKE:=make}"
top=$PWD/tests/reproducible.work
rm -rf "$top"
mkdir -p "$top/a" "$top/another/much/longer/name"
trap 'chmod -R u+w "$top"; rm -rf "$top"' EXIT
# A cache of the compiler would give the first build's objects to the second.
CCACHE_DISABLE=1
export CCACHE_DISABLE

# distdir : the source as it is released
$MAKE distdir distdir="$top/source" > "$top/log" 2>&1 || { cat "$top/log"; exit 1; }

# build FOLDER JOBS : a copy of the source in FOLDER, built beside it and installed in $top/FOLDER/root
build() {
    cp -R "$top/source" "$top/$1/source"
    mkdir "$top/$1/build"
    (
        cd "$top/$1/build"
        # The arguments are several words.
        { ../source/configure -q --prefix=/usr ${CONFIGURE_ARGUMENTS-} && $MAKE -j"$2" &&
            $MAKE install DESTDIR="$top/$1/root"; } > ../log 2>&1 || { tail -n 40 ../log; exit 1; }
    ) || exit 1
}

(LC_ALL=C TZ=UTC && export LC_ALL TZ && umask 022 && build a 1)
sleep 2 # the times of files differ
(LC_ALL=C.UTF-8 TZ=Asia/Tokyo && export LC_ALL TZ && umask 002 && build another/much/longer/name 3)

one=$top/a/root two=$top/another/much/longer/name/root
files=$(cd "$one" && find . -type f | wc -l)
for kind in libclattn.a clattn clattn.h; do
    test -n "$(find "$one" -type f -name $kind)" || { echo "no $kind was installed" >&2; exit 1; }
done
if ! diff -r "$one" "$two"; then
    echo "two builds of the same source differ" >&2
    exit 1
fi
echo "$files installed files are the same"
