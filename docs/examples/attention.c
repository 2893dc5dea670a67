/* Attention of a tunekit bundle, called from C on a GPU through TVM-FFI. No Python, no compiler.
 *
 *     cc attention.c -I$INCLUDE -I$DLPACK -I$CUDA/include -L$LIB -ltvm_ffi -L$CUDA/lib64 -lcudart -ldl -lm \
 *         -Wl,-rpath,$LIB -o attention
 *     LD_LIBRARY_PATH=$RUNTIME ./attention FILE SYMBOL BATCH T HEADS KV_HEADS S_K HEAD_DIM <qkv >o
 *
 * INCLUDE, DLPACK, LIB, FILE and SYMBOL as in serve.c; RUNTIME: the directory of libcute_dsl_runtime.so. This one takes
 * the arguments of an fmha problem without flags: q, k, v and o in bfloat16, and the scale. `qkv` holds q [batch, t,
 * heads, head_dim], k and v [batch, s_k, kv_heads, head_dim], dense, one after the other; `o` is of q's shape.
 */
#include <cuda_runtime.h>
#include <math.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "kernel.h"

enum { Q, K, V, O, TENSORS };

static void check(cudaError_t status) {
    if (!status) return;
    fprintf(stderr, "%s\n", cudaGetErrorString(status));
    exit(1);
}

/* The next `size` bytes of standard input, in GPU memory; `host` has room for them on the way. */
static void *from_input(void *host, size_t size) {
    void *there;
    if (fread(host, 1, size, stdin) != size) {
        fprintf(stderr, "the input ends too early\n");
        exit(2);
    }
    check(cudaMalloc(&there, size));
    check(cudaMemcpy(there, host, size, cudaMemcpyHostToDevice));
    return there;
}

int main(int count, char **words) {
    if (count != 9) {
        fprintf(stderr, "usage: attention FILE SYMBOL BATCH T HEADS KV_HEADS S_K HEAD_DIM <qkv >o\n");
        return 2;
    }
    int64_t size[6];
    for (int i = 0; i < 6; ++i) {
        size[i] = atoll(words[3 + i]);
        if (size[i] < 1 || size[i] > 1 << 20) {
            fprintf(stderr, "sizes are numbers from 1 to %d\n", 1 << 20);
            return 2;
        }
    }
    int64_t batch = size[0], t = size[1], heads = size[2], kv_heads = size[3], s_k = size[4], head_dim = size[5];
    int64_t shapes[TENSORS][4] = {
        [Q] = {batch, t, heads, head_dim},
        [K] = {batch, s_k, kv_heads, head_dim},
        [V] = {batch, s_k, kv_heads, head_dim},
        [O] = {batch, t, heads, head_dim},
    };
    check(cudaSetDevice(0));
    cudaStream_t stream;
    check(cudaStreamCreate(&stream));
    Kernel kernel = load_kernel(words[1], words[2]);

    DLTensor tensors[TENSORS];
    int64_t strides[TENSORS][4];
    size_t bytes[TENSORS], most = 0;
    for (int i = 0; i < TENSORS; ++i) {
        bytes[i] = 2 * (size_t)(shapes[i][0] * shapes[i][1] * shapes[i][2] * shapes[i][3]);
        if (bytes[i] > most) most = bytes[i];
    }
    void *host = malloc(most);
    if (!host) return 2;
    for (int i = 0; i < TENSORS; ++i) {
        void *data;
        if (i == O) check(cudaMalloc(&data, bytes[i]));
        else data = from_input(host, bytes[i]);
        tensors[i] = tensor(data, (DLDevice){kDLCUDA, 0}, (DLDataType){kDLBfloat, 16, 1}, shapes[i], strides[i], 4);
    }

    TVMFFIAny args[TENSORS + 1];
    for (int i = 0; i < TENSORS; ++i) args[i] = tensor_argument(&tensors[i]);
    args[TENSORS] = number_argument(1.0 / sqrt((double)head_dim));
    TVMFFIAny result;
    memset(&result, 0, sizeof result); /* kTVMFFINone, as in serve.c */
    /* The stream is this thread's, for all calls that follow. */
    if (TVMFFIEnvSetStream(kDLCUDA, 0, stream, NULL) || kernel(NULL, args, TENSORS + 1, &result)) {
        print_error();
        return 1;
    }
    check(cudaStreamSynchronize(stream));
    check(cudaMemcpy(host, tensors[O].data, bytes[O], cudaMemcpyDeviceToHost));
    return fwrite(host, 1, bytes[O], stdout) == bytes[O] ? 0 : 1;
}
