// SPDX-License-Identifier: Apache-2.0
// The one door to torch: its stable ABI, targeted at 2.11. One byte per version component.
#pragma once

#if !defined(TORCH_TARGET_VERSION)
#error "TORCH_TARGET_VERSION must be defined by the build"
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

// An over-high target compiles silently against older headers and fails on users' machines.
static_assert(TORCH_TARGET_VERSION == TORCH_VERSION_2_11_0, "the stable ABI target is torch 2.11");
