#!/bin/sh
# SPDX-License-Identifier: MIT
# The Debian packages as a build service makes them: the source package in the current folder's deb/ is built by an ordinary
# user in a fresh Debian that has what debian/control asks for and nothing else, without any network; the packages are
# looked at by lintian and tested by autopkgtest in another fresh one. They are left in deb/. Needs root and debootstrap.
# Environment: VERSION; SUITE (bookworm); DEB_CHROOT, a folder with a Debian that is copied (else debootstrap makes one, kept
# in deb-chroot/base below the current folder); DEB_BUILD_OPTIONS, DEB_TESTS (see debian/rules).
set -eu
: "${VERSION:?}" "${SUITE:=bookworm}" "${DEB_BUILD_OPTIONS:=parallel=2}"
top=$PWD/deb-chroot
sources=clattn-$VERSION
for tool in debootstrap unshare lintian autopkgtest; do
    command -v $tool > /dev/null || { echo "$tool is not there"; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo 'not root'; exit 77; }
mkdir -p "$top"
base=${DEB_CHROOT-$top/base}
[ -e "$base/usr/bin/apt-get" ] || debootstrap --variant=buildd "$SUITE" "$base" http://deb.debian.org/debian

# enter ROOT OPTION COMMAND : as root in it, with what unshare's OPTION takes away; mounts go with the process
enter() {
    unshare --mount --pid --fork $2 sh -ec '
        mount -t proc proc "$0/proc"
        mount --rbind /sys "$0/sys"
        exec chroot "$0" sh -ec "$1"' "$1" "$3"
}

fresh() {
    rm -rf "${1:?}"
    cp -a "$base" "$1"
    enter "$1" '' 'apt-get -qq update'
}

echo "== build dependencies, from the network"
build=$top/build
fresh "$build"
mkdir "$build/source"
cp deb/clattn_"$VERSION"* "$build/source/"
enter "$build" '' "
    export DEBIAN_FRONTEND=noninteractive
    useradd --create-home builder
    cd /source && dpkg-source --no-check -x clattn_*.dsc $sources
    cd $sources && apt-get -qq --no-install-recommends build-dep ./
    chown -R builder /source" > "$top/depend.log" 2>&1 || { tail -n 20 "$top/depend.log"; exit 1; }

echo "== build, without network"
enter "$build" --net "
    if getent hosts deb.debian.org > /dev/null; then echo 'there is a network' >&2; exit 1; fi
    cd /source/$sources && exec su builder -c 'HOME=/nonexistent DEB_TESTS=\"${DEB_TESTS-}\" \
        CLATTN_TEST_SIZE=${CLATTN_TEST_SIZE-tiny} DEB_BUILD_OPTIONS=\"$DEB_BUILD_OPTIONS\" dpkg-buildpackage -us -uc'
    " > "$top/build.log" 2>&1 || { tail -n 40 "$top/build.log"; exit 1; }
sed -n 's/^# \(TOTAL\|PASS\|SKIP\|FAIL\|ERROR\): /tests: &/p' "$top/build.log"
cp "$build"/source/*.deb "$build"/source/*.buildinfo "$build"/source/*_*.changes deb/

echo "== lintian"
lintian --allow-root --fail-on error,warning deb/*.changes

echo "== autopkgtest"
fresh "$top/test"
rm -rf "$top/autopkgtest"
unshare --mount sh -ec '
    mount -t proc proc "$0/proc"
    mount --rbind /sys "$0/sys"
    exec autopkgtest --output-dir "$1" --user nobody deb/*.deb deb/clattn_*.dsc -- chroot "$0"' \
    "$top/test" "$top/autopkgtest" > "$top/autopkgtest.log" 2>&1 || { tail -n 60 "$top/autopkgtest.log"; exit 1; }
cat "$top/autopkgtest/summary"
