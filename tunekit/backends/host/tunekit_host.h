/* For kernels of the `host` backend: the arguments of a TVM-FFI call, in C.
 *
 * A kernel is written as
 *
 *     #include "tunekit_host.h"
 *     TUNEKIT_KERNEL(args, count) {
 *         const DLTensor *x = tensor_arg(args, 0);
 *         ...
 *         return 0;    // or fail("what went wrong")
 *     }
 *
 * and exported under the name that the backend gives.
 */
#ifndef TUNEKIT_HOST_H
#define TUNEKIT_HOST_H

#include <stddef.h>
#include <stdint.h>
#include <tvm/ffi/c_api.h>

static int tunekit_kernel(const TVMFFIAny *args, int32_t count);

__attribute__((visibility("default"))) int TUNEKIT_SYMBOL(void *self, const TVMFFIAny *args, int32_t count,
                                                          TVMFFIAny *result) {
    (void)self;
    result->type_index = kTVMFFINone;
    result->v_int64 = 0;
    return tunekit_kernel(args, count);
}

#define TUNEKIT_KERNEL(args, count) static int tunekit_kernel(const TVMFFIAny *args, int32_t count)

/* The tensor passed at `index`, whether boxed in an object or bare. */
static inline const DLTensor *tensor_arg(const TVMFFIAny *args, int32_t index) {
    if (args[index].type_index == kTVMFFIDLTensorPtr) return (const DLTensor *)args[index].v_ptr;
    return (const DLTensor *)((const char *)args[index].v_obj + sizeof(TVMFFIObject));
}

/* The first element of the tensor at `index`. */
static inline void *data_arg(const TVMFFIAny *args, int32_t index) {
    const DLTensor *tensor = tensor_arg(args, index);
    return (char *)tensor->data + tensor->byte_offset;
}

/* The number passed at `index`. */
static inline double scalar_arg(const TVMFFIAny *args, int32_t index) {
    return args[index].type_index == kTVMFFIFloat ? args[index].v_float64 : (double)args[index].v_int64;
}

static inline int fail(const char *message) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
    return -1;
}

#endif
