// Launches again what a call of an op launched before. A module of Python, of which
// lowering/replay.py knows what it is given: numbers, in the order in which `Plan` reads them.
#define USE_CUDA  // of which torch declares the current stream
#include <Python.h>
#include <cuda.h>
#include <torch/csrc/inductor/aoti_runtime/utils.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "launcher.h"

namespace sage_inductor {
namespace {

// -- what was noted ----

using Numbers = std::vector<int64_t>;

struct Reader {
  const int64_t *at, *end;

  int64_t one() {
    if (at == end) fail("a plan ends early");
    return *at++;
  }
  Numbers many() {
    Numbers found(one());
    for (int64_t& each : found) each = one();
    return found;
  }
};

struct Tiled {  // what a descriptor is made of
  Descriptor descriptor = {};
  Numbers shape, strides;

  explicit Tiled(Reader& from) {
    descriptor.swizzle = from.one();
    descriptor.element_size = from.one();
    descriptor.element_type = from.one();
    const Numbers box = from.many();
    shape = from.many();
    strides = from.many();
    if (box.size() > std::size(descriptor.box) || shape.size() != box.size() || strides.size() != box.size()) {
      fail("a descriptor has one to five dimensions");
    }
    std::copy(box.begin(), box.end(), descriptor.box);
  }
};

struct Argument {
  enum Kind { NUMBER, POINTER, DESCRIPTOR } kind;
  int64_t value;  // of a tensor: bytes from its beginning
  int64_t tensor = 0;
  std::unique_ptr<Tiled> tiled;

  explicit Argument(Reader& from) : kind(static_cast<Kind>(from.one())), value(from.one()) {
    if (kind != NUMBER) tensor = from.one();
    if (kind == DESCRIPTOR) tiled = std::make_unique<Tiled>(from);
  }
};

struct Launch {
  std::string name;
  Kernel kernel = {};
  Numbers grid;
  std::vector<Argument> arguments;

  Launch(Reader& from, const char* its_name, int32_t device) : name(its_name) {
    kernel.name = name.c_str();
    kernel.loaded[device] = reinterpret_cast<CUfunction>(from.one());
    kernel.threads = from.one();
    kernel.shared = from.one();
    kernel.overlaps = from.one();
    grid = from.many();
    for (int64_t count = from.one(); count; --count) arguments.emplace_back(from);
    int64_t values = 2, maps = 0;  // with Triton's scratch memory
    for (const Argument& each : arguments) {
      values += each.tiled ? 1 + 2 * each.tiled->shape.size() : 1;
      maps += each.tiled != nullptr;
    }
    if (values > MAX_ARGUMENTS || maps > MAX_DESCRIPTORS) fail(name + " has too many arguments");
  }
};

struct Tensor {
  int64_t dtype;
  Numbers shape;
};

struct Output {
  int64_t tensor;
  bool whole;  // as it was made
  Numbers shape, strides;
};

// All that a call does. Tensors have numbers: those that are given, then those that are made.
struct Plan {
  int64_t capability;
  std::vector<Tensor> made;
  std::list<Launch> launches;
  std::vector<Output> outputs;

  Plan(Reader from, PyObject* names, int32_t device) : capability(from.one()) {
    for (int64_t count = from.one(); count; --count) {
      const int64_t dtype = from.one();
      made.push_back({dtype, from.many()});
    }
    const int64_t count = from.one();
    for (int64_t i = 0; i < count; ++i) {
      const char* name = PyUnicode_AsUTF8(PyTuple_GetItem(names, i));
      if (!name) fail("a kernel has no name");
      launches.emplace_back(from, name, device);
    }
    for (int64_t count = from.one(); count; --count) {
      const int64_t tensor = from.one(), whole = from.one();
      Numbers shape = from.many();
      outputs.push_back({tensor, whole != 0, std::move(shape), from.many()});
    }
    if (from.at != from.end) fail("a plan goes on");
  }

  // data: of the tensors that are given, the first of which is x.
  std::vector<RAIIAtenTensorHandle> run(AtenTensorHandle x, std::vector<void*> data) {
    const Gpu gpu(x, capability);
    const size_t given = data.size();
    std::vector<Made> all;
    for (const Tensor& each : made) {
      all.emplace_back(each.shape.size(), each.shape.data(), each.dtype, gpu);
      data.push_back(all.back().data);
    }
    for (Launch& each : launches) {
      Arguments a;
      for (const Argument& x : each.arguments) {
        if (x.kind == Argument::NUMBER) {
          a.i64(x.value);
          continue;
        }
        char* address = static_cast<char*>(data.at(x.tensor)) + x.value;
        if (!x.tiled) {
          a.pointer(address);
          continue;
        }
        const Tiled& of = *x.tiled;
        a.descriptor(of.descriptor, address, of.shape.size(), of.shape.data(), of.strides.data());
      }
      launch(each.kernel, gpu, each.grid[0], each.grid[1], each.grid[2], a);
    }
    std::vector<RAIIAtenTensorHandle> found;
    for (const Output& each : outputs) {
      Made& of = all.at(each.tensor - given);
      found.emplace_back(
          each.whole ? of.give() : of.give(each.shape.size(), each.shape.data(), each.strides.data()));
    }
    return found;
  }
};

// -- a call ----

using Plans = std::map<Numbers, std::shared_ptr<Plan>>;  // nullptr: there was one such call
constexpr size_t MOST_PLANS = 128;  // of one call; lengths that never come again

// The tensors and the numbers of a call. A plan is for calls with the same `key`.
struct Call {
  std::vector<RAIIAtenTensorHandle> tensors;
  std::vector<void*> data;
  int32_t device = -1;
  bool is_aligned = true;
  Numbers key;

  // capsules: a list, which torch made of tensors; they are taken. arguments: a tuple.
  Call(PyObject* capsules, PyObject* arguments) {
    const Py_ssize_t count = PyList_Size(capsules);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* capsule = PyList_GetItem(capsules, i);
      void* x = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
      tensors.emplace_back(static_cast<AtenTensorHandle>(x));
    }
    for (const RAIIAtenTensorHandle& x : tensors) add(x);
    for (Py_ssize_t i = 0; i < PyTuple_Size(arguments); ++i) {
      PyObject* x = PyTuple_GetItem(arguments, i);
      if (PyLong_CheckExact(x)) key.push_back(PyLong_AsLongLong(x));
      if (PyFloat_CheckExact(x)) {
        const double value = PyFloat_AS_DOUBLE(x);
        std::memcpy(&key.emplace_back(), &value, sizeof value);
      }
    }
    if (PyErr_Occurred()) fail("a call must have tensors and numbers of 64 bits");
    if (tensors.empty()) fail("a call must have tensors");
    check_torch(aoti_torch_get_device_index(tensors[0], &device), "a tensor's device");
    if (device < 0 || device >= MAX_DEVICES) fail("a tensor must be on one of 64 GPUs");
    key.push_back(device);
  }

  void add(AtenTensorHandle x) {
    int64_t rank, *sizes, *strides;
    int32_t dtype;
    void* address;
    check_torch(aoti_torch_get_dim(x, &rank), "a tensor");
    check_torch(aoti_torch_get_dtype(x, &dtype), "a tensor");
    check_torch(aoti_torch_get_sizes(x, &sizes), "a tensor");
    check_torch(aoti_torch_get_strides(x, &strides), "a tensor");
    check_torch(aoti_torch_get_data_ptr(x, &address), "a tensor");
    key.push_back(rank);
    key.push_back(dtype);
    key.insert(key.end(), sizes, sizes + rank);
    key.insert(key.end(), strides, strides + rank);
    data.push_back(address);
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(address) % 16 == 0;
  }

  bool on_current_device() const {
    CUdevice current;
    return cuCtxGetDevice(&current) == CUDA_SUCCESS && current == device;
  }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// -- for Python ----

template <class Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

constexpr const char* SITE = "sage_inductor.site";

Plans& plans_of(PyObject* site) {
  void* found = PyCapsule_GetPointer(site, SITE);
  if (!found) fail("not a site");
  return *static_cast<Plans*>(found);
}

PyObject* site(PyObject*, PyObject*) {
  return PyCapsule_New(new Plans, SITE, [](PyObject* self) { delete &plans_of(self); });
}

PyObject* note(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 5) fail("note(site, tensors, arguments, plan, names)");
    Call call(args[1], args[2]);
    char* bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(args[3], &bytes, &size)) return nullptr;
    Numbers numbers(size / sizeof(int64_t));
    std::memcpy(numbers.data(), bytes, numbers.size() * sizeof(int64_t));
    const Reader from{numbers.data(), numbers.data() + numbers.size()};
    auto plan = std::make_shared<Plan>(from, args[4], call.device);
    plans_of(args[0])[call.key] = std::move(plan);
    Py_RETURN_NONE;
  });
}

PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 3) fail("run(site, tensors, arguments)");
    Call call(args[1], args[2]);
    if (!call.is_aligned || !call.on_current_device()) Py_RETURN_FALSE;
    Plans& plans = plans_of(args[0]);
    if (plans.size() >= MOST_PLANS && !plans.count(call.key)) plans.clear();
    const auto [found, is_first] = plans.try_emplace(call.key);
    if (is_first) Py_RETURN_FALSE;
    const std::shared_ptr<Plan> plan = found->second;  // another thread may clear them
    if (!plan) Py_RETURN_NONE;
    std::vector<RAIIAtenTensorHandle> outputs;
    {
      const WithoutGil released;
      outputs = plan->run(call.tensors[0], call.data);
    }
    PyObject* list = PyList_New(outputs.size());
    for (size_t i = 0; list && i < outputs.size(); ++i) {
      PyList_SetItem(list, i, PyCapsule_New(outputs[i].release(), nullptr, nullptr));
    }
    return list;
  });
}

PyMethodDef METHODS[] = {
    {"site", site, METH_NOARGS, "A call in a graph, of which nothing is noted yet."},
    {"note", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(note)), METH_FASTCALL,
     "note(site, tensors, arguments, plan, names): what such a call does."},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run)), METH_FASTCALL,
     "run(site, tensors, arguments): repeats what was noted of such a call, and returns its\n"
     "outputs. None: note it now. False: do not note it, because it is the first of its kind, a\n"
     "tensor is not aligned, or another device is current."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "sage_replay", nullptr, -1, METHODS};

}  // namespace
}  // namespace sage_inductor

PyMODINIT_FUNC PyInit_sage_replay() { return PyModule_Create(&sage_inductor::MODULE); }
