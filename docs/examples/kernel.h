/* Calling a kernel of a tunekit bundle from C through TVM-FFI: what serve.c and attention.c share. */
#ifndef TUNEKIT_KERNEL_H
#define TUNEKIT_KERNEL_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/c_api.h>

/* What every kernel is: 0, or -1 with an error raised in this thread. */
typedef int (*Kernel)(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result);

/* The kernel that `file` exports as `symbol`; it stays loaded, so open each file once and keep the pointer. */
static inline Kernel load_kernel(const char *file, const char *symbol) {
    char name[256];
    snprintf(name, sizeof name, "__tvm_ffi_%s", symbol);
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    Kernel kernel;
    memcpy(&kernel, &found, sizeof kernel);
    return kernel;
}

/* A dense row-major tensor over memory of yours, on {kDLCPU, 0}, or {kDLCUDA, index} for a device pointer. */
static inline DLTensor tensor(void *data, DLDevice device, DLDataType dtype, int64_t *shape, int64_t *strides, int dims) {
    int64_t stride = 1;
    for (int i = dims - 1; i >= 0; --i) {
        strides[i] = stride;
        stride *= shape[i];
    }
    DLTensor made = {
        .data = data,
        .device = device,
        .ndim = dims,
        .dtype = dtype,
        .shape = shape,
        .strides = strides,
        .byte_offset = 0,
    };
    return made;
}

/* An argument: type_index says which member of the union counts; the rest must be zero. */
static inline TVMFFIAny tensor_argument(DLTensor *tensor) {
    TVMFFIAny argument;
    memset(&argument, 0, sizeof argument);
    argument.type_index = kTVMFFIDLTensorPtr;
    argument.v_ptr = tensor;
    return argument;
}

static inline TVMFFIAny number_argument(double number) {
    TVMFFIAny argument;
    memset(&argument, 0, sizeof argument);
    argument.type_index = kTVMFFIFloat;
    argument.v_float64 = number;
    return argument;
}

/* Print the error that the last failed call of this thread raised, and let go of it. */
static inline void print_error(void) {
    TVMFFIObjectHandle error = NULL;
    TVMFFIErrorMoveFromRaised(&error);
    if (!error) return;
    const TVMFFIErrorCell *cell = (const TVMFFIErrorCell *)((const char *)error + sizeof(TVMFFIObject));
    fprintf(stderr, "%.*s: %.*s\n", (int)cell->kind.size, cell->kind.data, (int)cell->message.size, cell->message.data);
    TVMFFIObjectDecRef(error);
}

#endif
