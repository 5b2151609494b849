/* SPDX-License-Identifier: MIT */
/* See fake_opencl.h. Only what the library calls is here; objects are counted, nothing is checked. */

#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include "fake_opencl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fake fake = {
    .memory_bytes = 16ull << 30,
    .alloc_max = 4ull << 30,
    .local_bytes = 64 << 10,
    .compute_units = 32,
    .group_max = 1024,
};

struct object {
    int count;
};

struct _cl_platform_id {
    int none;
};
struct _cl_device_id {
    int none;
};
struct _cl_context {
    struct object object;
};
struct _cl_command_queue {
    struct object object;
};
struct _cl_event {
    struct object object;
};
struct _cl_mem {
    struct object object;
    size_t bytes;
    void *data;
};
struct _cl_program {
    struct object object;
    char *source, *options;
    bool is_binary;
};
struct _cl_kernel {
    struct object object;
    cl_program program;
    char name[64];
    struct fake_argument arguments[FAKE_ARGUMENTS];
};

static struct _cl_platform_id platform;
static struct _cl_device_id device;
static struct _cl_context context;
static struct _cl_command_queue queue;

enum { HOPPER = 9, BINARY_BYTES = 64 };
static cl_program last_binary;

const void *fake_buffer_data(cl_mem buffer)
{
    return buffer->data;
}

/* ---- answers ---- */

static cl_int answer(const void *value, size_t bytes, size_t room, void *to, size_t *need)
{
    if (need) *need = bytes;
    if (to && room < bytes) return CL_INVALID_VALUE;
    if (to) memcpy(to, value, bytes);
    return CL_SUCCESS;
}
#define ANSWER(type, value)                                                                                    \
    do {                                                                                                       \
        type given = (value);                                                                                  \
        return answer(&given, sizeof given, room, to, need);                                                   \
    } while (0)
#define ANSWER_TEXT(text) return answer(text, strlen(text) + 1, room, to, need)

cl_int clGetPlatformIDs(cl_uint room, cl_platform_id *to, cl_uint *count)
{
    if (room && to) *to = &platform;
    if (count) *count = 1;
    return CL_SUCCESS;
}

cl_int clGetPlatformInfo(cl_platform_id id, cl_platform_info what, size_t room, void *to, size_t *need)
{
    (void)id;
    if (what == CL_PLATFORM_VERSION) ANSWER_TEXT("OpenCL 1.2");
    ANSWER_TEXT("fake");
}

cl_int clGetDeviceIDs(cl_platform_id id, cl_device_type type, cl_uint room, cl_device_id *to, cl_uint *count)
{
    (void)id, (void)type;
    if (room && to) *to = &device;
    if (count) *count = 1;
    return CL_SUCCESS;
}

cl_int clGetDeviceInfo(cl_device_id id, cl_device_info what, size_t room, void *to, size_t *need)
{
    const size_t subgroups[] = {8, 16, 32};
    const size_t sides[] = {fake.group_max, fake.group_max, fake.group_max};
    (void)id;
    switch (what) {
    case CL_DEVICE_TYPE:
        ANSWER(cl_device_type, CL_DEVICE_TYPE_GPU);
    case CL_DEVICE_PLATFORM:
        ANSWER(cl_platform_id, &platform);
    case CL_DEVICE_AVAILABLE:
    case CL_DEVICE_COMPILER_AVAILABLE:
        ANSWER(cl_bool, CL_TRUE);
    case CL_DEVICE_VENDOR_ID:
        ANSWER(cl_uint, fake.vendor_id);
    case CL_DEVICE_MAX_WORK_GROUP_SIZE:
        ANSWER(size_t, fake.group_max);
    case CL_DEVICE_MAX_WORK_ITEM_SIZES:
        return answer(sides, sizeof sides, room, to, need);
    case CL_DEVICE_LOCAL_MEM_SIZE:
        ANSWER(cl_ulong, fake.local_bytes);
    case CL_DEVICE_LOCAL_MEM_TYPE:
        ANSWER(cl_device_local_mem_type, CL_LOCAL);
    case CL_DEVICE_GLOBAL_MEM_SIZE:
        ANSWER(cl_ulong, fake.memory_bytes);
    case CL_DEVICE_MAX_MEM_ALLOC_SIZE:
        ANSWER(cl_ulong, fake.alloc_max);
    case CL_DEVICE_MAX_COMPUTE_UNITS:
        ANSWER(cl_uint, fake.compute_units);
    case CL_DEVICE_VERSION:
        ANSWER_TEXT("OpenCL 1.2");
    case CL_DEVICE_NAME:
        ANSWER_TEXT("fake GPU");
    case CL_DRIVER_VERSION:
        ANSWER_TEXT("1");
    case CL_DEVICE_EXTENSIONS:
        ANSWER_TEXT(fake.extensions ? fake.extensions : "");
    case 0x4000: /* CL_DEVICE_COMPUTE_CAPABILITY_MAJOR_NV */
        if (fake.nvidia_generation == 0) return CL_INVALID_VALUE;
        ANSWER(cl_uint, fake.nvidia_generation);
    case 0x4108: /* CL_DEVICE_SUB_GROUP_SIZES_INTEL */
        return answer(subgroups, sizeof subgroups, room, to, need);
    }
    return CL_INVALID_VALUE;
}

void *clGetExtensionFunctionAddressForPlatform(cl_platform_id id, const char *name)
{
    (void)id, (void)name;
    return NULL;
}

/* ---- contexts, queues, events ---- */

cl_context clCreateContext(const cl_context_properties *properties, cl_uint count, const cl_device_id *devices,
                           void(CL_CALLBACK *notify)(const char *, const void *, size_t, void *), void *user,
                           cl_int *code)
{
    (void)properties, (void)count, (void)devices, (void)notify, (void)user;
    *code = CL_SUCCESS;
    return &context;
}

cl_int clGetContextInfo(cl_context id, cl_context_info what, size_t room, void *to, size_t *need)
{
    (void)id, (void)what;
    ANSWER(cl_device_id, &device);
}

cl_int clRetainContext(cl_context id)
{
    (void)id;
    return CL_SUCCESS;
}

cl_int clReleaseContext(cl_context id)
{
    (void)id;
    return CL_SUCCESS;
}

cl_command_queue clCreateCommandQueue(cl_context id, cl_device_id of, cl_command_queue_properties properties,
                                      cl_int *code)
{
    (void)id, (void)of, (void)properties;
    *code = CL_SUCCESS;
    return &queue;
}

cl_int clGetCommandQueueInfo(cl_command_queue id, cl_command_queue_info what, size_t room, void *to,
                             size_t *need)
{
    (void)id;
    if (what == CL_QUEUE_CONTEXT) ANSWER(cl_context, &context);
    if (what == CL_QUEUE_DEVICE) ANSWER(cl_device_id, &device);
    ANSWER(cl_command_queue_properties, 0);
}

cl_int clRetainCommandQueue(cl_command_queue id)
{
    (void)id;
    return CL_SUCCESS;
}

cl_int clReleaseCommandQueue(cl_command_queue id)
{
    (void)id;
    return CL_SUCCESS;
}

cl_int clFlush(cl_command_queue id)
{
    (void)id;
    return CL_SUCCESS;
}

cl_int clFinish(cl_command_queue id)
{
    (void)id;
    return CL_SUCCESS;
}

static cl_int give_event(cl_event *event)
{
    if (!event) return CL_SUCCESS;
    *event = calloc(1, sizeof **event);
    return *event ? CL_SUCCESS : CL_OUT_OF_HOST_MEMORY;
}

cl_int clWaitForEvents(cl_uint count, const cl_event *events)
{
    (void)count, (void)events;
    return CL_SUCCESS;
}

cl_int clGetEventInfo(cl_event event, cl_event_info what, size_t room, void *to, size_t *need)
{
    (void)event, (void)what;
    ANSWER(cl_int, CL_COMPLETE);
}

cl_int clReleaseEvent(cl_event event)
{
    free(event);
    return CL_SUCCESS;
}

cl_int clEnqueueBarrierWithWaitList(cl_command_queue id, cl_uint count, const cl_event *list, cl_event *event)
{
    (void)id, (void)count, (void)list;
    return give_event(event);
}

cl_int clEnqueueMarkerWithWaitList(cl_command_queue id, cl_uint count, const cl_event *list, cl_event *event)
{
    (void)id, (void)count, (void)list;
    return give_event(event);
}

/* ---- memory ---- */

cl_mem clCreateBuffer(cl_context id, cl_mem_flags flags, size_t bytes, void *data, cl_int *code)
{
    (void)id;
    cl_mem mem = calloc(1, sizeof *mem);
    *code = mem ? CL_SUCCESS : CL_OUT_OF_HOST_MEMORY;
    if (!mem) return NULL;
    mem->object.count = 1;
    mem->bytes = bytes;
    if (flags & CL_MEM_COPY_HOST_PTR && (mem->data = malloc(bytes))) memcpy(mem->data, data, bytes);
    return mem;
}

cl_int clGetMemObjectInfo(cl_mem mem, cl_mem_info what, size_t room, void *to, size_t *need)
{
    if (what == CL_MEM_TYPE) ANSWER(cl_mem_object_type, CL_MEM_OBJECT_BUFFER);
    if (what == CL_MEM_CONTEXT) ANSWER(cl_context, &context);
    ANSWER(size_t, mem->bytes);
}

cl_int clRetainMemObject(cl_mem mem)
{
    mem->object.count++;
    return CL_SUCCESS;
}

cl_int clReleaseMemObject(cl_mem mem)
{
    if (--mem->object.count) return CL_SUCCESS;
    free(mem->data);
    free(mem);
    return CL_SUCCESS;
}

cl_int clEnqueueReadBuffer(cl_command_queue id, cl_mem mem, cl_bool blocking, size_t offset, size_t bytes,
                           void *to, cl_uint count, const cl_event *list, cl_event *event)
{
    (void)id, (void)mem, (void)blocking, (void)offset, (void)count, (void)list;
    memset(to, 0, bytes);
    return give_event(event);
}

cl_int clEnqueueWriteBuffer(cl_command_queue id, cl_mem mem, cl_bool blocking, size_t offset, size_t bytes,
                            const void *from, cl_uint count, const cl_event *list, cl_event *event)
{
    (void)id, (void)mem, (void)blocking, (void)offset, (void)bytes, (void)from, (void)count, (void)list;
    return give_event(event);
}

cl_int clEnqueueFillBuffer(cl_command_queue id, cl_mem mem, const void *pattern, size_t pattern_bytes,
                           size_t offset, size_t bytes, cl_uint count, const cl_event *list, cl_event *event)
{
    (void)id, (void)mem, (void)pattern, (void)pattern_bytes, (void)offset, (void)bytes, (void)count, (void)list;
    return give_event(event);
}

cl_int clEnqueueReadBufferRect(cl_command_queue id, cl_mem mem, cl_bool blocking, const size_t *from,
                               const size_t *to, const size_t *region, size_t row, size_t slice, size_t to_row,
                               size_t to_slice, void *data, cl_uint count, const cl_event *list,
                               cl_event *event)
{
    (void)id, (void)mem, (void)blocking, (void)from, (void)to, (void)row, (void)slice, (void)to_row,
        (void)to_slice;
    (void)count, (void)list;
    memset(data, 0, region[0] * region[1] * region[2]);
    return give_event(event);
}

cl_int clEnqueueWriteBufferRect(cl_command_queue id, cl_mem mem, cl_bool blocking, const size_t *to,
                                const size_t *from, const size_t *region, size_t row, size_t slice,
                                size_t from_row, size_t from_slice, const void *data, cl_uint count,
                                const cl_event *list, cl_event *event)
{
    (void)id, (void)mem, (void)blocking, (void)to, (void)from, (void)region, (void)row, (void)slice,
        (void)from_row;
    (void)from_slice, (void)data, (void)count, (void)list;
    return give_event(event);
}

/* ---- programs and kernels ---- */

cl_program clCreateProgramWithSource(cl_context id, cl_uint count, const char **texts, const size_t *lengths,
                                     cl_int *code)
{
    (void)id, (void)count, (void)lengths;
    cl_program program = calloc(1, sizeof *program);
    *code = CL_SUCCESS;
    if (!program || !(program->source = strdup(texts[0]))) abort();
    program->object.count = 1;
    return program;
}

cl_program clCreateProgramWithBinary(cl_context id, cl_uint count, const cl_device_id *devices,
                                     const size_t *bytes, const unsigned char **binaries, cl_int *status,
                                     cl_int *code)
{
    void *of = NULL;
    (void)id, (void)count, (void)devices, (void)bytes, (void)status;
    *code = CL_INVALID_BINARY;
    if (fake.nvidia_generation < HOPPER ||
        sscanf((const char *)*binaries, ".target sm_90a, fake %p", &of) != 1 || of != last_binary)
        return NULL;
    *code = CL_SUCCESS;
    last_binary->is_binary = true;
    return last_binary; /* the same program again, with the count that its binary took */
}

cl_int clBuildProgram(cl_program program, cl_uint count, const cl_device_id *devices, const char *options,
                      void(CL_CALLBACK *notify)(cl_program, void *), void *user)
{
    (void)count, (void)devices, (void)notify, (void)user;
    if (program->is_binary) return CL_SUCCESS; /* it keeps its options */
    free(program->options);
    if (!(program->options = strdup(options ? options : ""))) abort();
    return CL_SUCCESS;
}

cl_int clGetProgramBuildInfo(cl_program program, cl_device_id of, cl_program_build_info what, size_t room,
                             void *to, size_t *need)
{
    (void)program, (void)of, (void)what;
    ANSWER_TEXT("");
}

/* There are no binaries, so nothing gets into the program cache; but for Hopper cards, whose programs are built
 * from their own binaries (lib/opencl_hopper.c). Theirs is PTX that does nothing, and the address of the
 * program it is of. */
cl_int clGetProgramInfo(cl_program program, cl_program_info what, size_t room, void *to, size_t *need)
{
    if (fake.nvidia_generation < HOPPER) return CL_INVALID_VALUE;
    switch (what) {
    case CL_PROGRAM_NUM_DEVICES:
        ANSWER(cl_uint, 1);
    case CL_PROGRAM_DEVICES:
        ANSWER(cl_device_id, &device);
    case CL_PROGRAM_BINARY_SIZES:
        ANSWER(size_t, BINARY_BYTES);
    case CL_PROGRAM_BINARIES:
        snprintf(*(char **)to, BINARY_BYTES, ".target sm_90, fake\n%p", (void *)program);
        last_binary = program;
        program->object.count++;
        return CL_SUCCESS;
    }
    return CL_INVALID_VALUE;
}

cl_int clReleaseProgram(cl_program program)
{
    if (--program->object.count) return CL_SUCCESS;
    free(program->source);
    free(program->options);
    free(program);
    return CL_SUCCESS;
}

cl_kernel clCreateKernel(cl_program program, const char *name, cl_int *code)
{
    cl_kernel kernel = calloc(1, sizeof *kernel);
    if (!kernel) abort();
    *code = CL_SUCCESS;
    kernel->program = program;
    strncpy(kernel->name, name, sizeof kernel->name - 1);
    if (fake.on_kernel) fake.on_kernel(name, program->source, program->options);
    return kernel;
}

cl_int clGetKernelInfo(cl_kernel kernel, cl_kernel_info what, size_t room, void *to, size_t *need)
{
    if (what == CL_KERNEL_PROGRAM) ANSWER(cl_program, kernel->program);
    ANSWER_TEXT(kernel->name);
}

/* Only a compiler could tell. */
cl_int clGetKernelWorkGroupInfo(cl_kernel kernel, cl_device_id of, cl_kernel_work_group_info what, size_t room,
                                void *to, size_t *need)
{
    (void)kernel, (void)of, (void)what, (void)room, (void)to, (void)need;
    return CL_INVALID_VALUE;
}

cl_int clSetKernelArg(cl_kernel kernel, cl_uint index, size_t bytes, const void *value)
{
    if (index >= FAKE_ARGUMENTS || (value && bytes > FAKE_ARGUMENT_BYTES)) return CL_INVALID_ARG_INDEX;
    kernel->arguments[index].bytes = bytes;
    if (value) memcpy(kernel->arguments[index].value, value, bytes);
    return CL_SUCCESS;
}

cl_int clReleaseKernel(cl_kernel kernel)
{
    free(kernel);
    return CL_SUCCESS;
}

cl_int clEnqueueNDRangeKernel(cl_command_queue id, cl_kernel kernel, cl_uint dims, const size_t *offset,
                              const size_t *global, const size_t *local, cl_uint count, const cl_event *list,
                              cl_event *event)
{
    struct fake_launch launch = {kernel->name, 1, 1, kernel->arguments};
    (void)id, (void)offset, (void)count, (void)list;
    for (cl_uint i = 0; i < dims; i++) {
        launch.global *= global[i];
        launch.local *= local ? local[i] : 1;
    }
    if (fake.on_launch) fake.on_launch(&launch);
    return give_event(event);
}
