// Runs an AOTInductor package with no Python in the process:
//   aoti_runner PACKAGE INPUT OUTPUT DEVICE      (files of torch.save: a list of tensors, a tensor)
#include <fstream>
#include <iterator>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  std::ifstream file(argv[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<at::Tensor> inputs;
  const c10::IValue list = torch::pickle_load(bytes);
  for (const c10::IValue& x : list.toListRef()) {
    inputs.push_back(x.toTensor().to(at::Device(argv[4])));
  }
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  const at::Tensor output = loader.run(inputs).at(0).to(at::kCPU);
  const auto result = torch::pickle_save(output);
  std::ofstream(argv[3], std::ios::binary).write(result.data(), result.size());
}
