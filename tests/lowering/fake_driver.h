// A CUDA driver and, but WITH_TORCH, a torch that write down what launcher.h asks of them, a line of
// JSON each. The headers are the real ones, so that each call has the types of the real function. An address is a
// number: nothing is ever read from it.
#include <cuda.h>
#include <torch/csrc/inductor/aoti_runtime/utils.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

namespace fake {

struct Tensor {
  int64_t address;
  std::vector<int64_t> sizes, strides;
  int32_t dtype, device;
};

std::mutex lock;
std::ostringstream written;
int64_t addresses = int64_t(1) << 50;
int live = 0;  // tensors

template <class Values>
std::string list(const Values& values) {
  std::string text = "[";
  for (auto x : values) text += (text.size() > 1 ? ", " : "") + std::to_string(x);
  return text + "]";
}

void write(const std::string& line) { written << "{" << line << "}\n"; }

std::string text(const char* name, int64_t x) { return std::string("\"") + name + "\": " + std::to_string(x); }
std::string text(const char* name, const std::string& x) { return std::string("\"") + name + "\": " + x; }
std::string quoted(const std::string& x) { return "\"" + x + "\""; }

std::string text(const Tensor& x) {
  return text("address", x.address) + ", " + text("sizes", list(x.sizes)) + ", " + text("strides", list(x.strides)) +
         ", " + text("dtype", x.dtype) + ", " + text("device", x.device);
}

Tensor& of(AtenTensorHandle x) { return *reinterpret_cast<Tensor*>(x); }

AtenTensorHandle make(int64_t address, int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device) {
  ++live;
  auto* x = new Tensor{address, {sizes, sizes + rank}, {strides, strides + rank}, dtype, device};
  return reinterpret_cast<AtenTensorHandle>(x);
}

// An image is text: its digest, and the bytes of each of its parameters.
std::string word(const void* image) { return std::string(static_cast<const char*>(image)).substr(0, 12); }

std::map<int64_t, std::string> descriptors;

}  // namespace fake

extern "C" {

// What a test may set.
int capability = 90, driver = 12080, load_fails = 0, launch_fails = 0, torch_fails = 0, current = 0, loading_ms = 0;
int processors[64] = {132, 1, 78, 114};

CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = code == CUDA_ERROR_NO_BINARY_FOR_GPU ? "no kernel image" : code == CUDA_ERROR_LAUNCH_FAILED ? "launch failed" : nullptr;
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) { return *version = driver, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = current, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* x, CUdevice_attribute attribute, CUdevice device) {
  *x = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? capability / 10
       : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? capability % 10
       : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? processors[device]
                                                                   : -1;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  std::this_thread::sleep_for(std::chrono::milliseconds(loading_ms));
  const std::lock_guard<std::mutex> guard(fake::lock);
  if (load_fails) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  fake::write(fake::text("load", fake::quoted(fake::word(image))) + ", " + fake::text("on", current));
  *module = reinterpret_cast<CUmodule>(const_cast<void*>(image));
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if ("name_" + fake::word(module) != name) return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  const std::lock_guard<std::mutex> guard(fake::lock);
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  fake::write(fake::text("shared_of", fake::quoted(fake::word(function))) + ", " + fake::text("bytes", value));
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes,
    const cuuint64_t* steps, const cuuint32_t* box, const cuuint32_t* element_steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  const std::lock_guard<std::mutex> guard(fake::lock);
  const std::vector<int64_t> others{interleave, promotion, fill};
  const int64_t id = fake::descriptors.size() + 1;
  if (reinterpret_cast<uintptr_t>(map) % 64) return CUDA_ERROR_INVALID_VALUE;
  fake::descriptors[id] =
      "{" + fake::text("type", type) + ", " + fake::text("address", reinterpret_cast<int64_t>(base)) + ", " +
      fake::text("sizes", fake::list(std::vector<int64_t>(sizes, sizes + rank))) + ", " +
      fake::text("steps", fake::list(std::vector<int64_t>(steps, steps + rank - 1))) + ", " +
      fake::text("box", fake::list(std::vector<int64_t>(box, box + rank))) + ", " +
      fake::text("element_steps", fake::list(std::vector<int64_t>(element_steps, element_steps + rank))) + ", " +
      fake::text("swizzle", swizzle) + ", " + fake::text("others", fake::list(others)) + "}";
  std::memcpy(map, &id, sizeof id);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
  const std::lock_guard<std::mutex> guard(fake::lock);
  if (launch_fails || extra) return CUDA_ERROR_LAUNCH_FAILED;
  std::istringstream image(reinterpret_cast<const char*>(function));
  std::string digest, arguments;
  image >> digest;
  int64_t bytes;
  for (int i = 0; image >> bytes; ++i) {
    int64_t x = 0;
    std::memcpy(&x, parameters[i], std::min<int64_t>(bytes, 8));
    if (bytes == 4) x = static_cast<int32_t>(x);
    arguments += (i ? ", " : "") + (bytes == 128 ? fake::descriptors.at(x) : std::to_string(x));
  }
  int overlaps = 0;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    overlaps += c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                c->attrs[i].value.programmaticStreamSerializationAllowed;
  }
  fake::write(
      fake::text("launch", fake::quoted(digest)) + ", " +
      fake::text("grid", fake::list(std::vector<int64_t>{c->gridDimX, c->gridDimY, c->gridDimZ})) + ", " +
      fake::text("block", fake::list(std::vector<int64_t>{c->blockDimX, c->blockDimY, c->blockDimZ})) + ", " +
      fake::text("shared", c->sharedMemBytes) + ", " + fake::text("overlaps", overlaps) + ", " +
      fake::text("stream", reinterpret_cast<int64_t>(c->hStream)) + ", " + fake::text("arguments", "[" + arguments + "]"));
  return CUDA_SUCCESS;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t index, void** stream) {
  *stream = reinterpret_cast<void*>(int64_t(7000 + index));
  return AOTI_TORCH_SUCCESS;
}

#ifdef WITH_TORCH  // its tensors, on CPU
int32_t aoti_torch_device_type_cuda() { return 0; }
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) { return *index = 0, AOTI_TORCH_SUCCESS; }
#else
int32_t aoti_torch_device_type_cuda() { return 1; }
#define DTYPE(name, number) \
  int32_t aoti_torch_dtype_##name() { return number; }
DTYPE(uint8, 0)
DTYPE(int8, 1)
DTYPE(int32, 3)
DTYPE(int64, 4)
DTYPE(float16, 5)
DTYPE(float32, 6)
DTYPE(bool, 11)
DTYPE(bfloat16, 15)
DTYPE(float8_e4m3fn, 24)

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle x, int32_t* index) { return *index = fake::of(x).device, AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_get_dim(AtenTensorHandle x, int64_t* rank) { return *rank = fake::of(x).sizes.size(), AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle x, int32_t* dtype) { return *dtype = fake::of(x).dtype, AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle x, void** data) {
  *data = reinterpret_cast<void*>(fake::of(x).address);
  return torch_fails;
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle x, int64_t** sizes) { return *sizes = fake::of(x).sizes.data(), AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_get_strides(AtenTensorHandle x, int64_t** strides) { return *strides = fake::of(x).strides.data(), AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_empty_strided(
    int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type, int32_t device,
    AtenTensorHandle* x) {
  const std::lock_guard<std::mutex> guard(fake::lock);
  if (device_type != aoti_torch_device_type_cuda()) return AOTI_TORCH_FAILURE;
  *x = fake::make(fake::addresses += int64_t(1) << 40, rank, sizes, strides, dtype, device);
  fake::write(fake::text("made", fake::of(*x).address) + ", " + fake::text(fake::of(*x)));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch__reinterpret_tensor(
    AtenTensorHandle self, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, AtenTensorHandle* x) {
  const std::lock_guard<std::mutex> guard(fake::lock);
  *x = fake::make(fake::of(self).address + offset, rank, sizes, strides, fake::of(self).dtype, fake::of(self).device);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_clone_preserve_strides(AtenTensorHandle self, AtenTensorHandle* x) {
  const std::lock_guard<std::mutex> guard(fake::lock);
  *x = reinterpret_cast<AtenTensorHandle>(new fake::Tensor(fake::of(self)));
  ++fake::live;
  fake::of(*x).address = fake::addresses += int64_t(1) << 40;
  fake::write(fake::text("clone", fake::of(*x).address) + ", " + fake::text("of", fake::of(self).address));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle x) {
  const std::lock_guard<std::mutex> guard(fake::lock);
  --fake::live;
  delete &fake::of(x);
  return AOTI_TORCH_SUCCESS;
}
#endif

// For the test.
void* new_tensor(int64_t address, int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device) {
  return fake::make(address, rank, sizes, strides, dtype, device);
}
int live() { return fake::live; }
const char* taken(void** outputs, int count) {  // what was written; outputs are added, and deleted
  static std::string text;
  for (int i = 0; i < count; ++i) {
    auto x = static_cast<AtenTensorHandle>(outputs[i]);
    fake::write(fake::text("output", i) + ", " + fake::text(fake::of(x)));
    aoti_torch_delete_tensor_object(x);
  }
  text = fake::written.str();
  fake::written.str("");
  fake::descriptors.clear();
  return text.c_str();
}
}

template <class Call>
const char* failure(Call call) {
  static thread_local std::string text;
  try {
    text = call() == AOTI_TORCH_SUCCESS ? "" : "it failed";
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}
