#!/bin/sh
# SPDX-License-Identifier: MIT
# Packages from the release tarball in the current folder; they are left in deb/ or rpm/ below it.
#   package.sh deb     dpkg-buildpackage, then lintian where it is there; deb-source: the source package only
#   package.sh rpm     rpmbuild, then rpmlint where it is there
# Environment: srcdir, VERSION; DEB_BUILD_OPTIONS, DEB_TESTS (see debian/rules); RPMBUILD_FLAGS, --nodeps where the
# system's packages are not RPM's.
set -eu
unset MAKEFLAGS MFLAGS MAKELEVEL
: "${srcdir:?}" "${VERSION:?}"
tarball=$PWD/clattn-$VERSION.tar.xz
test -e "$tarball"
seconds=${SOURCE_DATE_EPOCH:-$(stat -c %Y "$srcdir/NEWS")}

case ${1-} in
deb | deb-source)
    command -v dpkg-buildpackage > /dev/null || { echo 'dpkg-buildpackage is not there' >&2; exit 1; }
    rm -rf deb
    mkdir deb
    cp "$tarball" "deb/clattn_$VERSION.orig.tar.xz"
    tar -C deb -xf "$tarball"
    debian=deb/clattn-$VERSION/debian
    cp -R "$srcdir/packaging/debian" "$debian"
    chmod -R u+w "$debian"
    date=$(LC_ALL=C date -u -R -d "@$seconds")
    sed -e "s/@VERSION@/$VERSION/" -e "s/@DATE@/$date/" "$srcdir/packaging/debian/changelog" > "$debian/changelog"
    # A source package needs nothing that is to be built with.
    if [ "$1" = deb-source ]; then source_only='-S -d'; else source_only=''; fi
    (cd "deb/clattn-$VERSION" && dpkg-buildpackage -us -uc $source_only)
    rm -rf "deb/clattn-$VERSION"
    [ -z "$source_only" ] || exit 0
    if command -v lintian > /dev/null; then
        lintian --allow-root --fail-on error,warning deb/*.changes
    else
        echo 'lintian is not there: the packages were not looked at'
    fi
    ;;
rpm)
    command -v rpmbuild > /dev/null || { echo 'rpmbuild is not there' >&2; exit 1; }
    rm -rf rpm
    mkdir -p rpm/SOURCES
    cp "$tarball" rpm/SOURCES/
    date=$(LC_ALL=C date -u -d "@$seconds" '+%a %b %d %Y')
    sed -e "s/@VERSION@/$VERSION/" -e "s/@DATE@/$date/" "$srcdir/packaging/rpm/clattn.spec" > rpm/clattn.spec
    # The flags are several words.
    rpmbuild -ba --define "_topdir $PWD/rpm" ${RPMBUILD_FLAGS-} rpm/clattn.spec
    rm -rf rpm/BUILD rpm/BUILDROOT
    if command -v rpmlint > /dev/null; then
        rpmlint -c "$srcdir/packaging/rpm/rpmlint.toml" rpm/clattn.spec rpm/SRPMS/*.rpm rpm/RPMS/*/*.rpm
    else
        echo 'rpmlint is not there: the packages were not looked at'
    fi
    ;;
*)
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
    ;;
esac
