// Runs an AOTInductor package with no Python in the process:
//   aoti_runner MODE PACKAGE MODEL DEVICE INPUTS OUTPUTS
// INPUTS is a file of torch.save, a list of calls, each a list of tensors. OUTPUTS: what they gave.
//   run      every call
//   twice    the package opened twice, every call by the first and then by the second
//   threads  every call five times by two threads, each on its stream; the last outputs of both
#include <fstream>
#include <iostream>
#include <iterator>
#include <thread>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

// Of torch/csrc/jit/serialization/pickle.h and torch/cuda.h, which take longer to compile than the
// rest of this file.
namespace torch::jit {
std::vector<char> pickle_save(const c10::IValue&);
c10::IValue pickle_load(const std::vector<char>&);
}  // namespace torch::jit
namespace torch::cuda {
void synchronize(int64_t device_index);
}

using Tensors = std::vector<at::Tensor>;
using Calls = std::vector<Tensors>;
using Loader = torch::inductor::AOTIModelPackageLoader;

Calls read(const char* path, at::Device device) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const c10::IValue list = torch::jit::pickle_load(bytes);
  Calls calls;
  for (const c10::IValue& call : list.toListRef()) {
    calls.emplace_back();
    for (const c10::IValue& x : call.toListRef()) calls.back().push_back(x.toTensor().to(device));
  }
  return calls;
}

void write(const char* path, const Calls& calls) {
  std::vector<c10::IValue> all;
  for (const Tensors& call : calls) {
    const std::vector<c10::IValue> tensors(call.begin(), call.end());
    all.push_back(c10::ivalue::Tuple::create(tensors));
  }
  const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(all));
  std::ofstream(path, std::ios::binary).write(bytes.data(), bytes.size());
}

void run(Loader& loader, const Calls& calls, Calls& outputs) {
  for (const Tensors& call : calls) {
    outputs.push_back(loader.run(call));
    for (at::Tensor& x : outputs.back()) x = x.cpu();
  }
}

void run_on_a_stream(Loader& loader, const Calls& calls, Calls& outputs, at::Device device) {
  c10::OptionalStreamGuard guard;
  if (device.is_cuda()) {
    const c10::impl::VirtualGuardImpl cuda(device.type());
    guard.reset_stream(cuda.getStreamFromGlobalPool(device));
  }
  for (int i = 0; i < 5; ++i) {
    outputs.clear();
    run(loader, calls, outputs);
  }
}

int main(int, char** argv) try {
  const std::string mode = argv[1];
  const at::Device device(argv[4]);
  const Calls calls = read(argv[5], device);
  const auto open = [&](int runners) {
    return Loader(argv[2], argv[3], /*run_single_threaded=*/false, runners, device.index());
  };
  Calls outputs, others;
  if (mode == "threads") {
    Loader loader = open(2);
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
    std::thread other([&] { run_on_a_stream(loader, calls, others, device); });
    run_on_a_stream(loader, calls, outputs, device);
    other.join();
  } else {
    Loader loader = open(1);
    run(loader, calls, outputs);
    if (mode == "twice") {
      Loader second = open(1);
      run(second, calls, others);
      run(loader, {calls[0]}, others);  // the first still works
      others.pop_back();
    }
  }
  outputs.insert(outputs.end(), others.begin(), others.end());
  write(argv[6], outputs);
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
