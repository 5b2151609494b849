# SPDX-License-Identifier: MIT

# CLATTN_CHECK_CFLAG(FLAGS, VARIABLE): append FLAGS to VARIABLE if the compiler takes them without a warning.
AC_DEFUN([CLATTN_CHECK_CFLAG], [
    AS_VAR_PUSHDEF([cached], [clattn_cv_cflag_$1])
    AC_CACHE_CHECK([whether $CC accepts $1], [cached], [
        clattn_save_CFLAGS=$CFLAGS
        CFLAGS="$CFLAGS -Werror $1"
        AC_COMPILE_IFELSE([AC_LANG_PROGRAM([], [])], [AS_VAR_SET([cached], [yes])], [AS_VAR_SET([cached], [no])])
        CFLAGS=$clattn_save_CFLAGS
    ])
    AS_VAR_IF([cached], [yes], [$2="$$2 $1"])
    AS_VAR_POPDEF([cached])
])

# CLATTN_STATIC_NAMES: whether internal names of the static library can be given a prefix (lib/link.sh). Not with objects
# that keep a second list of names for the linker, as -flto makes them.
AC_DEFUN([CLATTN_STATIC_NAMES], [
    AC_CHECK_TOOL([OBJCOPY], [objcopy], [])
    AC_CHECK_TOOL([NM], [nm], [:])
    AC_CACHE_CHECK([whether internal names of a static library can be changed], [clattn_cv_static_names], [
        clattn_cv_static_names=no
        AC_LANG_CONFTEST([AC_LANG_SOURCE([int conftest_old(void); int conftest_old(void) { return 0; }])])
        if test -n "$OBJCOPY" && (
            $CC $CFLAGS $CPPFLAGS -c conftest.c -o conftest1.$ac_objext && $AR cr conftest.a conftest1.$ac_objext &&
            echo 'conftest_old conftest_new' > conftest.names &&
            $OBJCOPY -D --redefine-syms=conftest.names conftest.a conftest2.a &&
            echo 'int conftest_new(void); int main(void) { return conftest_new(); }' > conftest.c &&
            $CC $CFLAGS $CPPFLAGS $LDFLAGS conftest.c conftest2.a -o conftest$ac_exeext
        ) >&AS_MESSAGE_LOG_FD 2>&1; then clattn_cv_static_names=yes; fi
        rm -f conftest*
    ])
    STATIC_OBJCOPY=
    AS_VAR_IF([clattn_cv_static_names], [yes], [STATIC_OBJCOPY=$OBJCOPY])
    AC_SUBST([STATIC_OBJCOPY])
])

# CLATTN_COMPILER: warnings, symbol visibility, the version script and the sanitizers.
AC_DEFUN([CLATTN_COMPILER], [
    AC_SUBST([WARNING_CFLAGS])
    AC_SUBST([VISIBILITY_CFLAGS])
    AC_SUBST([EXACT_CFLAGS])
    AC_SUBST([SANITIZER_CFLAGS])

    CLATTN_CHECK_CFLAG([-Wall], [WARNING_CFLAGS])
    CLATTN_CHECK_CFLAG([-Wextra], [WARNING_CFLAGS])
    CLATTN_CHECK_CFLAG([-Wstrict-prototypes], [WARNING_CFLAGS])
    CLATTN_CHECK_CFLAG([-Wmissing-prototypes], [WARNING_CFLAGS])
    AC_ARG_ENABLE([werror], [AS_HELP_STRING([--enable-werror], [treat warnings of the compiler as errors])],
        [], [enable_werror=no])
    AS_VAR_IF([enable_werror], [no], [], [WARNING_CFLAGS="$WARNING_CFLAGS -Werror"])

    # Neither the debug information nor assert() tells in which folder this was built.
    CLATTN_CHECK_CFLAG([-ffile-prefix-map=/build/folder=.], [PREFIX_MAP_CFLAGS])
    AM_CONDITIONAL([HAVE_PREFIX_MAP], [test -n "$PREFIX_MAP_CFLAGS"])

    CLATTN_CHECK_CFLAG([-fvisibility=hidden], [VISIBILITY_CFLAGS])

    # A fused multiply-add rounds once where the formula rounds twice; the oracle must not depend on that.
    CLATTN_CHECK_CFLAG([-ffp-contract=off], [EXACT_CFLAGS])

    AC_CACHE_CHECK([whether the linker takes a version script], [clattn_cv_version_script], [
        clattn_save_LDFLAGS=$LDFLAGS
        echo 'CONFTEST_0 { local: *; };' > conftest.map
        LDFLAGS="$LDFLAGS -shared -fPIC -Wl,--version-script=conftest.map"
        AC_LINK_IFELSE([AC_LANG_SOURCE([int conftest_symbol; int conftest(void); int conftest(void) { return 0; }])],
            [clattn_cv_version_script=yes], [clattn_cv_version_script=no])
        LDFLAGS=$clattn_save_LDFLAGS
        rm -f conftest.map
    ])
    AM_CONDITIONAL([HAVE_VERSION_SCRIPT], [test "$clattn_cv_version_script" = yes])
    CLATTN_STATIC_NAMES

    AC_ARG_ENABLE([sanitizers],
        [AS_HELP_STRING([--enable-sanitizers=LIST], [build everything with these sanitizers, for tests
            @<:@address,undefined@:>@])],
        [], [enable_sanitizers=no])
    AS_VAR_IF([enable_sanitizers], [yes], [enable_sanitizers=address,undefined])
    AS_VAR_IF([enable_sanitizers], [no], [], [
        SANITIZER_CFLAGS="-fsanitize=$enable_sanitizers -fno-sanitize-recover=all -fno-omit-frame-pointer"
        clattn_save_CFLAGS=$CFLAGS
        CFLAGS="$CFLAGS $SANITIZER_CFLAGS"
        AC_MSG_CHECKING([whether $CC links with $SANITIZER_CFLAGS])
        AC_LINK_IFELSE([AC_LANG_PROGRAM([], [])], [AC_MSG_RESULT([yes])],
            [AC_MSG_RESULT([no]); AC_MSG_ERROR([these sanitizers do not work here])])
        CFLAGS=$clattn_save_CFLAGS
    ])
    AM_CONDITIONAL([SANITIZERS], [test "$enable_sanitizers" != no])
])
