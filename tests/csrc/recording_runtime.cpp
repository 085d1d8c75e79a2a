// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime that runs nothing and writes down everything. Linked with the host side of _C_cuda
// in the place of cudart and of what a torch without CUDA lacks, it shows which calls an op makes,
// in what order and with which arguments. Its devices are pretended; no memory is ever touched.
//
// Entry points that wait for the device, copy or allocate are here to be named when they are
// called. One that is not here at all does not link.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "torch/stable_abi.h"
#include "trm/divergence_args.h"
#include "trm/launch_plan.h"
#include "trm/sequence_reduce.h"

void* pretended_tensor(int32_t dtype, int64_t address, int64_t device,
                       const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

#define TRM_VISIBLE __attribute__((visibility("default")))

namespace {

struct Recorder {
  std::map<const void*, std::string> kernels;  // host stub -> demangled signature
  std::string events;                          // JSON objects, comma-separated
  int current_device = 0;
  uintptr_t stream = 0;  // torch's current stream of every device
  int capability = 90;
  int multiprocessors = 132;
  int failing_launch = -1;  // launches until one fails
};

Recorder& recorder() {
  static Recorder instance;  // kernels register before this file's own objects exist
  return instance;
}

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

std::string hex(uintptr_t value) {
  char text[32];
  snprintf(text, sizeof text, "\"0x%zx\"", value);
  return text;
}

// JSON of one value that a kernel is handed. Pointers are hexadecimal strings.
std::string json(int64_t value) { return std::to_string(value); }
std::string json(int32_t value) { return std::to_string(value); }
std::string json(uint32_t value) { return std::to_string(value); }
std::string json(double value) { return std::to_string(value); }
std::string json(bool value) { return value ? "true" : "false"; }
template <typename T>
std::string json(T* pointer) {
  return hex(reinterpret_cast<uintptr_t>(pointer));
}

struct Object {
  std::string text = "{";
  template <typename T>
  Object& add(const char* name, const T& value) {
    return add_text(name, json(value));
  }
  Object& add_text(const char* name, const std::string& value) {
    if (text.size() > 1) text += ", ";
    text += quoted(name) + ": " + value;
    return *this;
  }
  std::string done() const { return text + "}"; }
};

std::string json(const trm::LogitsView& view) {
  return Object()
      .add("data", view.data)
      .add("type", static_cast<int32_t>(view.type))
      .add("outer_stride", view.outer_stride)
      .add("inner_stride", view.inner_stride)
      .add("column_stride", view.column_stride)
      .done();
}

template <typename T>
std::string json(const trm::RowView<T>& view) {
  return Object()
      .add("data", view.data)
      .add("outer_stride", view.outer_stride)
      .add("inner_stride", view.inner_stride)
      .done();
}

std::string json(const trm::DivergenceArgs& args) {
  return Object()
      .add_text("rollout", json(args.rollout))
      .add_text("train", json(args.train))
      .add_text("token_mask", json(args.token_mask))
      .add_text("tokens", json(args.tokens))
      .add_text("rollout_temperature", json(args.rollout_temperature))
      .add_text("train_temperature", json(args.train_temperature))
      .add("rows", args.rows)
      .add("inner", args.inner)
      .add("vocab", args.vocab)
      .add("vocab_start", args.vocab_start)
      .add("outputs", args.outputs)
      .done();
}

std::string json(const trm::DivergenceOutputs& out) {
  return Object()
      .add("values", out.values)
      .add("diagnostics", out.diagnostics)
      .add("statistics", out.statistics)
      .add("state", out.state)
      .add("workspace", out.workspace)
      .add("wide", out.wide)
      .done();
}

std::string json(const trm::DivergenceBackwardArgs& args) {
  return Object()
      .add_text("forward", json(args.forward))
      .add_text("upstream", json(args.upstream))
      .add("upstream_output_stride", args.upstream_output_stride)
      .add("statistics", args.statistics)
      .add("wide", args.wide)
      .add("grad_rollout", args.grad_rollout)
      .add("grad_train", args.grad_train)
      .add("columns", args.columns)
      .done();
}

std::string json(const trm::StreamPlan& plan) {
  return Object()
      .add("load_bytes", plan.load_bytes)
      .add("blocks_per_row", plan.blocks_per_row)
      .add("region_columns", plan.region_columns)
      .add("blocks", plan.blocks)
      .add("workspace_bytes", plan.workspace_bytes)
      .done();
}

std::string json(const trm::GradientPlan& plan) {
  return Object()
      .add("blocks_per_row", plan.blocks_per_row)
      .add("block_columns", plan.block_columns)
      .add("blocks", plan.blocks)
      .done();
}

std::string json(const trm::SequenceArgs& args) {
  return Object()
      .add("values", args.values)
      .add("wide", args.wide)
      .add("positions", args.positions)
      .add("token_mask", args.token_mask)
      .add("offsets", args.offsets)
      .add("order", args.order)
      .add("sequences", args.sequences)
      .add("tokens", args.tokens)
      .done();
}

std::string json(const trm::SequenceOutputs& out) {
  return Object()
      .add("max", out.max)
      .add("position", out.position)
      .add("sum", out.sum)
      .add("count", out.count)
      .add("infinite", out.infinite)
      .done();
}

std::string json(const trm::VerdictRule& rule) {
  return Object()
      .add("criterion", rule.criterion)
      .add("limit", rule.limit)
      .add("reason", rule.reason)
      .done();
}

std::string json(const trm::VerdictOutputs& out) {
  return Object()
      .add("keep", out.keep)
      .add("reason", out.reason)
      .add("position", out.position)
      .add("max", out.max)
      .add("mean", out.mean)
      .add("sum", out.sum)
      .add("statistic", out.statistic)
      .add("failed", out.failed)
      .add("token_keep", out.token_keep)
      .done();
}

template <typename T>
std::string read(const void* place) {
  return json(*static_cast<const T*>(place));
}

// By the type that the kernel's signature gives the parameter.
std::string argument(const std::string& type, const void* place) {
  if (type.ends_with("*")) return read<const void*>(place);
  static const std::map<std::string, std::string (*)(const void*)> kReaders = {
      {"long", read<int64_t>},
      {"unsigned int", read<uint32_t>},
      {"trm::DivergenceArgs", read<trm::DivergenceArgs>},
      {"trm::DivergenceOutputs", read<trm::DivergenceOutputs>},
      {"trm::DivergenceBackwardArgs", read<trm::DivergenceBackwardArgs>},
      {"trm::StreamPlan", read<trm::StreamPlan>},
      {"trm::GradientPlan", read<trm::GradientPlan>},
      {"trm::SequenceArgs", read<trm::SequenceArgs>},
      {"trm::SequenceOutputs", read<trm::SequenceOutputs>},
      {"trm::VerdictRule", read<trm::VerdictRule>},
      {"trm::VerdictOutputs", read<trm::VerdictOutputs>},
  };
  const auto found = kReaders.find(type);
  if (found == kReaders.end()) {
    fprintf(stderr, "recorder: a kernel takes a %s, which is not known here\n", type.c_str());
    abort();
  }
  return found->second(place);
}

std::string arguments(const std::string& signature, void** values) {
  const size_t begin = signature.rfind('(') + 1;
  std::string list = signature.substr(begin, signature.rfind(')') - begin);
  std::string out = "[";
  for (int index = 0; !list.empty(); ++index) {
    const size_t end = list.find(", ");
    const std::string type = list.substr(0, end);
    list = end == std::string::npos ? "" : list.substr(end + 2);
    out += (index > 0 ? ", " : "") + Object()
                                         .add_text("type", quoted(type))
                                         .add_text("value", argument(type, values[index]))
                                         .done();
  }
  return out + "]";
}

void note(const std::string& event) {
  std::string& events = recorder().events;
  events += (events.empty() ? "" : ",\n") + event;
}

Object event(const char* call) {
  return Object().add_text("call", quoted(call)).add("current", recorder().current_device);
}

std::string triple(dim3 d) {
  return "[" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + "]";
}

cudaError_t record_launch(const char* call, const void* kernel, dim3 grid, dim3 block,
                          size_t shared, cudaStream_t stream, unsigned attributes, void** values) {
  Recorder& r = recorder();
  const std::string& signature = r.kernels.at(kernel);
  note(event(call)
           .add_text("kernel", quoted(signature))
           .add_text("grid", triple(grid))
           .add_text("block", triple(block))
           .add("shared", static_cast<int64_t>(shared))
           .add_text("stream", hex(reinterpret_cast<uintptr_t>(stream)))
           .add("attributes", attributes)
           .add_text("arguments", arguments(signature, values))
           .done());
  const bool valid = grid.x >= 1 && grid.x <= 0x7fffffffu && grid.y >= 1 && grid.y <= 65535 &&
                     grid.z >= 1 && grid.z <= 65535 && block.x * block.y * block.z <= 1024;
  return valid && r.failing_launch-- != 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

cudaError_t refuse(const char* call) {
  note(event(call).done());
  return cudaErrorNotPermitted;
}

}  // namespace

extern "C" {

// For the test.
TRM_VISIBLE void recorder_set(int capability, int multiprocessors, uintptr_t stream,
                              int failing_launch) {
  Recorder& r = recorder();
  r.capability = capability;
  r.multiprocessors = multiprocessors;
  r.stream = stream;
  r.failing_launch = failing_launch;
  r.current_device = 0;
  r.events.clear();
}
TRM_VISIBLE void recorder_note(const char* event) { note(event); }
TRM_VISIBLE const char* recorder_events() { return recorder().events.c_str(); }
TRM_VISIBLE int recorder_current_device() { return recorder().current_device; }

// How nvcc's host code makes its kernels known.
void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  int status = 0;
  char* signature = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  recorder().kernels[stub] = status == 0 ? signature : name;
  free(signature);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
// For managed variables, of which there are none.
char __cudaInitModule(void**) {
  refuse("__cudaInitModule");
  return 0;
}
// Launches spelt <<<>>>: ours go through cudaLaunchKernelExC, so these are noted and not allowed.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return refuse("__cudaPopCallConfiguration");
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse("__cudaLaunchKernel");
}

// What the host code may call.
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** values) {
  return record_launch("cudaLaunchKernelExC", kernel, config->gridDim, config->blockDim,
                       config->dynamicSmemBytes, config->stream, config->numAttrs, values);
}
cudaError_t cudaGetDevice(int* device) {
  note(event("cudaGetDevice").done());
  *device = recorder().current_device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  note(event("cudaDeviceGetAttribute").add("device", device).done());
  const Recorder& r = recorder();
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = r.capability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = r.capability % 10;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = r.multiprocessors;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "refused";
}

// What it must not: each waits, copies, allocates or keeps state, or may.
cudaError_t cudaDeviceSynchronize() { return refuse("cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return refuse("cudaStreamSynchronize"); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return refuse("cudaEventSynchronize"); }
cudaError_t cudaMalloc(void**, size_t) { return refuse("cudaMalloc"); }
cudaError_t cudaMallocAsync(void**, size_t, cudaStream_t) { return refuse("cudaMallocAsync"); }
cudaError_t cudaFree(void*) { return refuse("cudaFree"); }
cudaError_t cudaFreeAsync(void*, cudaStream_t) { return refuse("cudaFreeAsync"); }
cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) { return refuse("cudaMemcpy"); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return refuse("cudaMemcpyAsync");
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return refuse("cudaMemsetAsync"); }
cudaError_t cudaSetDevice(int) { return refuse("cudaSetDevice"); }

// What a torch without CUDA lacks. Bound within this library (-Bsymbolic), before torch's own.
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  note(event("current_stream").add("device", device).done());
  *stream = reinterpret_cast<void*>(recorder().stream);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  note(event("create_guard").add("device", device).done());
  *guard = reinterpret_cast<DeviceGuardHandle>(new int(recorder().current_device));
  recorder().current_device = device;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  note(event("delete_guard").done());
  int* before = reinterpret_cast<int*>(guard);
  recorder().current_device = *before;
  delete before;
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"

namespace {

torch::stable::Tensor tensor(const torch::stable::Tensor& like, int64_t address, int64_t device,
                             std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  return torch::stable::Tensor(static_cast<AtenTensorHandle>(
      pretended_tensor(static_cast<int32_t>(like.scalar_type()), address, device, sizes, strides)));
}

}  // namespace

STABLE_TORCH_LIBRARY(trm_recorder, library) {
  library.def("tensor(Tensor like, int address, int device, int[] sizes, int[] strides) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(trm_recorder, CPU, library) {
  library.impl("tensor", TORCH_BOX(&tensor));
}
