// Runs an AOTInductor package with no Python in the process:
//   aoti_runner PACKAGE INPUT OUTPUT DEVICE      (files of torch.save, lists of tensors)
#include <fstream>
#include <iterator>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  std::ifstream file(argv[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& x : torch::pickle_load(bytes).toTensorVector()) {
    inputs.push_back(x.to(at::Device(argv[4])));
  }
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& x : loader.run(inputs)) {
    outputs.push_back(x.to(at::kCPU));
  }
  const auto result = torch::pickle_save(c10::IValue(outputs));
  std::ofstream(argv[3], std::ios::binary).write(result.data(), result.size());
}
