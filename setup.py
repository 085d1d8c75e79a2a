# SPDX-License-Identifier: Apache-2.0
"""Builds the two libraries: trm_ext._C (schemas, CPU) and trm_ext._C_cuda (CUDA, where nvcc is).

Environment: TRM_BUILD_CUDA=auto|0|1 (1 fails without nvcc), TRM_DEBUG=1, TORCH_CUDA_ARCH_LIST
(default 9.0), MAX_JOBS, NVCC_THREADS.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch.utils.cpp_extension as cpp_extension
from setuptools import setup

TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11: one byte per component
DEFAULT_ARCHITECTURES = "9.0"
# Compilers that our CI has seen; the warnings of another one must not break a user's build.
KNOWN_NVCC = ("13.0",)
DEBUG = os.environ.get("TRM_DEBUG") == "1"
X86 = platform.machine() in ("x86_64", "AMD64")
CPU_SOURCES = ("capability", "double_row", "float_row", "token_divergence")
INCLUDES = [str(Path("csrc").absolute()), str(Path("csrc/include").absolute())]


def find_cuda_home() -> Path | None:
    """Folder of a CUDA toolkit with both nvcc and its headers, or None."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    candidates.append(os.environ.get("TRM_CUDA_DEFAULT", "/usr/local/cuda"))
    for candidate in candidates:
        if candidate:
            home = Path(candidate)
            if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
                return home
    return None


def choose_cuda() -> Path | None:
    """Toolkit to build _C_cuda with, by TRM_BUILD_CUDA; None means a CPU-only build."""
    mode = os.environ.get("TRM_BUILD_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        sys.exit(f"TRM_BUILD_CUDA must be auto, 0 or 1, not {mode!r}")
    if mode == "0":
        print("trm-ext: CUDA off (TRM_BUILD_CUDA=0), building the CPU library only")
        return None
    home = find_cuda_home()
    if home is None:
        if mode == "1":
            sys.exit("TRM_BUILD_CUDA=1, but no CUDA toolkit was found: set CUDA_HOME")
        print("trm-ext: no CUDA toolkit found, building the CPU library only")
    return home


def nvcc_warnings(home: Path) -> list[str]:
    """Flags that make device-side warnings errors, where this nvcc is one that we know."""
    version = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+\.\d+)", version.stdout)
    known = release is not None and release[1] in KNOWN_NVCC
    return ["-Werror=all-warnings"] if known and not DEBUG else []


def extension(name: str, sources: list[str], **arguments):
    """A plain shared library on torch's stable ABI; no CPython symbol, so one wheel serves all."""
    optimise = ["-O0", "-g", "-DTRM_CHECKS"] if DEBUG else ["-O3", "-g0"]
    defines = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    cxx = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", *optimise, *defines]
    nvcc = [
        "-std=c++20",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-lineinfo",
        "--compress-mode=size",
        *(["-O0", "-g", "-DTRM_CHECKS"] if DEBUG else ["-O3"]),
        *defines,
    ]
    return cpp_extension.CppExtension(
        name,
        sources,
        include_dirs=[*INCLUDES, *arguments.pop("include_dirs", [])],
        extra_compile_args={
            "cxx": cxx + arguments.pop("cxx", []),
            "nvcc": nvcc + arguments.pop("nvcc", []),
        },
        # libtorch.so depends on libtorch_cuda where there is one: keep it even if unused here.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch", *(["-s"] if not DEBUG else [])],
        py_limited_api=True,
        depends=[str(path) for path in sorted(Path("csrc").rglob("*.h*"))]
        + [str(path) for path in sorted(Path("csrc").rglob("*.cuh"))],
        **arguments,
    )


# One translation unit per instruction set, chosen at run time.
INSTRUCTION_SETS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "scalar": ["-Wno-psabi"],
}


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, with the rows_*.cpp of the CPU library compiled each for its instruction set."""

    def build_extension(self, ext):
        """Compiles the instruction-set units by hand, then lets torch build and link the rest."""
        if ext.name == "trm_ext._C":
            sets = INSTRUCTION_SETS if X86 else {"scalar": INSTRUCTION_SETS["scalar"]}
            ext.extra_objects = [self.compile_rows(ext, name, sets[name]) for name in sets]
        else:
            self.drop_stale_objects(ext)
        super().build_extension(ext)

    def drop_stale_objects(self, ext):
        """Removes CUDA objects older than a header: a torch without CUDA has nvcc report none."""
        newest = max(Path(header).stat().st_mtime for header in ext.depends)
        for made in Path(self.build_temp).absolute().rglob("csrc/cuda/*.o"):
            if made.stat().st_mtime < newest:
                made.unlink()

    def compile_rows(self, ext, name, flags):
        """Object file of csrc/cpu/rows_NAME.cpp."""
        target = Path(self.build_temp).absolute() / f"rows_{name}.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "c++")
        # gcc's own AVX-512 headers set off both warnings
        arguments = [
            *ext.extra_compile_args["cxx"],
            "-Wno-maybe-uninitialized",
            "-Wno-uninitialized",
        ]
        arguments += ["-fPIC", *flags]
        includes = [f"-I{path}" for path in INCLUDES]
        source = f"csrc/cpu/rows_{name}.cpp"
        self.spawn([compiler, *arguments, *includes, "-c", source, "-o", str(target)])
        return str(target)


extensions = [
    extension(
        "trm_ext._C",
        ["csrc/torch/bind_cpu.cpp", *[f"csrc/cpu/{name}.cpp" for name in CPU_SOURCES]],
        cxx=["-DTRM_HAS_X86_RUNS"] if X86 else [],
    )
]

cuda_home = choose_cuda()
if cuda_home is not None:
    # torch sets these to nothing when it has no CUDA itself; the stable ABI does not care.
    cpp_extension.CUDA_HOME = str(cuda_home)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
    architectures = os.environ["TORCH_CUDA_ARCH_LIST"].replace(";", " ")
    extensions.append(
        extension(
            "trm_ext._C_cuda",
            [
                "csrc/torch/bind_cuda.cpp",
                *sorted(str(path) for path in Path("csrc/cuda").glob("*.cu")),
            ],
            include_dirs=[str(cuda_home / "include")],
            cxx=["-DUSE_CUDA", f'-DTRM_CUDA_ARCHITECTURES="{architectures}"'],
            nvcc=["-DUSE_CUDA", *nvcc_warnings(cuda_home)],
            library_dirs=[str(cuda_home / "lib64")],
            libraries=["cudart_static", "rt", "dl", "pthread"],
        )
    )

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
