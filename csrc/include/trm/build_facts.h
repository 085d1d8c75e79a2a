// SPDX-License-Identifier: Apache-2.0
// A fact about the build, kept as plain bytes in the library: `trm info` reads it without loading.
#pragma once

#define TRM_BUILD_FACT(key, value) \
  __attribute__((used)) static const char trm_build_fact_##key[] = "trm-build:" #key "=" value
