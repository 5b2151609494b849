/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_H
#define CLATTN_OPENCL_H

/* The OpenCL runtime: one device, its programs, memory and launches.
 *
 *   opencl_device.c   platforms and devices, limits
 *   opencl_quirks.c   quirks of implementations: cl/quirks.conf and the user's file
 *   opencl_program.c  sources, builds, the table of programs
 *   opencl_cache.c    binaries of programs on disk
 *   opencl_memory.c   storage, checks of the caller's memory
 *   opencl_workspace.c memory of launches, kept for the next one
 *   opencl_hopper.c   instructions that NVIDIA's compiler refuses
 *   opencl_nvidia*.c  the matrix tier of NVIDIA cards
 *   opencl_tuning.c   tuned parameters of kernels
 *   opencl_subgroup.c the subgroup tier
 *   opencl_transfer.c tensors between host and device
 *   opencl_launch.c   order of commands, wait lists and events, kernel arguments
 *   opencl_trial.c    results of trials, also of those that did not end
 *   opencl_selftest.c a small attention case against the reference
 *   opencl_decode*.c  the decode cache, see opencl_decode.h
 *   opencl_backend.c  opening and closing, the backend table
 *
 * Only OpenCL 1.2 symbols are linked; newer entry points are looked up at run time. An operation is
 *
 *     struct opencl_launch launch;
 *     opencl_launch_begin(context, job->sync, &launch);
 *     opencl_launch_kernel(&launch, "pyramid.cl", "pyramid_leaf", "-DDIM=64 -DLEAF=64");
 *     opencl_arg_tensor(&launch, job->k);
 *     opencl_arg_strides(&launch, job->k);
 *     opencl_arg_storage(&launch, &job->pyramid->means);
 *     opencl_arg_int(&launch, rows);
 *     opencl_launch_run(&launch, 2, (size_t[]){rows_padded, heads}, (size_t[]){64, 1});
 *     return opencl_launch_end(&launch);
 *
 * Errors stick to the launch: after the first one the other calls do nothing and opencl_launch_end returns it.
 */

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#ifdef __APPLE__
#include <OpenCL/opencl.h>
#else
#include <CL/cl.h>
#endif

#include "internal.h"
#include "opencl_tuning.h"

#include <sys/types.h>

/* ---- device ---- */

/* What an implementation gets wrong, so that its answers are not taken at face value. */
enum opencl_quirk {
    OPENCL_QUIRK_GROUP_REPORT = 1,    /* CL_KERNEL_WORK_GROUP_SIZE is too small for sizes that run */
    OPENCL_QUIRK_LOCAL_DOUBLED = 2,   /* CL_KERNEL_LOCAL_MEM_SIZE is twice the truth */
    OPENCL_QUIRK_LOCAL_UNLIMITED = 4, /* static local memory may exceed CL_DEVICE_LOCAL_MEM_SIZE */
    OPENCL_QUIRK_FP16_HIDDEN = 8,     /* half arithmetic works although cl_khr_fp16 is not listed */
    OPENCL_QUIRK_ONE_THREAD = 16,     /* threads that enqueue on one queue at the same time disturb its order */
    OPENCL_QUIRK_NO_SUBGROUPS = 32,   /* subgroup functions are listed and do not work */
    OPENCL_QUIRK_SHORT_VECTORS = 64   /* a CPU that makes vectors of work-items: long ones within them cost time */
};

/* How lanes of a subgroup exchange values, and how many there are; see opencl_subgroup.h. */
struct subgroup {
    int kind, size;
};

struct opencl_device {
    cl_platform_id platform;
    cl_device_id id;
    cl_device_type type;
    char name[128], platform_name[128], platform_version[128];
    char driver[128], version[128]; /* CL_DRIVER_VERSION, CL_DEVICE_VERSION */
    cl_uint vendor_id;
    int cl_version;        /* 120, 200, 300 ... of the device */
    size_t group_max;      /* CL_DEVICE_MAX_WORK_GROUP_SIZE */
    size_t group_sizes[3]; /* CL_DEVICE_MAX_WORK_ITEM_SIZES */
    cl_ulong local_bytes, memory_bytes, alloc_max;
    cl_uint compute_units;
    bool local_is_real; /* CL_LOCAL: local memory is faster than global memory (GPUs) */
    bool has_fp16, has_double;
    struct subgroup subgroup;
    unsigned quirks;         /* enum opencl_quirk */
    int tier_limit;          /* the highest tier that the quirk table allows */
    char quirk_text[512];    /* its sections that apply, and why, for people */
    char quirk_errors[512];  /* its lines that mean nothing, likewise */
};

/* Describes a device; false when the driver does not answer or the device has no compiler. */
bool opencl_device_read(cl_platform_id platform, cl_device_id id, struct opencl_device *device);

/* Applies the quirk table to a device that is described otherwise. */
void opencl_quirks_read(struct opencl_device *device);
/* What of it applies and why, and what of it means nothing; "" when nothing does. */
void opencl_quirks_tell(const struct opencl_device *device, char *text, size_t room);

/* Is `name` one of the device's extensions? */
bool opencl_has_extension(cl_device_id id, const char *name);

/* Is `part` [bytes] in `text`, in any case of letters? */
bool opencl_text_contains(const char *text, const char *part, size_t bytes);

/* Device `index` of those that CLATTN_PLATFORMS lets through; false past the last. */
bool opencl_device_at(int index, struct opencl_device *device);

/* The device that `wanted` names (see clattn_context_desc.device); NULL: CLATTN_DEVICE, else the first GPU,
 * else the first device. NO_DEVICE with what there is, when there is no such device. */
clattn_status opencl_device_find(clattn_context *context, const char *wanted, struct opencl_device *device);

/* The tiers, worst first, and the number of one; -1: there is none of that name. */
enum opencl_tier { OPENCL_PORTABLE, OPENCL_SUBGROUP, OPENCL_MMA, OPENCL_HOPPER, OPENCL_TIERS };
extern const char *const opencl_tiers[OPENCL_TIERS];
int opencl_tier_number(const char *name);

void opencl_device_info(const struct opencl_device *device, clattn_device_info *info);

/* ---- context ---- */

struct opencl_program; /* opencl_program.c */
struct nvidia;         /* opencl_nvidia.h */

/* Idle memory of launches, see opencl_workspace.c; the one that is idle longest stands first. */
enum { OPENCL_WORKSPACE_ENTRIES = 64 };

struct opencl_workspace_entry {
    cl_mem mem;
    size_t bytes;
    cl_command_queue queue;
};

struct opencl_workspace {
    struct opencl_workspace_entry entries[OPENCL_WORKSPACE_ENTRIES];
    int count;
    size_t idle_bytes;
};

/* Entry points that OpenCL 1.2 does not have; NULL where the loader or the device lacks shared virtual memory.
 */
struct opencl_svm {
    cl_int(CL_API_CALL *set_arg)(cl_kernel, cl_uint, const void *);
    cl_int(CL_API_CALL *map)(cl_command_queue, cl_bool, cl_map_flags, void *, size_t, cl_uint, const cl_event *,
                             cl_event *);
    cl_int(CL_API_CALL *unmap)(cl_command_queue, void *, cl_uint, const cl_event *, cl_event *);
};

/* clattn_context.state of an OpenCL context. */
struct opencl {
    struct opencl_device device;
    cl_context context;
    cl_command_queue queue; /* in-order, unless it is the caller's */
    struct opencl_svm svm;
    const char *tier;     /* "portable" ... */
    pid_t pid;            /* that opened it; a forked child must not use it */
    bool out_of_order;    /* the caller's queue is */
    bool used_clblast;
    pthread_mutex_t lock; /* programs */
    pthread_mutex_t queue_lock; /* recursive: see opencl_queue_lock */
    struct opencl_program *programs;
    pthread_mutex_t workspace_lock;
    struct opencl_workspace workspace;
    struct tuning_table tuning;
    struct subgroup subgroup; /* in use; kind 0: the subgroup tier is not */
    struct nvidia *nvidia; /* the matrix tier of NVIDIA cards; NULL: not on this device */
};

static inline struct opencl *opencl_of(const clattn_context *context)
{
    return context->state;
}

/* CLATTN_FORKED in a child process of the one that opened the context. */
clattn_status opencl_check_process(clattn_context *context);

/* An OpenCL error as a failure: "clEnqueueNDRangeKernel(select): OpenCL: out of resources (-5)". */
clattn_status opencl_fail(clattn_context *context, cl_int code, const char *what);

/* ---- programs ---- */

/* A new kernel object for this call alone (release it with clReleaseKernel), so that threads never share one.
 *
 * file     "attention_forward.cl": the program is cl/common.cl, then this file and what it includes;
 *          "mma_nvidia.cl+select_mma.cl": it is these files in this order. CLATTN_KERNEL_DIR replaces each
 * name     of the kernel in it
 * options  "-DDIM=64 -DLEAF=64": integers only; "" is allowed. -cl-std=CL1.2 is added
 *
 * A program is built once a context, or taken from the disk cache. DEVICE_LIMIT when the kernel's
 * reqd_work_group_size or local memory exceeds what the device has, when a driver built no program for want of
 * registers or local memory, or when a launch of the program was refused before: try smaller tiles (this is no
 * error in the log). CLATTN_INTERNAL with the build log in the detail when the source does not compile. */
clattn_status opencl_kernel(clattn_context *context, const char *file, const char *name, const char *options,
                            cl_kernel *kernel);

/* Only whether it can be had, for the ladders of tiles; a later opencl_kernel finds the program built. */
clattn_status opencl_kernel_try(clattn_context *context, const char *file, const char *name,
                                const char *options);

/* A kernel that was built cannot be launched, by `code`: its program is DEVICE_LIMIT from now on, for the life
 * of the context. False when that was known. */
bool opencl_kernel_refuse(clattn_context *context, cl_kernel kernel, const char *name, cl_int code);

void opencl_programs_release(struct opencl *state);

/* Does a program's source have instructions that only Hopper cards have (opencl_hopper.c)? Its binary's text with them;
 * NULL without memory, or when the text is not what the step was written for. */
bool opencl_hopper_wanted(const char *source);
char *opencl_hopper_text(const char *text);

/* ---- program cache on disk ---- */

/* Entries are addressed by their whole key text, which says everything that the payload depends on. Without
 * xxHash nothing is ever found or kept. Failures are silent: there is just no entry. */

/* The payload (free it), or NULL. An entry that is damaged is unlinked. */
void *opencl_cache_load(const char *key, size_t *bytes);
bool opencl_cache_writable(void); /* else there is no need to make a payload */
void opencl_cache_store(const char *key, const void *payload, size_t bytes);
void opencl_cache_drop(const char *key);

/* A key for this device: `kind`, then the library's version, the device and its driver, then `what` and a hash
 * of `text` (sources). Free it; NULL without memory. */
char *opencl_cache_key(const struct opencl_device *device, const char *kind, const char *what,
                       const char *text);

/* ---- memory ---- */

clattn_status opencl_storage_create(clattn_context *context, size_t bytes, struct storage *storage);
clattn_status opencl_storage_copy(clattn_context *context, const void *data, size_t bytes,
                                  struct storage *storage); /* data NULL: undefined content */
void opencl_storage_release(clattn_context *context, struct storage *storage);
clattn_status opencl_storage_write(clattn_context *context, struct storage *storage, const void *data,
                                   size_t bytes);
clattn_status opencl_storage_read(clattn_context *context, const struct storage *storage, size_t offset,
                                  void *data, size_t bytes);
clattn_status opencl_storage_fill(clattn_context *context, struct storage *storage, int32_t value, size_t words,
                                  const clattn_sync *sync);
clattn_status opencl_tensor_upload(clattn_context *context, const clattn_tensor *host,
                                   const clattn_tensor *device);
clattn_status opencl_tensor_download(clattn_context *context, const clattn_tensor *device,
                                     const clattn_tensor *host);

/* Before a transfer on the context's queue: checks the process, and waits for what came before out of order. */
clattn_status opencl_transfer_begin(clattn_context *context);

/* One past the last element of a tensor, counted from its memory's begin. */
int64_t opencl_tensor_end(const clattn_tensor *tensor);

/* Is a tensor's cl_mem a buffer of this context and large enough? SVM: does the device have it? */
clattn_status opencl_check_tensor(clattn_context *context, const clattn_tensor *tensor);
clattn_status opencl_tensor_check(clattn_context *context, const clattn_tensor *tensor); /* and the process */

/* Memory for the commands of one launch on `queue`, and its return when they are enqueued; storage->bytes may be more
 * than was asked for. */
clattn_status opencl_workspace_take(clattn_context *context, cl_command_queue queue, size_t bytes,
                                    struct storage *storage);
void opencl_workspace_give(clattn_context *context, cl_command_queue queue, bool out_of_order,
                           struct storage *storage);
void opencl_workspace_release(struct opencl *state);

/* ---- launches ---- */

/* Between these a thread has the queues for itself, on devices that need it (OPENCL_QUIRK_ONE_THREAD): from its first
 * command to the clFlush or the end of the transfer behind the last one. */
bool opencl_queue_lock(clattn_context *context); /* does the device need it? */
void opencl_queue_unlock(clattn_context *context);

enum { OPENCL_TEMPORARIES = 16 };

/* The commands of one call, in order. */
struct opencl_launch {
    clattn_context *context;
    const clattn_sync *sync; /* NULL: opencl_launch_end waits */
    cl_command_queue queue;
    bool out_of_order;    /* barriers between our commands */
    bool is_locked;       /* opencl_queue_lock */
    cl_event last;        /* event of the last command, once there is one */
    cl_kernel kernel;     /* that the next run enqueues */
    char name[64];        /* its name, for messages */
    bool has_run;         /* the kernel was enqueued */
    bool is_final; /* set by the operation: it cannot be repeated, since what is enqueued adds to its results */
    bool is_refused;      /* the driver refused the kernel (-5, -54, -55): see opencl_launch_run */
    cl_uint arg;          /* its next argument */
    clattn_status status; /* the first error */
    struct storage temporaries[OPENCL_TEMPORARIES], tables[OPENCL_TEMPORARIES];
    int temporary_count, table_count;
};

/* Takes the queue of `sync` (the context's own without) and its wait list. */
void opencl_launch_begin(clattn_context *context, const clattn_sync *sync, struct opencl_launch *launch);

/* Chooses the kernel that the following arguments and runs are for; see opencl_kernel. */
void opencl_launch_kernel(struct opencl_launch *launch, const char *file, const char *name,
                          const char *options);

/* Memory for this launch only, released when its commands are complete: uninitialised, or a copy of `data` made
 * now (a table of sequences). NULL after an error. */
cl_mem opencl_launch_temporary(struct opencl_launch *launch, size_t bytes);
cl_mem opencl_launch_table(struct opencl_launch *launch, const void *data, size_t bytes);

/* The kernel's arguments from the first to the last. */
void opencl_arg_tensor(struct opencl_launch *launch,
                       const clattn_tensor *tensor); /* its memory; NULL: no memory */
void opencl_arg_strides(struct opencl_launch *launch,
                        const clattn_tensor *tensor); /* long offset, batch_stride,
                                                         len_stride, head_stride */
void opencl_arg_storage(struct opencl_launch *launch, const struct storage *storage); /* NULL: no memory */
void opencl_arg_mem(struct opencl_launch *launch, cl_mem mem);
void opencl_arg_local(struct opencl_launch *launch, size_t bytes);
void opencl_arg_int(struct opencl_launch *launch, int32_t value);  /* int */
void opencl_arg_long(struct opencl_launch *launch, int64_t value); /* long */
void opencl_arg_float(struct opencl_launch *launch, float value);

/* Enqueues the kernel. A driver may find only now that a work-group of it has too many registers, too much
 * local memory or too many items. Then the program is DEVICE_LIMIT for opencl_kernel from now on, and
 * is_refused stands in the launch: an operation with a ladder of tiles ends the launch and begins again with
 * the ladder. global [dims] must be multiples of local [dims]. May be called again with the same arguments, or
 * after opencl_arg_from(launch, i) and setting arguments i ... anew (launches that are cut into parts). A
 * global size with a zero enqueues nothing. */
void opencl_launch_run(struct opencl_launch *launch, cl_uint dims, const size_t *global, const size_t *local);
void opencl_arg_from(struct opencl_launch *launch, cl_uint index);

/* Enqueues the filling of the first words of a buffer. */
void opencl_launch_fill(struct opencl_launch *launch, cl_mem mem, int32_t value, size_t words);

/* Releases everything, gives the event when it was asked for, waits without a clattn_sync; the launch's status.
 */
clattn_status opencl_launch_end(struct opencl_launch *launch);

/* Waits for all of the queue of `sync`. */
clattn_status opencl_finish(clattn_context *context, const clattn_sync *sync);

/* ---- operations: opencl_pyramid.c, opencl_select.c, opencl_forward.c and so on ---- */

clattn_status opencl_pyramid_build(clattn_context *context, const struct pyramid_job *job);
clattn_status opencl_select(clattn_context *context, const struct select_job *job);
clattn_status opencl_forward(clattn_context *context, const struct forward_job *job);
clattn_status opencl_backward(clattn_context *context, const struct backward_job *job);
clattn_status opencl_gather(clattn_context *context, const struct gather_job *job);
clattn_status opencl_cache_append(clattn_context *context, const struct cache_append_job *job);
clattn_status opencl_cache_copy(clattn_context *context, clattn_cache *cache, const struct cache_copy *copies,
                                int64_t count, const clattn_sync *sync);
clattn_status opencl_cache_cut(clattn_context *context, clattn_cache *cache, int32_t sequence,
                               const clattn_sync *sync);
clattn_status opencl_decode(clattn_context *context, const struct decode_job *job);
void opencl_cache_release(clattn_context *context, clattn_cache *cache);
clattn_status opencl_merge(clattn_context *context, const struct merge_job *job);
clattn_status opencl_quantize(clattn_context *context, const struct quantize_job *job);

/* Products by CLBlast. Dense attention: is it wanted for this job; run it (done false: it could not, nothing else failed when the
 * status is success); drop what it keeps for the context. */
bool opencl_dense_wanted(clattn_context *context, const struct forward_job *job);
clattn_status opencl_dense(clattn_context *context, const struct forward_job *job, bool *done);
bool opencl_flat_wanted(clattn_context *context, const struct select_job *job); /* flat selection by means, likewise */
clattn_status opencl_flat(clattn_context *context, const struct select_job *job, bool *done);
void opencl_dense_forget(const struct opencl *state);

/* ---- trials and self-test ---- */

/* Something that may fail, crash or hang the first time it is tried on a device: opencl_trial.c. */
struct opencl_trial {
    char *key;       /* of the disk cache; NULL: results are not kept */
    bool has_passed; /* an earlier time */
};

/* An error is what became of it earlier: NO_DEVICE. Otherwise try it, unless it has passed. */
clattn_status opencl_trial_begin(clattn_context *context, const char *what, struct opencl_trial *trial);
/* Remembers success, NO_DEVICE and INTERNAL, with the context's error. Also after an error of the begin. */
void opencl_trial_end(clattn_context *context, struct opencl_trial *trial, clattn_status status);

/* Compares a small attention case with the reference backend; the result is kept in the disk cache. */
clattn_status opencl_selftest(clattn_context *context);
char *opencl_all_sources(void); /* the text of all embedded kernels; free it; NULL without memory */

#endif
