#!/bin/sh
# SPDX-License-Identifier: MIT
# What `make install` leaves: the files, a pkg-config file that a C program (and a C++ one, where there is a compiler)
# builds with, shared and static, and nothing after `make uninstall`.
set -eu
unset MAKEFLAGS MFLAGS MAKELEVEL # not a part of the make that runs the tests
work=$PWD/tests/install.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
root=$work/root

$MAKE install DESTDIR="$root" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
header=$(find "$root" -name clattn.h)
pc=$(find "$root" -name clattn.pc)
test -n "$header" && test -n "$pc"

cat > "$work/program.c" <<'PROGRAM'
#include <clattn.h>
#include <stdio.h>
#ifdef CLASH /* names of the library's inner functions, which are the program's own to use */
extern int fail, log_line, problem_release;
int fail, log_line, problem_release;
#endif
int main(void)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    clattn_context *context;
    clattn_status status = clattn_context_create(&desc, &context);
    if (status) return fprintf(stderr, "%s\n", clattn_strerror(status)), 1;
    clattn_context_release(context);
    return puts(clattn_version()) < 0;
}
PROGRAM
cp "$work/program.c" "$work/program.cpp"

config() { PKG_CONFIG_PATH=$(dirname "$pc") pkg-config --define-variable=prefix="$root$prefix" "$@" clattn; }
libdir=$(config --variable=libdir)
version=$(config --modversion)

build_and_run() {
    what=$1
    shift
    echo "$what: $*"
    "$@" || exit 1
    LD_LIBRARY_PATH=$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$work/program" > "$work/said"
    test "$(cat "$work/said")" = "$version"
}

if command -v pkg-config > /dev/null; then
    # Quoting is off on purpose: the compiler and the flags are several words.
    kinds=''
    if [ -e "$libdir/libclattn.so" ]; then kinds=shared; fi
    if [ -e "$libdir/libclattn.a" ]; then kinds="$kinds static"; fi
    for kind in $kinds; do
        case $kind in
        shared) libs=$(config --libs) ;;
        static)
            libs="$libdir/libclattn.a $(config --static --libs | sed 's/-lclattn//')"
            if [ -n "${STATIC_OBJCOPY-}" ]; then libs="-DCLASH $libs"; fi
            ;;
        esac
        build_and_run "C, $kind" $CC $USER_CFLAGS $(config --cflags) -o "$work/program" "$work/program.c" $libs
        for cxx in c++ g++ clang++; do
            command -v $cxx > /dev/null || continue
            build_and_run "C++, $kind" $cxx -Wall -Wextra -Werror -pedantic $USER_CFLAGS $(config --cflags) \
                -o "$work/program" "$work/program.cpp" $libs
            break
        done
    done
fi

$MAKE uninstall DESTDIR="$root" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
left=$(find "$root" ! -type d)
if [ -n "$left" ]; then
    echo "left after uninstall: $left" >&2
    exit 1
fi
