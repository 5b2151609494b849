# SPDX-License-Identifier: MIT

# Optional parts. Each --with-X takes yes (an error if it is missing), no, or auto (the default: use it if it is there).

# CLATTN_WITH(NAME, WHAT): declare the option.
AC_DEFUN([CLATTN_WITH], [
    AC_ARG_WITH([$1], [AS_HELP_STRING([--without-$1], [do not use $2])], [], [with_$1=auto])
])

# CLATTN_FOUND(NAME, MACRO, FOUND, DESCRIPTION): turn the result of the search into config.h, a conditional and an error.
AC_DEFUN([CLATTN_FOUND], [
    AS_IF([test "$with_$1" = yes && test "$3" != yes], [AC_MSG_ERROR([$1 was asked for but not found])])
    AS_IF([test "$3" = yes], [AC_DEFINE([$2], [1], [$4])])
    AM_CONDITIONAL([$2], [test "$3" = yes])
])

AC_DEFUN([CLATTN_FEATURE_OPENCL], [
    CLATTN_WITH([opencl], [OpenCL devices])
    have_opencl=no
    AS_VAR_IF([with_opencl], [no], [], [
        PKG_CHECK_MODULES([OPENCL], [OpenCL], [have_opencl=yes], [have_opencl=no; OPENCL_LIBS=-lOpenCL])
        # The header is a package of its own, and some loaders come without a .pc file.
        clattn_save_CPPFLAGS=$CPPFLAGS
        clattn_save_LIBS=$LIBS
        CPPFLAGS="$CPPFLAGS $OPENCL_CFLAGS -DCL_TARGET_OPENCL_VERSION=120"
        LIBS="$OPENCL_LIBS $LIBS"
        AC_CACHE_CHECK([for a usable OpenCL loader], [clattn_cv_opencl], [
            AC_LINK_IFELSE([AC_LANG_PROGRAM([[#include <CL/cl.h>]], [[cl_uint n; clGetPlatformIDs(0, 0, &n);]])],
                [clattn_cv_opencl=yes], [clattn_cv_opencl=no])
        ])
        have_opencl=$clattn_cv_opencl
        CPPFLAGS=$clattn_save_CPPFLAGS
        LIBS=$clattn_save_LIBS
    ])
    CLATTN_FOUND([opencl], [HAVE_OPENCL], [$have_opencl], [The OpenCL backend is built.])
    AS_VAR_IF([have_opencl], [yes], [
        # Entry points newer than OpenCL 1.2 are looked up at run time.
        clattn_save_LIBS=$LIBS
        AC_SEARCH_LIBS([dlsym], [dl], [AS_CASE([$ac_cv_search_dlsym], [-l*], [OPENCL_LIBS="$OPENCL_LIBS $ac_cv_search_dlsym"])])
        LIBS=$clattn_save_LIBS
    ], [OPENCL_LIBS=; OPENCL_CFLAGS=])
    AC_SUBST([OPENCL_CFLAGS])
    AC_SUBST([OPENCL_LIBS])
])

AC_DEFUN([CLATTN_FEATURE_CLBLAST], [
    CLATTN_WITH([clblast], [CLBlast for dense products on OpenCL devices])
    have_clblast=no
    AS_IF([test "$with_clblast" != no && test "$have_opencl" = yes], [
        PKG_CHECK_MODULES([CLBLAST], [clblast], [have_clblast=yes], [CLBLAST_LIBS=-lclblast])
        clattn_save_CPPFLAGS=$CPPFLAGS
        clattn_save_LIBS=$LIBS
        CPPFLAGS="$CPPFLAGS $CLBLAST_CFLAGS $OPENCL_CFLAGS -DCL_TARGET_OPENCL_VERSION=120"
        LIBS="$CLBLAST_LIBS $OPENCL_LIBS $LIBS"
        AC_CACHE_CHECK([for a usable CLBlast], [clattn_cv_clblast], [
            AC_LINK_IFELSE([AC_LANG_PROGRAM([[#include <clblast_c.h>]], [[CLBlastClearCache();]])],
                [clattn_cv_clblast=yes], [clattn_cv_clblast=no])
        ])
        have_clblast=$clattn_cv_clblast
        CPPFLAGS=$clattn_save_CPPFLAGS
        LIBS=$clattn_save_LIBS
    ])
    CLATTN_FOUND([clblast], [HAVE_CLBLAST], [$have_clblast], [CLBlast computes dense products on OpenCL devices.])
    AS_VAR_IF([have_clblast], [yes], [], [CLBLAST_LIBS=; CLBLAST_CFLAGS=])
    AC_SUBST([CLBLAST_CFLAGS])
    AC_SUBST([CLBLAST_LIBS])
])

AC_DEFUN([CLATTN_FEATURE_HWLOC], [
    CLATTN_WITH([hwloc], [hwloc for caches and cores])
    have_hwloc=no
    AS_VAR_IF([with_hwloc], [no], [], [
        PKG_CHECK_MODULES([HWLOC], [hwloc >= 2.0], [have_hwloc=yes], [have_hwloc=no])
    ])
    CLATTN_FOUND([hwloc], [HAVE_HWLOC], [$have_hwloc], [hwloc tells cores, caches and NUMA nodes.])
    AS_VAR_IF([have_hwloc], [yes], [], [HWLOC_LIBS=; HWLOC_CFLAGS=])
])

# CLATTN_OPENMP_LIBS: the run-time library by its name, for users of the static library, whose compiler may be another one
# and take -fopenmp for another run-time library.
AC_DEFUN([CLATTN_OPENMP_LIBS], [
    AC_CACHE_CHECK([for the OpenMP run-time library], [clattn_cv_openmp_libs], [
        clattn_cv_openmp_libs=$OPENMP_CFLAGS
        AC_LANG_CONFTEST([AC_LANG_PROGRAM([[#include <omp.h>
extern int total;
int total;]], [[
#pragma omp parallel for reduction(+ : total)
for (int i = 0; i < 4; i++) total += omp_get_thread_num();
]])])
        for clattn_lib in -lgomp -lomp -liomp5; do
            if $CC $CFLAGS $CPPFLAGS $OPENMP_CFLAGS -c conftest.c -o conftest.$ac_objext >&AS_MESSAGE_LOG_FD 2>&1 &&
                $CC $CFLAGS $LDFLAGS conftest.$ac_objext $clattn_lib $LIBS -o conftest$ac_exeext \
                    >&AS_MESSAGE_LOG_FD 2>&1; then
                clattn_cv_openmp_libs=$clattn_lib
                break
            fi
        done
        rm -f conftest*
    ])
    OPENMP_LIBS=$clattn_cv_openmp_libs
])

AC_DEFUN([CLATTN_FEATURE_OPENMP], [
    AC_OPENMP
    have_openmp=no
    AS_CASE([$enable_openmp:$ac_cv_prog_c_openmp], [no:*|*:unsupported], [OPENMP_CFLAGS=], [have_openmp=yes])
    AS_IF([test "$enable_openmp" = yes && test "$have_openmp" = no],
        [AC_MSG_ERROR([OpenMP was asked for but $CC does not support it here])])
    AS_VAR_IF([have_openmp], [yes], [AC_DEFINE([HAVE_OPENMP], [1], [The CPU backend runs on several threads by OpenMP.])])
    OPENMP_LIBS=
    AS_VAR_IF([have_openmp], [yes], [CLATTN_OPENMP_LIBS])
    AC_SUBST([OPENMP_LIBS])
    # The pragmas stay in the code; without OpenMP they mean nothing, which needs no warning each.
    AS_VAR_IF([have_openmp], [yes], [], [CLATTN_CHECK_CFLAG([-Wno-unknown-pragmas], [WARNING_CFLAGS])])
    AM_CONDITIONAL([HAVE_OPENMP], [test "$have_openmp" = yes])
])

AC_DEFUN([CLATTN_FEATURE_JANSSON], [
    CLATTN_WITH([jansson], [jansson for JSON: the program's output, tuning records])
    have_jansson=no
    AS_VAR_IF([with_jansson], [no], [], [
        PKG_CHECK_MODULES([JANSSON], [jansson >= 2.7], [have_jansson=yes], [have_jansson=no])
    ])
    CLATTN_FOUND([jansson], [HAVE_JANSSON], [$have_jansson], [The program reads and writes JSON, the library reads tuning records.])
    AS_VAR_IF([have_jansson], [yes], [], [JANSSON_LIBS=; JANSSON_CFLAGS=])
])

AC_DEFUN([CLATTN_FEATURE_XXHASH], [
    CLATTN_WITH([xxhash], [xxHash for the keys of the program cache])
    have_xxhash=no
    AS_VAR_IF([with_xxhash], [no], [], [
        PKG_CHECK_MODULES([XXHASH], [libxxhash >= 0.8], [have_xxhash=yes], [have_xxhash=no])
    ])
    CLATTN_FOUND([xxhash], [HAVE_XXHASH], [$have_xxhash], [xxHash makes the keys of the program cache.])
    AS_VAR_IF([have_xxhash], [yes], [], [XXHASH_LIBS=; XXHASH_CFLAGS=])
])

AC_DEFUN([CLATTN_FEATURES], [
    CLATTN_FEATURE_OPENCL
    CLATTN_FEATURE_CLBLAST
    CLATTN_FEATURE_HWLOC
    CLATTN_FEATURE_OPENMP
    CLATTN_FEATURE_JANSSON
    CLATTN_FEATURE_XXHASH
])
