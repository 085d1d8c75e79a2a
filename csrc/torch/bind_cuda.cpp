// SPDX-License-Identifier: Apache-2.0
// Library _C_cuda: the CUDA implementations of the schemas that _C defines.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda/sequence_reduce.h"
#include "cuda/token_divergence.h"
#include "torch/ops.h"
#include "trm/build_facts.h"

TRM_BUILD_FACT(cuda_architectures, TRM_CUDA_ARCHITECTURES);

namespace {

using torch::stable::Tensor;

// The tensor's device made current for the scope, and its current stream.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

void check(cudaError_t status, const char* op) {
  STD_TORCH_CHECK(status == cudaSuccess, "trm::", op, ": ", cudaGetErrorString(status));
}

struct CudaBackend {
  static int64_t workspace_bytes(const Tensor& on, const trm::DivergenceArgs& args) {
    const DeviceScope scope(on);
    int64_t bytes = 0;
    check(trm::cuda::forward_workspace(args, bytes), "token_divergence");
    return bytes;
  }

  static void forward(const Tensor& on, const trm::DivergenceArgs& args,
                      const trm::DivergenceOutputs& out) {
    const DeviceScope scope(on);
    check(trm::cuda::token_divergence(args, out, scope.stream()), "token_divergence");
  }

  static void backward(const Tensor& on, const trm::DivergenceBackwardArgs& args) {
    const DeviceScope scope(on);
    check(trm::cuda::token_divergence_backward(args, scope.stream()), "token_divergence_backward");
  }

  static void merge(const Tensor& on, const void* states, void* merged, bool wide, int64_t parts,
                    int64_t rows) {
    const DeviceScope scope(on);
    check(trm::cuda::divergence_state_merge(states, merged, wide, parts, rows, scope.stream()),
          "divergence_state_merge");
  }

  static void finish(const Tensor& on, const void* states, bool wide, uint32_t outputs,
                     void* values, double* statistics, int64_t rows) {
    const DeviceScope scope(on);
    check(trm::cuda::divergence_finish(states, wide, outputs, values, statistics, rows,
                                       scope.stream()),
          "divergence_finish");
  }

  static void reduce(const Tensor& on, const trm::SequenceArgs& args,
                     const trm::SequenceOutputs& out) {
    const DeviceScope scope(on);
    check(trm::cuda::sequence_reduce(args, out, scope.stream()), "sequence_reduce");
  }

  static void judge(const Tensor& on, const trm::SequenceArgs& args, const trm::VerdictRule& rule,
                    const trm::VerdictOutputs& out) {
    const DeviceScope scope(on);
    check(trm::cuda::sequence_verdict(args, rule, out, scope.stream()), "sequence_verdict");
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(trm, CUDA, library) { trm::binding::register_ops<CudaBackend>(library); }
