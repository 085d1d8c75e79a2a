// SPDX-License-Identifier: Apache-2.0
// From a code address to a source line, by the toolchain's addr2line; only when something failed.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace trm::emu {

// Lines "function\nfile:line" of an address, innermost inlined call first; empty if unknown.
inline std::vector<std::string> resolve(const void* address) {
  Dl_info info = {};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return {};
  const auto offset = static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase);
  char command[1024];
  snprintf(command, sizeof(command), "addr2line -C -f -i -e '%s' 0x%llx 2>/dev/null",
           info.dli_fname, static_cast<unsigned long long>(offset));
  std::vector<std::string> lines;
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return {};
  char line[2048];
  while (fgets(line, sizeof(line), pipe) != nullptr) {
    std::string text = line;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    for (const std::string noise : {" (discriminator", "(anonymous namespace)::"}) {
      const size_t at = text.find(noise);
      if (at != std::string::npos)
        text.erase(at, noise[0] == ' ' ? std::string::npos : noise.size());
    }
    lines.push_back(text);
  }
  pclose(pipe);
  return lines;
}

inline std::string function_at(const void* address) {
  const std::vector<std::string> lines = resolve(address);
  if (lines.empty() || lines[0] == "??") return "?";
  std::string name = lines[0];
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);
  int depth = 0;  // of parentheses, from the end: the parameter list is the last top-level pair
  for (size_t i = name.size(); i-- > 0;) {
    depth += (name[i] == ')') - (name[i] == '(');
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

// "file:line in function, inlined into file:line in function, ..." of the call before `address`.
inline std::string source_at(const void* address) {
  const std::vector<std::string> lines = resolve(static_cast<const char*>(address) - 1);
  std::string where;
  for (size_t i = 0; i + 1 < lines.size(); i += 2) {
    where += (where.empty() ? "" : ",\n     inlined into ") + lines[i + 1] + " in " + lines[i];
  }
  return where.empty() ? "an unknown place" : where;
}

// Whether an address is a loaded library's or program's own image: code, tables, constants.
inline bool in_loaded_image(const void* address) {
  const auto visit = [](dl_phdr_info* info, size_t, void* data) {
    const auto at = reinterpret_cast<uintptr_t>(data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& segment = info->dlpi_phdr[i];
      const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
      if (segment.p_type == PT_LOAD && at >= begin && at < begin + segment.p_memsz) return 1;
    }
    return 0;
  };
  return dl_iterate_phdr(visit, const_cast<void*>(address)) != 0;
}

}  // namespace trm::emu
