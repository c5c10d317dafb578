/* A libcuda.so.1 without a GPU: it knows the functions that Triton's launcher and kvloom's driver code call, is
 * compiled against the declarations that Triton brings, notes what it is asked for, and refuses what the real one
 * refuses: work without a current context, streams and graphs that are none. Kernels do nothing.
 *
 * STUB_FAIL="name ..." lets functions fail; STUB_MPS=1 says that MPS runs. There are two GPUs, of which the first works:
 * STUB_PEERS=1 says that they reach each other's memory, STUB_PEERS=2 by atomics, too; STUB_OWNER=1 that all memory is
 * the second's. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MOST 4096
#define CONTEXT 0x100000
#define MULTIPROCESSORS 132
#define GPUS 2

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char notes[1 << 22];
static size_t noted;
static int launches, recording;
static char *functions[MOST];
static uintptr_t count_functions, count_streams, count_graphs, count_descriptions, count_green;
static struct { int capturing, green, nodes; } streams[MOST];
static unsigned described[MOST], green[MOST], graphs[MOST];
static __thread CUcontext current;

static void note(const char *form, ...) {
  va_list given;
  va_start(given, form);
  pthread_mutex_lock(&lock);
  if (noted < sizeof notes - 256) {
    noted += (size_t)vsnprintf(notes + noted, 255, form, given);
    notes[noted++] = '\n';
  }
  pthread_mutex_unlock(&lock);
  va_end(given);
}

/* For Python: what was noted since it was last asked for, and the kernels that were launched until now. */
const char *stub_notes(void) {
  static char told[sizeof notes];
  pthread_mutex_lock(&lock);
  memcpy(told, notes, noted);
  told[noted] = 0;
  noted = 0;
  pthread_mutex_unlock(&lock);
  return told;
}

int stub_launches(void) { return launches; }

static int fails(const char *name) {
  const char *all = getenv("STUB_FAIL");
  size_t size = strlen(name);
  for (const char *at = all; at && (at = strstr(at, name)); at += size)
    if ((at == all || at[-1] == ' ') && (!at[size] || at[size] == ' ')) return 1;
  return 0;
}

#define MAY_FAIL if (fails(__func__)) return CUDA_ERROR_NOT_SUPPORTED
#define IN_CONTEXT MAY_FAIL; if (!current) return CUDA_ERROR_INVALID_CONTEXT

static int stream_of(CUstream stream) { return (int)((uintptr_t)stream & (MOST - 1)); }

CUresult cuInit(unsigned flags) { MAY_FAIL; return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = GPUS; return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal < 0 || ordinal >= GPUS ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

static int number_of(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  MAY_FAIL;
  *can = number_of("STUB_PEERS") > 0;
  return device == peer ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice source, CUdevice target) {
  MAY_FAIL;
  if (attribute != CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED || source || target != 1)
    return CUDA_ERROR_INVALID_VALUE;
  *value = number_of("STUB_PEERS") > 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  MAY_FAIL;
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MPS_ENABLED: *value = getenv("STUB_MPS") != NULL; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  MAY_FAIL;
  *context = (CUcontext)CONTEXT;
  return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { (void)limit; *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { (void)limit; (void)value; return CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_CONTEXT ? "invalid device context" : "an error of the stub";
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  IN_CONTEXT;
  if (memcmp(image, "\177ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  IN_CONTEXT;
  if (!module || count_functions == MOST) return CUDA_ERROR_INVALID_HANDLE;
  if (recording) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  functions[count_functions] = strdup(name);
  *function = (CUfunction)++count_functions;
  note("load %s", name);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 32;
  return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  (void)attribute; (void)value;
  return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  (void)config;
  return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  (void)function; (void)config;
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  IN_CONTEXT;
  uintptr_t number = (uintptr_t)function;
  if (!number || number > count_functions || !arguments || extra) return CUDA_ERROR_INVALID_HANDLE;
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ || config->gridDimY > 65535 ||
      config->gridDimZ > 65535 || config->sharedMemBytes > 232448)
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  launches++;
  pthread_mutex_unlock(&lock);
  int stream = stream_of(config->hStream);
  streams[stream].nodes += streams[stream].capturing;
  note("launch %s %u on %d", functions[number - 1], config->gridDimX, stream);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  IN_CONTEXT;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    *(int *)data = number_of("STUB_OWNER");
    return CUDA_SUCCESS;
  }
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_INVALID_VALUE;
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
  MAY_FAIL;
  if (device || type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_VALUE;
  memset(resource, 0, sizeof *resource);
  resource->type = type;
  resource->sm.smCount = MULTIPROCESSORS;
  return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned *groups, const CUdevResource *input,
                                     CUdevResource *rest, unsigned flags, unsigned least) {
  MAY_FAIL;
  unsigned each = (least + 7) / 8 * 8, most = input->sm.smCount / each;
  if (flags || !groups) return CUDA_ERROR_INVALID_VALUE;
  *groups = !result || *groups > most ? most : *groups;
  for (unsigned i = 0; result && i < *groups; i++) {
    result[i] = *input;
    result[i].sm.smCount = each;
  }
  if (rest) {
    *rest = *input;
    rest->sm.smCount = input->sm.smCount - *groups * each;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *description, CUdevResource *resources, unsigned count) {
  MAY_FAIL;
  unsigned sum = 0;
  for (unsigned i = 0; i < count; i++) sum += resources[i].sm.smCount;
  if (!sum || count_descriptions == MOST - 1) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  described[++count_descriptions] = sum;
  *description = (CUdevResourceDesc)count_descriptions;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc description, CUdevice device, unsigned flags) {
  IN_CONTEXT;
  uintptr_t number = (uintptr_t)description;
  if (device || flags != CU_GREEN_CTX_DEFAULT_STREAM || !number || number > count_descriptions)
    return CUDA_ERROR_INVALID_VALUE;
  green[++count_green] = described[number];
  *context = (CUgreenCtx)count_green;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx context, unsigned flags, int priority) {
  IN_CONTEXT;
  uintptr_t number = (uintptr_t)context;
  if (flags != CU_STREAM_NON_BLOCKING || priority || !number || number > count_green)
    return CUDA_ERROR_INVALID_VALUE;
  streams[++count_streams].green = (int)green[number];
  *stream = (CUstream)count_streams;
  note("stream %d of %u", (int)count_streams, green[number]);
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  IN_CONTEXT;
  int number = stream_of(stream);
  if (!number || streams[number].capturing || mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    return CUDA_ERROR_ILLEGAL_STATE;
  streams[number].capturing = recording = 1;
  streams[number].nodes = 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  IN_CONTEXT;
  int number = stream_of(stream);
  if (!streams[number].capturing) return CUDA_ERROR_ILLEGAL_STATE;
  streams[number].capturing = recording = 0;
  graphs[++count_graphs] = (unsigned)streams[number].nodes;
  *graph = (CUgraph)count_graphs;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *ready, CUgraph graph, unsigned long long flags) {
  IN_CONTEXT;
  *ready = (CUgraphExec)graph;
  return graph && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphLaunch(CUgraphExec ready, CUstream stream) {
  IN_CONTEXT;
  if (!ready || streams[stream_of(stream)].capturing) return CUDA_ERROR_INVALID_VALUE;
  note("replay %u on %d", graphs[(uintptr_t)ready], stream_of(stream));
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec ready) { return ready ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuGraphDestroy(CUgraph graph) { return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult cuStreamSynchronize(CUstream stream) {
  IN_CONTEXT;
  return streams[stream_of(stream)].capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
  IN_CONTEXT;
  *base = pointer & ~(CUdeviceptr)511;  /* as if allocations lay at multiples of 512 */
  if (size) *size = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
  IN_CONTEXT;
  memset(handle, 0x5a, sizeof *handle);
  memcpy(handle, &pointer, sizeof pointer);
  note("export %llx", pointer);
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
  IN_CONTEXT;
  const unsigned char *bytes = (const unsigned char *)&handle;
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || bytes[63] != 0x5a) return CUDA_ERROR_INVALID_HANDLE;
  memcpy(pointer, bytes, sizeof *pointer);
  note("map %llx", *pointer);
  return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  IN_CONTEXT;
  note("unmap %llx", pointer);
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

#define KNOWN(name) {#name, (void *)name}
static const struct { const char *name; void *function; } known[] = {
    KNOWN(cuInit), KNOWN(cuDriverGetVersion), KNOWN(cuDeviceGetCount), KNOWN(cuDeviceGet),
    KNOWN(cuDeviceGetAttribute), KNOWN(cuDevicePrimaryCtxRetain), KNOWN(cuCtxSetCurrent), KNOWN(cuCtxGetCurrent),
    KNOWN(cuGetErrorString), KNOWN(cuDeviceCanAccessPeer), KNOWN(cuDeviceGetP2PAttribute),
    KNOWN(cuPointerGetAttribute), KNOWN(cuDeviceGetDevResource), KNOWN(cuDevSmResourceSplitByCount),
    KNOWN(cuDevResourceGenerateDesc), KNOWN(cuGreenCtxCreate), KNOWN(cuGreenCtxStreamCreate),
    KNOWN(cuStreamBeginCapture), KNOWN(cuStreamEndCapture), KNOWN(cuGraphLaunch),
    {"cuGraphInstantiateWithFlags", (void *)cuGraphInstantiate},
    KNOWN(cuGraphExecDestroy), KNOWN(cuGraphDestroy), KNOWN(cuStreamSynchronize), KNOWN(cuMemGetAddressRange),
    KNOWN(cuIpcGetMemHandle), KNOWN(cuIpcOpenMemHandle), KNOWN(cuIpcCloseMemHandle), KNOWN(cuGetProcAddress),
};

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
  (void)version; (void)flags;
  *function = NULL;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(symbol, known[i].name)) *function = known[i].function;
  if (status)
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
