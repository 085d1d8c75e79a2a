// SPDX-License-Identifier: Apache-2.0
// Test-only Python module: every op of trm:: with the CUDA kernels run by the emulator.
//
// The ops are registered as trm_emulator::NAME from the same schemas, checks and allocation as the
// real backends (torch/ops.h). The functions here take an op's arguments, CPU tensors or numpy
// arrays, and a schedule and a seed besides; a broken rule is a RuntimeError that says which.
#include <pybind11/pybind11.h>

#include <string>

#include "cuda/sequence_reduce.h"
#include "cuda/token_divergence.h"
#include "emulator/buffers.h"
#include "torch/ops.h"
#include "torch/schema.h"

namespace py = pybind11;

namespace {

using torch::stable::Tensor;
using trm::emu::Buffers;

void check(cudaError_t status) { STD_TORCH_CHECK(status == cudaSuccess, "launch failed"); }

struct EmulatorBackend {
  static int64_t workspace_bytes(const Tensor&, const trm::DivergenceArgs& args) {
    int64_t bytes = 0;
    check(trm::cuda::forward_workspace(args, bytes));
    return bytes;
  }

  static void forward(const Tensor& on, const trm::DivergenceArgs& args,
                      const trm::DivergenceOutputs& out) {
    Buffers buffers;
    trm::emu::reads_arguments(buffers, args);
    trm::emu::writes_outputs(buffers, args, out);
    buffers.scratch("workspace", out.workspace, static_cast<size_t>(workspace_bytes(on, args)));
    check(trm::cuda::token_divergence(args, out, nullptr));
    buffers.finish();
  }

  static void backward(const Tensor&, const trm::DivergenceBackwardArgs& args) {
    Buffers buffers;
    trm::emu::backward_buffers(buffers, args);
    check(trm::cuda::token_divergence_backward(args, nullptr));
    buffers.finish();
  }

  static void merge(const Tensor&, const void* states, void* merged, bool wide, int64_t parts,
                    int64_t rows) {
    const auto bytes = static_cast<size_t>(rows * trm::kStateColumns * (wide ? 8 : 4));
    Buffers buffers;
    buffers.reads("states", states, bytes * static_cast<size_t>(parts));
    buffers.writes("merged", merged, bytes);
    check(trm::cuda::divergence_state_merge(states, merged, wide, parts, rows, nullptr));
    buffers.finish();
  }

  static void finish(const Tensor&, const void* states, bool wide, uint32_t outputs, void* values,
                     double* statistics, int64_t rows) {
    trm::DivergenceArgs args;
    args.rows = rows;
    args.outputs = outputs;
    trm::DivergenceOutputs out;
    out.values = values;
    out.statistics = statistics;
    out.wide = wide;
    Buffers buffers;
    buffers.reads("state", states, static_cast<size_t>(rows * trm::kStateColumns * (wide ? 8 : 4)));
    trm::emu::writes_outputs(buffers, args, out);
    check(trm::cuda::divergence_finish(states, wide, outputs, values, statistics, rows, nullptr));
    buffers.finish();
  }

  static void reduce(const Tensor&, const trm::SequenceArgs& args,
                     const trm::SequenceOutputs& out) {
    Buffers buffers;
    trm::emu::sequence_buffers(buffers, args, out);
    check(trm::cuda::sequence_reduce(args, out, nullptr));
    buffers.finish();
  }
};

py::object call(const std::string& name, const py::args& arguments, const std::string& schedule,
                uint64_t seed) {
  const py::module_ torch = py::module_::import("torch");
  const py::object ndarray = py::module_::import("numpy").attr("ndarray");
  py::list tensors;
  std::string shape = name;
  bool numpy = false;
  for (const py::handle argument : arguments) {
    const bool is_array = py::isinstance(argument, ndarray);
    numpy = numpy || is_array;
    const py::object value = is_array ? torch.attr("from_numpy")(argument)
                                      : py::reinterpret_borrow<py::object>(argument);
    if (py::hasattr(value, "dtype")) {
      shape += " " + std::string(py::str(value.attr("dtype"))) +
               std::string(py::str(py::list(value.attr("shape"))));
    }
    tensors.append(value);
  }
  trm::emu::set_schedule({trm::emu::parse_order(schedule), seed});
  trm::emu::set_shape(shape);
  const py::object result =
      torch.attr("ops").attr("trm_emulator").attr(name.c_str())(*py::tuple(tensors));
  if (!numpy) return result;
  if (!py::isinstance<py::tuple>(result)) return result.attr("numpy")();
  py::list arrays;
  for (const py::handle tensor : result) arrays.append(tensor.attr("numpy")());
  return py::tuple(arrays);
}

}  // namespace

STABLE_TORCH_LIBRARY(trm_emulator, library) {
  for (const char* schema : trm::kSchemas) library.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(trm_emulator, CPU, library) {
  trm::binding::register_ops<EmulatorBackend>(library);
}

PYBIND11_MODULE(trm_emulator, module) {
  for (const std::string schema : trm::kSchemas) {
    const std::string name = schema.substr(0, schema.find('('));
    module.def(
        name.c_str(),
        [name](const py::args& arguments, const std::string& schedule, uint64_t seed) {
          return call(name, arguments, schedule, seed);
        },
        py::arg("schedule") = "inorder", py::arg("seed") = 0);
  }
  module.def("set_device", &trm::emu::set_device, py::arg("compute_capability"),
             py::arg("multiprocessors"));
  module.def("counters", [] {
    const trm::emu::Counters counters = trm::emu::counters();
    return py::dict(py::arg("switches") = counters.switches,
                    py::arg("accesses") = counters.accesses);
  });
}
