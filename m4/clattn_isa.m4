# SPDX-License-Identifier: MIT

# CLATTN_CPU_ISA: which instruction-set variants of the CPU backend this compiler can build. Only the convenience library
# of a variant sees its flags; whether the variant runs is decided at run time.
AC_DEFUN([CLATTN_CPU_ISA], [
    AC_SUBST([AVX2_CFLAGS], ["-mavx2 -mfma -mf16c"])
    AC_SUBST([AVX512_CFLAGS], ["-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c"])
    AC_SUBST([AVX512VNNI_CFLAGS], ["$AVX512_CFLAGS -mavx512vnni"])
    clattn_avx2=no
    clattn_avx512=no
    clattn_avx512vnni=no
    AS_CASE([$host_cpu], [x86_64|amd64], [
        CLATTN_TRY_ISA([AVX2], [clattn_avx2], [$AVX2_CFLAGS],
            [_mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128((const void *)in)), _mm256_set1_ps(2.0f),
                             _mm256_loadu_ps(in))], [_mm256_storeu_ps])
        CLATTN_TRY_ISA([AVX-512], [clattn_avx512], [$AVX512_CFLAGS],
            [_mm512_fmadd_ps(_mm512_cvtph_ps(_mm256_loadu_si256((const void *)in)), _mm512_set1_ps(2.0f),
                             _mm512_and_ps(_mm512_loadu_ps(in), _mm512_loadu_ps(in)))], [_mm512_storeu_ps])
        AS_VAR_IF([clattn_avx512], [yes],
            [CLATTN_TRY_ISA([AVX-512 VNNI], [clattn_avx512vnni], [$AVX512VNNI_CFLAGS],
                [_mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(in),
                                                         _mm512_loadu_si512(in)))], [_mm512_storeu_ps])])
    ])
    # Every 64-bit ARM processor has it, so no flags. Big-endian ones number lanes otherwise and take the plain C.
    clattn_neon=no
    AS_CASE([$host_cpu], [aarch64|arm64], [
        AC_MSG_CHECKING([whether $CC can build NEON code])
        AC_COMPILE_IFELSE([AC_LANG_PROGRAM([[#include <arm_neon.h>
#if defined(__ARM_BIG_ENDIAN)
#error big-endian
#endif
float in[4], out[4];]], [[vst1q_f32(out, vcvt_f32_f16(vcvt_f16_f32(vrndnq_f32(vld1q_f32(in)))));]])], [clattn_neon=yes])
        AC_MSG_RESULT([$clattn_neon])
    ])
    AS_VAR_IF([clattn_neon], [yes],
        [AC_DEFINE([HAVE_CPU_NEON], [1], [The NEON variant of the CPU backend is built.])])
    AM_CONDITIONAL([HAVE_CPU_NEON], [test "$clattn_neon" = yes])
    AS_VAR_IF([clattn_avx2], [yes],
        [AC_DEFINE([HAVE_CPU_AVX2], [1], [The AVX2, FMA and F16C variants of the CPU backend are built.])])
    AS_VAR_IF([clattn_avx512], [yes],
        [AC_DEFINE([HAVE_CPU_AVX512], [1], [The AVX-512 (F, BW, DQ, VL) variants of the CPU backend are built.])])
    AM_CONDITIONAL([HAVE_CPU_AVX2], [test "$clattn_avx2" = yes])
    AS_VAR_IF([clattn_avx512vnni], [yes],
        [AC_DEFINE([HAVE_CPU_AVX512VNNI], [1], [The AVX-512 VNNI variant of the CPU backend is built.])])
    AM_CONDITIONAL([HAVE_CPU_AVX512], [test "$clattn_avx512" = yes])
    AM_CONDITIONAL([HAVE_CPU_AVX512VNNI], [test "$clattn_avx512vnni" = yes])
])

# CLATTN_TRY_ISA(NAME, RESULT-VARIABLE, FLAGS, VECTOR-EXPRESSION, STORE-FUNCTION)
AC_DEFUN([CLATTN_TRY_ISA], [
    AC_MSG_CHECKING([whether $CC can build $1 code])
    clattn_save_CFLAGS=$CFLAGS
    CFLAGS="$CFLAGS $3"
    AC_COMPILE_IFELSE([AC_LANG_PROGRAM([[#include <immintrin.h>
float in[16], out[16];]], [[$5(out, $4);]])], [$2=yes])
    CFLAGS=$clattn_save_CFLAGS
    AC_MSG_RESULT([$$2])
])
