// A stand-in for CuTeDSL's runtime library: it launches nothing and tells Python what it was asked to launch.
//
// The host code of an exported kernel calls the CUDA runtime through these names only. The layouts are those of
// CUDA's driver_types.h (cudaLaunchConfig_t, read by capture.py) and of cuda_dialect_init_library_once as exported
// objects of nvidia-cutlass-dsl 4.8.1 call it. Each function returns a cudaError_t; 0 is success.

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801 };

// What Python answers, each with a cudaError_t.
struct Answers {
    int (*launch)(const char *kernel, const void *config, void **parameters);
    int (*device_attribute)(int attribute, int *value);
    int (*kernel_attribute)(const char *kernel, int attribute, int *value);
    int (*refuse)(const char *function);
};
static struct Answers answers;

void tunekit_answers(const struct Answers *given) { answers = *given; }

// --- The library that holds the kernels: its handle is the machine code's address, a kernel's handle its name.

int cuda_dialect_init_library_once(void **library, int (*load)(void **), int (*to_device)(void **, int),
                                   void (*set_error)(const char *kind, const char *message)) {
    if (*library) return SUCCESS;
    void *loaded = NULL;
    int error = load(&loaded);
    if (!error && to_device) error = to_device(&loaded, 0);
    if (error) {
        char message[96];
        snprintf(message, sizeof message, "the kernel's library does not load: CUDA error %d", error);
        set_error("RuntimeError", message);
        return -1;
    }
    *library = loaded;
    return SUCCESS;
}

void cuda_dialect_unload_library_once(void **library) { *library = NULL; }

int _cudaLibraryLoadData(void **library, const void *code) {
    *library = (void *)code;
    return code ? SUCCESS : INVALID_VALUE;
}

int _cudaLibraryUnload(void *library) { return SUCCESS; }

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = strdup(name);  // a few names a process: never freed, for host code keeps them
    return *kernel ? SUCCESS : INVALID_VALUE;
}

int _cuKernelGetAttribute(int *value, int attribute, const char *kernel, int device) {
    return answers.kernel_attribute(kernel, attribute, value);
}

// Preferences and limits that the launch itself shows.
int _cudaFuncSetAttribute(const void *kernel, int attribute, int value) { return SUCCESS; }
int _cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) { return SUCCESS; }

// --- The one device.

int _cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int _cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID_VALUE : SUCCESS; }
int _cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int _cudaSetDevice(int device) { return device ? INVALID_VALUE : SUCCESS; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return answers.device_attribute(attribute, value);
}
int _cudaGetLastError(void) { return SUCCESS; }
int _cudaDeviceSynchronize(void) { return SUCCESS; }
int _cudaStreamSynchronize(void *stream) { return SUCCESS; }

// --- The launch.

int _cudaLaunchKernelEx(const void *config, const char *kernel, void **parameters) {
    return answers.launch(kernel, config, parameters);
}

// --- How generated code raises.

typedef void (*RaiseParts)(const char *kind, const char **parts, int32_t count);

void CuteDSLRT_TVMFFISetRaisedCudaError(RaiseParts raise, int error) {
    if (!raise) return;
    char number[32];
    snprintf(number, sizeof number, "%d", error);
    const char *parts[] = {"CUDA error ", number};
    raise("RuntimeError", parts, 2);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(RaiseParts raise, int error) {
    CuteDSLRT_TVMFFISetRaisedCudaError(raise, error);
}

const char *CuteDSLRT_GetErrorName(int error) { return error ? "cudaError" : "cudaSuccess"; }
const char *CuteDSLRT_GetErrorString(int error) { return error ? "an error of the launch's stand-in" : "no error"; }
const char *cuda_dialect_get_error_name(int error) { return CuteDSLRT_GetErrorName(error); }

// --- The rest of the runtime library: refused by name, so that nothing is silently left out of a launch.

#define REFUSED(name) int name(void) { return answers.refuse(#name); }
REFUSED(_cudaMalloc)
REFUSED(_cudaMallocAsync)
REFUSED(_cudaMallocHost)
REFUSED(_cudaMallocManaged)
REFUSED(_cudaFree)
REFUSED(_cudaFreeAsync)
REFUSED(_cudaFreeHost)
REFUSED(_cudaMemcpy)
REFUSED(_cudaMemcpyAsync)
REFUSED(_cudaMemset)
REFUSED(_cudaMemsetAsync)
REFUSED(_cudaLaunchKernel)
REFUSED(_cudaGetDeviceProperties)
REFUSED(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(_cudaLibraryLoadFromFile)
REFUSED(_cudaLibraryGetGlobal)
REFUSED(_cudaLibraryGetManaged)
REFUSED(_cudaLibraryGetKernelCount)
REFUSED(_cudaLibraryGetUnifiedFunction)
REFUSED(_cuLibraryLoadData)
REFUSED(_cuLibraryLoadFromFile)
REFUSED(_cuLibraryUnload)
REFUSED(_cuLibraryGetKernel)
REFUSED(_cuLibraryGetGlobal)
REFUSED(_cuLibraryGetManaged)
REFUSED(_cuLibraryGetModule)
REFUSED(_cuLibraryGetKernelCount)
REFUSED(_cuLibraryGetUnifiedFunction)
REFUSED(_cuTensorMapEncodeTiled)
REFUSED(_cudaStreamCreate)
REFUSED(_cudaStreamDestroy)
REFUSED(_cudaStreamWaitEvent)
REFUSED(_cudaStreamAddCallback)
REFUSED(_cudaStreamBeginCapture)
REFUSED(_cudaStreamEndCapture)
REFUSED(_cudaEventCreate)
REFUSED(_cudaEventDestroy)
REFUSED(_cudaEventRecord)
REFUSED(_cudaEventElapsedTime)
REFUSED(_cudaGraphInstantiate)
REFUSED(_cudaGraphLaunch)
REFUSED(_cudaGraphDestroy)
REFUSED(_cudaGraphExecDestroy)
