/* SPDX-License-Identifier: MIT */
/* Stands in for cl/common.cl in tests of the runtime (CLATTN_KERNEL_DIR). */
#ifndef STEP
#define STEP 1
#endif
