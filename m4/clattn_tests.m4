# SPDX-License-Identifier: MIT

# CLATTN_TEST_TOOLS: what only `make check` needs. Without CMocka its programs are neither built nor counted.
AC_DEFUN([CLATTN_TEST_TOOLS], [
    PKG_CHECK_MODULES([CMOCKA], [cmocka >= 1.1], [have_cmocka=yes], [have_cmocka=no])
    AM_CONDITIONAL([HAVE_CMOCKA], [test "$have_cmocka" = yes])
    AC_PATH_PROG([MANDOC], [mandoc], [])
])

AC_DEFUN([CLATTN_SUMMARY], [
    AC_MSG_NOTICE([
    clattn $PACKAGE_VERSION for $host, prefix $prefix
        compiler     $CC $CFLAGS
        libraries    shared $enable_shared, static $enable_static, version script $clattn_cv_version_script,
                     names of the static library $clattn_cv_static_names
        opencl       $have_opencl
        clblast      $have_clblast
        hwloc        $have_hwloc
        openmp       $have_openmp
        xxhash       $have_xxhash
        jansson      $have_jansson
        CPU variants reference, plain C, AVX2 $clattn_avx2, AVX-512 $clattn_avx512, with VNNI $clattn_avx512vnni, NEON $clattn_neon
        tests        cmocka $have_cmocka, sanitizers $enable_sanitizers])
])
