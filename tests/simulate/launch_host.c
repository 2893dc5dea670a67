// Host code as CuTeDSL exports it, written by hand: what its compiler can't be made to emit.

#include <stddef.h>
#include <stdint.h>

int _cudaGetDevice(int *device);
int _cudaDeviceGetAttribute(int *value, int attribute, int device);
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name);
int _cudaLaunchKernelEx(const void *config, const void *kernel, void **parameters);
int _cudaMalloc(void **address, size_t bytes);
void CuteDSLRT_TVMFFISetRaisedCudaError(void *raise, int error);
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count);

struct Attribute {
    int identity;
    int padding;
    unsigned value[16];
};

struct Config {
    unsigned grid[3], block[3];
    size_t shared_bytes;
    void *stream;
    struct Attribute *attributes;
    unsigned attribute_count;
};

static int ended(int error) {
    if (error) CuteDSLRT_TVMFFISetRaisedCudaError(TVMFFIErrorSetRaisedFromCStrParts, error);
    return error ? -1 : 0;
}

static int launch(const char *name, struct Config config, void **parameters) {
    void *kernel;
    int error = _cudaLibraryGetKernel(&kernel, NULL, name);
    return ended(error ? error : _cudaLaunchKernelEx(&config, kernel, parameters));
}

#define FUNCTION(name) int __tvm_ffi_##name(void *self, const void *arguments, int32_t count, void *result)
#define ONE_CTA {1, 1, 1}, {32, 1, 1}

FUNCTION(attributes) {
    struct Attribute given[] = {{0}, {4, 0, {2, 1, 1}}, {11, 0, {4, 1, 1}}, {2, 0, {1}}, {8, 0, {-3u}}, {77, 0, {5, 6}}};
    int value = 7;
    return launch("k", (struct Config){{4, 3, 2}, {32, 2, 1}, 100, NULL, given, 6}, (void *[]){&value});
}

FUNCTION(device) {
    static const int asked[] = {16, 75, 76, 97};
    for (int i = 0; i < 4; i++) {
        int value, device;
        if (_cudaGetDevice(&device) || _cudaDeviceGetAttribute(&value, asked[i], device)) return -1;
        if (launch("k", (struct Config){ONE_CTA}, (void *[]){&value})) return -1;
    }
    return 0;
}

FUNCTION(unknown_attribute) {
    int value;
    return ended(_cudaDeviceGetAttribute(&value, 9999, 0));
}

FUNCTION(allocates) {
    void *address;
    return ended(_cudaMalloc(&address, 16));
}

FUNCTION(required_cluster) { return launch("clustered", (struct Config){ONE_CTA}, NULL); }

FUNCTION(much_shared) { return launch("k", (struct Config){ONE_CTA, 232448 - 100}, (void *[]){&(int){0}}); }

FUNCTION(many_threads) { return launch("k", (struct Config){{1, 1, 1}, {1024, 2, 1}}, (void *[]){&(int){0}}); }

FUNCTION(empty_grid) { return launch("k", (struct Config){{1, 0, 1}, {32, 1, 1}}, (void *[]){&(int){0}}); }

FUNCTION(unknown_kernel) { return launch("nobody", (struct Config){ONE_CTA}, NULL); }
