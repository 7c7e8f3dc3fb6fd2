// Launches the Triton kernels that a package of sage_inductor holds. Inductor's wrapper.cpp has this
// text once, after its own includes: cuda.h, the aoti_torch_* functions and RAIIAtenTensorHandle.
// The functions that use it are generated: lowering/record.py writes what launches what, and the
// facts they rely on are checked when they run.
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>

namespace sage_inductor {
namespace {

using torch::aot_inductor::RAIIAtenTensorHandle;

[[noreturn]] inline void fail(const std::string& message) {
  throw std::runtime_error("sage_inductor: " + message);
}

inline void check(CUresult code, const char* what) {
  if (code == CUDA_SUCCESS) return;
  const char* text = nullptr;
  cuGetErrorString(code, &text);
  int driver = 0;
  cuDriverGetVersion(&driver);
  fail(std::string(what) + ": " + (text ? text : "unknown error") + " (the driver is for CUDA " +
       std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10) + ")");
}

inline void check_torch(AOTITorchError code, const char* what) {
  if (code != AOTI_TORCH_SUCCESS) fail(std::string("torch failed at ") + what);
}

// -- devices ----

constexpr int MAX_DEVICES = 64;

// The current stream of the device that a tensor is on.
struct Gpu {
  int32_t index;
  int processors;
  CUstream stream;

  // capability: 10 * major + minor, of which the package's kernels are.
  Gpu(AtenTensorHandle x, int capability) {
    check_torch(aoti_torch_get_device_index(x, &index), "a tensor's device");
    if (index < 0 || index >= MAX_DEVICES) fail("a tensor must be on one of 64 GPUs");
    void* current;
    check_torch(aoti_torch_get_current_cuda_stream(index, &current), "the current stream");
    stream = static_cast<CUstream>(current);
    static std::array<std::atomic<int>, MAX_DEVICES> known;  // processors; 0: not asked yet
    processors = known[index].load(std::memory_order_relaxed);
    if (processors) return;
    CUdevice device;  // of the current context, which AOTInductor's guard has set
    check(cuCtxGetDevice(&device), "the current device");
    int major, minor;
    check(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "a GPU's attribute");
    check(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "a GPU's attribute");
    if (10 * major + minor != capability) {
      fail("this package holds kernels for compute capability " + std::to_string(capability / 10) + "." +
           std::to_string(capability % 10) + ", got a GPU of " + std::to_string(major) + "." +
           std::to_string(minor) + ": package the model again on such a GPU");
    }
    check(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), "a GPU's attribute");
    known[index].store(processors, std::memory_order_relaxed);
  }
};

// -- kernels ----

constexpr int MAX_ARGUMENTS = 96, MAX_DESCRIPTORS = 12;

struct Descriptor {  // as Triton's tensordesc_meta
  int swizzle, element_size, element_type;
  cuuint32_t box[5];  // at most a block: TMA reads as many bytes of a row as it swizzles
};

// A cubin. It is loaded once for each device.
struct Kernel {
  const char* name;
  const char* image;
  uint64_t size, digest;  // FNV-1a of the image
  unsigned threads, shared;
  bool overlaps;  // programmatic dependent launch
  Descriptor descriptors[MAX_DESCRIPTORS];
  std::atomic<CUfunction> loaded[MAX_DEVICES] = {};

  CUfunction on(int device) {
    CUfunction function = loaded[device].load(std::memory_order_acquire);
    return function ? function : load(device);
  }

  CUfunction load(int device) {
    static std::mutex lock;
    const std::lock_guard<std::mutex> guard(lock);
    if (CUfunction function = loaded[device].load()) return function;
    uint64_t found = 1469598103934665603ull;
    for (uint64_t i = 0; i < size; ++i) {
      found = (found ^ static_cast<unsigned char>(image[i])) * 1099511628211ull;
    }
    if (found != digest) fail(std::string("the kernel ") + name + " in this package is damaged");
    CUmodule module;
    CUfunction function;
    check(cuModuleLoadData(&module, image), (std::string("loading the kernel ") + name).c_str());
    check(cuModuleGetFunction(&function, module, name), name);
    if (shared > 48 * 1024) {
      check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared), name);
    }
    loaded[device].store(function, std::memory_order_release);
    return function;
  }
};

// What a kernel is launched with. Each number has 8 bytes here: the driver copies as many of them as
// the kernel declares.
struct Arguments {
  alignas(64) CUtensorMap maps[MAX_DESCRIPTORS];
  int64_t numbers[MAX_ARGUMENTS];
  void* pointers[MAX_ARGUMENTS];
  int used = 0, used_maps = 0;

  void i64(int64_t x) {
    numbers[used] = x;
    pointers[used] = &numbers[used];
    ++used;
  }
  void i32(int64_t x) {
    if (x > std::numeric_limits<int32_t>::max() || x < std::numeric_limits<int32_t>::min()) {
      fail("a size must fit in 32 bits, got " + std::to_string(x));
    }
    i64(x);
  }
  void pointer(const void* address) { i64(reinterpret_cast<int64_t>(address)); }

  // The descriptor of a tensor, and what Triton passes after it: its shape and strides.
  void descriptor(
      const Descriptor& d, void* base, std::initializer_list<int64_t> shape,
      std::initializer_list<int64_t> strides) {
    descriptor(d, base, static_cast<int>(shape.size()), shape.begin(), strides.begin());
  }
  void descriptor(
      const Descriptor& d, void* base, int rank, const int64_t* shape, const int64_t* strides) {
    cuuint64_t sizes[5], steps[5];
    cuuint32_t box[5], ones[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < rank; ++i) {  // TMA counts dimensions from the last
      sizes[i] = shape[rank - 1 - i];
      box[i] = d.box[rank - 1 - i];
      if (i) steps[i - 1] = strides[rank - 1 - i] * d.element_size;
    }
    CUtensorMap* map = &maps[used_maps++];
    check(
        cuTensorMapEncodeTiled(
            map, static_cast<CUtensorMapDataType>(d.element_type), rank, base, sizes, steps, box, ones,
            CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(d.swizzle),
            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "a tensor descriptor");
    pointers[used++] = map;
    for (int i = 0; i < rank; ++i) i32(shape[i]);
    for (int i = 0; i < rank; ++i) i64(strides[i]);
  }
};

inline void launch(Kernel& kernel, const Gpu& gpu, int64_t x, int64_t y, int64_t z, Arguments& a) {
  if (x > std::numeric_limits<int32_t>::max() || y > 65535 || z > 65535) fail("a grid is too large");
  a.pointer(nullptr);  // Triton's scratch memory, of which our kernels ask for none
  a.pointer(nullptr);
  CUlaunchAttribute attribute;
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(x);
  config.gridDimY = static_cast<unsigned>(y);
  config.gridDimZ = static_cast<unsigned>(z);
  config.blockDimX = kernel.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared;
  config.hStream = gpu.stream;
  config.attrs = &attribute;
  config.numAttrs = kernel.overlaps ? 1 : 0;
  check(cuLaunchKernelEx(&config, kernel.on(gpu.index), a.pointers, nullptr), kernel.name);
}

// -- tensors ----

// What was known of a number while packaging, and kernels were compiled for.
inline bool holds(int64_t x, int64_t low, int64_t high, int64_t divisor) {
  return x >= low && x <= high && x % divisor == 0;
}

[[noreturn]] inline void refuse(
    const std::string& what, int64_t got, int64_t low, int64_t high, int64_t divisor) {
  std::string must = std::to_string(low);
  if (high == std::numeric_limits<int64_t>::max()) must = "at least " + must;
  else if (low != high) must += " to " + std::to_string(high);
  if (divisor > 1 && low != high) must += " and a multiple of " + std::to_string(divisor);
  fail(what + " must be " + must + ", as when the package was made, got " + std::to_string(got));
}

inline void expect(const char* name, int64_t x, int64_t low, int64_t high, int64_t divisor) {
  if (!holds(x, low, high, divisor)) refuse(name, x, low, high, divisor);
}

// A tensor that was given, at an address that kernels may rely on: a multiple of 16.
struct Given {
  const char* name;
  RAIIAtenTensorHandle copy;
  void* data;
  int64_t *sizes, *strides;

  Given(const char* its_name, AtenTensorHandle x, int64_t rank, int32_t dtype) : name(its_name) {
    int64_t its_rank;
    int32_t its_dtype;
    check_torch(aoti_torch_get_dim(x, &its_rank), name);
    check_torch(aoti_torch_get_dtype(x, &its_dtype), name);
    if (its_rank != rank) refuse(std::string(name) + ": its rank", its_rank, rank, rank, 1);
    if (its_dtype != dtype) fail(std::string(name) + " must have the dtype that it had when the package was made");
    check_torch(aoti_torch_get_data_ptr(x, &data), name);
    if (reinterpret_cast<uintptr_t>(data) % 16) {
      AtenTensorHandle aligned;
      check_torch(aoti_torch_clone_preserve_strides(x, &aligned), name);
      copy = RAIIAtenTensorHandle(aligned);
      x = copy.get();
      check_torch(aoti_torch_get_data_ptr(x, &data), name);
    }
    check_torch(aoti_torch_get_sizes(x, &sizes), name);
    check_torch(aoti_torch_get_strides(x, &strides), name);
  }

  void size(int dim, int64_t low, int64_t high, int64_t divisor) const {
    if (!holds(sizes[dim], low, high, divisor)) refuse(its("size", dim), sizes[dim], low, high, divisor);
  }
  void stride(int dim, int64_t low, int64_t high, int64_t divisor) const {
    if (sizes[dim] == 1) return;  // not used
    if (!holds(strides[dim], low, high, divisor)) refuse(its("stride", dim), strides[dim], low, high, divisor);
  }
  void contiguous(int rank) const {
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      stride(i, step, step, 1);
      step *= sizes[i] ? sizes[i] : 1;  // as torch has it where there are no elements
    }
  }
  std::string its(const char* what, int dim) const {
    return std::string(name) + ": its " + what + " in dimension " + std::to_string(dim);
  }
};

// Memory of torch's allocator, contiguous.
struct Made {
  RAIIAtenTensorHandle handle;
  void* data;

  Made(std::initializer_list<int64_t> sizes, int32_t dtype, const Gpu& gpu)
      : Made(static_cast<int>(sizes.size()), sizes.begin(), dtype, gpu) {}

  Made(int rank, const int64_t* sizes, int32_t dtype, const Gpu& gpu) {
    int64_t strides[8], step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      strides[i] = step;
      step *= sizes[i] ? sizes[i] : 1;  // as torch has it where there are no elements
    }
    AtenTensorHandle x;
    check_torch(aoti_torch_empty_strided(rank, sizes, strides, dtype, aoti_torch_device_type_cuda(), gpu.index, &x), "memory");
    handle = RAIIAtenTensorHandle(x);
    check_torch(aoti_torch_get_data_ptr(x, &data), "memory");
  }

  AtenTensorHandle give() { return handle.release(); }
  AtenTensorHandle give(std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
    return give(sizes.size(), sizes.begin(), strides.begin());
  }
  AtenTensorHandle give(int64_t rank, const int64_t* sizes, const int64_t* strides) {
    AtenTensorHandle x;
    check_torch(aoti_torch__reinterpret_tensor(handle, rank, sizes, strides, 0, &x), "a view");
    return x;
  }
};

}  // namespace
}  // namespace sage_inductor
