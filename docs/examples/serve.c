/* One kernel of a tunekit bundle, called from C through TVM-FFI. No Python, no compiler.
 *
 *     cc serve.c -I$INCLUDE -I$DLPACK -L$LIB -ltvm_ffi -ldl -Wl,-rpath,$LIB -o serve
 *     ./serve FILE SYMBOL ROWS COLS
 *
 * INCLUDE and DLPACK: `tvm-ffi-config --includedir` and `--dlpack-includedir`; LIB: `tvm-ffi-config --libdir`.
 * FILE and SYMBOL: an entry's "file" and "symbol" in bundle.json. This one takes what its "arguments" say there:
 * x and y of [rows, cols] float32 on the CPU, and a number. COLS is a static axis: give the entry's own.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/c_api.h>

/* What every kernel is: 0, or -1 with an error raised in this thread. */
typedef int (*Kernel)(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result);

/* The kernel that `file` exports as `symbol`; it stays loaded, so open each file once and keep the pointer. */
static Kernel load_kernel(const char *file, const char *symbol) {
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

/* A dense row-major tensor over memory of yours. On a GPU: {kDLCUDA, index} and a device pointer. */
static DLTensor tensor(void *data, int64_t *shape, int64_t *strides, int dims) {
    int64_t stride = 1;
    for (int i = dims - 1; i >= 0; --i) {
        strides[i] = stride;
        stride *= shape[i];
    }
    DLTensor made = {
        .data = data,
        .device = {kDLCPU, 0},
        .ndim = dims,
        .dtype = {kDLFloat, 32, 1},
        .shape = shape,
        .strides = strides,
        .byte_offset = 0,
    };
    return made;
}

/* An argument: type_index says which member of the union counts; the rest must be zero. */
static TVMFFIAny tensor_argument(DLTensor *tensor) {
    TVMFFIAny argument;
    memset(&argument, 0, sizeof argument);
    argument.type_index = kTVMFFIDLTensorPtr;
    argument.v_ptr = tensor;
    return argument;
}

static TVMFFIAny number_argument(double number) {
    TVMFFIAny argument;
    memset(&argument, 0, sizeof argument);
    argument.type_index = kTVMFFIFloat;
    argument.v_float64 = number;
    return argument;
}

/* Print the error that the last failed call of this thread raised, and let go of it. */
static void print_error(void) {
    TVMFFIObjectHandle error = NULL;
    TVMFFIErrorMoveFromRaised(&error);
    if (!error) return;
    const TVMFFIErrorCell *cell = (const TVMFFIErrorCell *)((const char *)error + sizeof(TVMFFIObject));
    fprintf(stderr, "%.*s: %.*s\n", (int)cell->kind.size, cell->kind.data, (int)cell->message.size, cell->message.data);
    TVMFFIObjectDecRef(error);
}

int main(int count, char **words) {
    if (count != 5) {
        fprintf(stderr, "usage: serve FILE SYMBOL ROWS COLS\n");
        return 2;
    }
    Kernel kernel = load_kernel(words[1], words[2]);
    int64_t shape[2] = {atoll(words[3]), atoll(words[4])}, strides[2];
    if (shape[0] < 1 || shape[1] < 1 || shape[0] > INT32_MAX / shape[1]) {
        fprintf(stderr, "ROWS and COLS are numbers from 1, and so is their product, to %d\n", INT32_MAX);
        return 2;
    }
    int64_t size = shape[0] * shape[1];
    float *x = malloc(size * sizeof *x), *y = malloc(size * sizeof *y);
    if (!x || !y) return 2;
    for (int64_t i = 0; i < size; ++i) x[i] = (float)i;
    DLTensor x_tensor = tensor(x, shape, strides, 2), y_tensor = tensor(y, shape, strides, 2);

    /* On a GPU, first say on which stream: TVMFFIEnvSetStream(kDLCUDA, index, stream, NULL). */
    TVMFFIAny args[3] = {tensor_argument(&x_tensor), tensor_argument(&y_tensor), number_argument(0.5)};
    TVMFFIAny result;
    memset(&result, 0, sizeof result); /* type_index 0 is kTVMFFINone, as a caller must leave it */
    int status = kernel(NULL, args, 3, &result);
    if (status) print_error();
    for (int64_t i = 0; i < size && !status; ++i) printf("%.9g\n", y[i]);
    free(x);
    free(y);
    return status ? 1 : 0;
}
