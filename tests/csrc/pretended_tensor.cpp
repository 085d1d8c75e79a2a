// SPDX-License-Identifier: Apache-2.0
// Part of the recorder (recording_runtime.cpp) that torch's stable ABI has no words for.
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <vector>

// A new at::Tensor at an address of a CUDA device; nothing need be there.
void* pretended_tensor(int32_t dtype, int64_t address, int64_t device,
                       const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  const c10::Device on(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  return new at::Tensor(
      at::for_blob(reinterpret_cast<void*>(address), sizes)
          .strides(strides)
          .target_device(on)  // or torch would ask the CUDA that it lacks whose address it is
          .options(at::TensorOptions(on).dtype(static_cast<at::ScalarType>(dtype)))
          .make_tensor());
}

// For the guards that torch itself takes, in its indexing for one. Those of our ops are recorded.
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
