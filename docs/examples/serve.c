/* One kernel of a tunekit bundle, called from C through TVM-FFI. No Python, no compiler.
 *
 *     cc serve.c -I$INCLUDE -I$DLPACK -L$LIB -ltvm_ffi -ldl -Wl,-rpath,$LIB -o serve
 *     ./serve FILE SYMBOL ROWS COLS
 *
 * INCLUDE and DLPACK: `tvm-ffi-config --includedir` and `--dlpack-includedir`; LIB: `tvm-ffi-config --libdir`.
 * FILE and SYMBOL: an entry's "file" and "symbol" in bundle.json. This one takes what its "arguments" say there:
 * x and y of [rows, cols] float32 on the CPU, and a number. COLS is a static axis: give the entry's own.
 */
#include "kernel.h"

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
    DLDevice cpu = {kDLCPU, 0};
    DLDataType float32 = {kDLFloat, 32, 1};
    DLTensor x_tensor = tensor(x, cpu, float32, shape, strides, 2), y_tensor = tensor(y, cpu, float32, shape, strides, 2);

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
