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
#include "trm/launch_plan.h"

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

  static void judge(const Tensor&, const trm::SequenceArgs& args, const trm::VerdictRule& rule,
                    const trm::VerdictOutputs& out) {
    Buffers buffers;
    trm::emu::verdict_buffers(buffers, args, out);
    check(trm::cuda::sequence_verdict(args, rule, out, nullptr));
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

// A side of a call as launch plans see it: address, storage type, strides in elements.
trm::LogitsView view_of(const py::dict& side) {
  trm::LogitsView view;
  view.data = reinterpret_cast<const void*>(side["address"].cast<uintptr_t>());
  view.type = static_cast<trm::StorageType>(side["type"].cast<int32_t>());
  view.outer_stride = side["outer_stride"].cast<int64_t>();
  view.inner_stride = side["inner_stride"].cast<int64_t>();
  view.column_stride = side["column_stride"].cast<int64_t>();
  return view;
}

py::dict plan_forward(int capability, int processors, int64_t rows, int64_t vocab,
                      const py::dict& rollout, const py::dict& train) {
  trm::DivergenceArgs args;
  args.rollout = view_of(rollout);
  args.train = view_of(train);
  args.rows = rows;
  args.inner = rows;
  args.vocab = vocab;
  const trm::StreamPlan plan = trm::plan_stream({capability, processors}, args);
  py::list regions;
  for (int region = 0; plan.streamed && region < trm::kRegions; ++region) {
    regions.append(trm::region_size(plan, vocab, region));
  }
  return py::dict(py::arg("streamed") = plan.streamed, py::arg("load_bytes") = plan.load_bytes,
                  py::arg("blocks_per_row") = plan.blocks_per_row, py::arg("blocks") = plan.blocks,
                  py::arg("region_columns") = plan.region_columns,
                  py::arg("workspace_bytes") = plan.workspace_bytes, py::arg("regions") = regions);
}

py::dict plan_backward(int capability, int processors, int64_t rows, int64_t vocab, int64_t columns,
                       const py::dict& rollout, const py::dict& train, uint32_t outputs,
                       uintptr_t grad_rollout, uintptr_t grad_train) {
  trm::DivergenceBackwardArgs args;
  args.forward.rollout = view_of(rollout);
  args.forward.train = view_of(train);
  args.forward.rows = rows;
  args.forward.inner = rows;
  args.forward.vocab = vocab;
  args.forward.outputs = outputs;
  args.columns = columns;
  args.grad_rollout = reinterpret_cast<void*>(grad_rollout);
  args.grad_train = reinterpret_cast<void*>(grad_train);
  const trm::GradientPlan plan = trm::plan_gradient({capability, processors}, args);
  return py::dict(py::arg("streamed") = plan.streamed, py::arg("kl_only") = plan.kl_only,
                  py::arg("blocks_per_row") = plan.blocks_per_row, py::arg("blocks") = plan.blocks,
                  py::arg("block_columns") = plan.block_columns);
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
  module.def("plan_forward", &plan_forward, py::arg("capability"), py::arg("processors"),
             py::arg("rows"), py::arg("vocab"), py::arg("rollout"), py::arg("train"));
  module.def("plan_backward", &plan_backward, py::arg("capability"), py::arg("processors"),
             py::arg("rows"), py::arg("vocab"), py::arg("columns"), py::arg("rollout"),
             py::arg("train"), py::arg("outputs"), py::arg("grad_rollout"), py::arg("grad_train"));
  module.def("set_device", &trm::emu::set_device, py::arg("compute_capability"),
             py::arg("multiprocessors"));
  module.def("counters", [] {
    const trm::emu::Counters counters = trm::emu::counters();
    return py::dict(py::arg("switches") = counters.switches,
                    py::arg("accesses") = counters.accesses,
                    py::arg("input_bytes") = counters.input_bytes);
  });
}
