# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of the CUDA kernels: warnings, registers, spills, sizes, hot loops.

By default the built library is read: nothing is compiled. The slow lane compiles csrc/cuda for 8.0
and 9.0+PTX with every warning an error, and reads what ptxas says.
"""

import re
import zipfile
from pathlib import Path

import pytest

from benchmarks import cuda_build, sass
from trm_ext import _lib

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("8.0", "9.0")
STATIC_SHARED = 48 * 1024
# Registers per thread, by kernel: the first pattern that fits. A multiprocessor has 65536.
REGISTERS = {
    # 768 threads with 48 or 64 bytes in flight each: at least 36 KiB.
    r"stream_divergence_kernel<\w+, \w+, false, false, false>": 80,
    r"stream_gradient_kernel": 80,
    r"stream_divergence_kernel": 128,  # 512 threads: at least 24 KiB; these do more per byte
    r"sequence_(reduce|verdict)_kernel": 64,
    r"diagnostics_kernel|token_divergence_backward_kernel": 80,
    r"": 128,  # merges in float64, and the generic kernels: 512 threads
}
# (kernel, stack in bytes) where a stack frame is meant, with its reason.
STACK: dict[str, int] = {}
# Bytes that the compiler may spill where it schedules for newer devices, outside the hot loop:
# the plain kernel of two 16-bit types is at its 80 registers there.
SPILLS = {"10.0": 32, "12.0": 32}


def check_resources(found, architecture="9.0"):
    assert found
    for kernel in found:
        assert kernel.spills <= SPILLS.get(architecture, 0), kernel
        allowed = next((n for name, n in STACK.items() if re.match(name, kernel.name)), 0)
        assert kernel.stack <= allowed + SPILLS.get(architecture, 0), kernel
        assert kernel.shared <= STATIC_SHARED, kernel
        if kernel.registers is not None:
            budget = next(n for name, n in REGISTERS.items() if re.match(name, kernel.name))
            assert kernel.registers <= budget, kernel


@pytest.fixture(scope="module")
def library():
    found = _lib.find_library("_C_cuda")
    if found is None:
        pytest.skip("_C_cuda is not built: no nvcc when this package was")
    return found


@pytest.fixture(scope="module")
def disassembler():
    if (reason := sass.why_not()) is not None:
        pytest.skip(reason)


class TestBuiltLibrary:
    def test_size(self, library):
        assert library.stat().st_size <= cuda_build.LIBRARY_BYTES

    def test_resources(self, library, disassembler):
        architectures = _lib.build_facts(library)["cuda_architectures"].split()
        for architecture in architectures:
            number = architecture.removesuffix("+PTX")
            check_resources(cuda_build.library_resources(library, number), number)

    def test_no_local_memory(self, library, disassembler):
        functions = sass.disassemble(library, "9.0")
        assert functions
        for function in functions:
            assert not any(map(sass.is_local, function.instructions)), function.name

    def test_every_kernel_of_the_sources_is_there(self, library, disassembler):
        """A library older than its sources would prove nothing about them."""
        bounds = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
        pattern = rf"__global__ void\s+(?:{bounds}\s+)?(\w+)\("
        declared = set()
        for file in (ROOT / "csrc/include/trm/kernels").glob("*.cuh"):
            declared.update(re.findall(pattern, file.read_text()))
        names = {f.name.partition("<")[0] for f in sass.disassemble(library, "9.0")}
        assert declared and declared <= names


def test_the_release_is_what_make_builds():
    line = f"RELEASE_ARCHITECTURES := {cuda_build.RELEASE}"
    assert line in (ROOT / "Makefile").read_text().splitlines()


def test_size_and_architectures_of_the_release():
    wheels = sorted((ROOT / "dist").glob("trm_ext-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        pytest.skip("no wheel in dist/: `make wheel` makes one")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        name = next((n for n in wheel.namelist() if "/_C_cuda." in n), None)
        if name is None:
            pytest.skip("the wheel in dist/ was made without nvcc")
        data = wheel.read(name)
    assert len(data) <= cuda_build.LIBRARY_BYTES
    facts = dict(_lib.MARKER.findall(data))
    assert facts[b"cuda_architectures"].decode().split() == cuda_build.RELEASE.split(";")


@pytest.fixture(scope="module")
def hot_loops(library, disassembler):
    """Of every tuned kernel in the built library, by name."""
    found = {loop.function.name: loop for loop in sass.streaming(sass.disassemble(library, "9.0"))}
    assert found
    return found


@pytest.fixture(scope="module")
def resources(library, disassembler):
    return {found.name: found for found in cuda_build.library_resources(library, "9.0")}


PLAIN = "stream_divergence_kernel<BFloat16, BFloat16, false, false, false>"


class TestHotLoops:
    def test_every_pair_of_types_is_there(self, hot_loops):
        kinds = {name.partition("<")[0] for name in hot_loops}
        assert kinds == {"stream_divergence_kernel", "stream_gradient_kernel"}
        types = ("BFloat16", "Float16", "float")
        for kind in kinds:
            found = {sass.logit_types(name) for name in hot_loops if name.startswith(kind)}
            assert found >= {
                *zip(types, types, strict=True),
                (types[0], types[2]),
                (types[2], types[0]),
            }

    def test_plain_kl_of_bf16_rows_loads_wide_and_takes_one_special_operation(self, hot_loops):
        loop = hot_loops[PLAIN]
        loads = [i for i in loop.body if i.mnemonic == "LDG"]
        assert loads and all(i.width == 16 for i in loads)
        assert loop.cost()["special"] <= 1 and loop.cost()["bytes"] == 4

    def test_plain_kl_of_bf16_rows_takes_21_instructions(self, hot_loops):
        assert hot_loops[PLAIN].cost()["issue"] <= 21

    def test_none_touches_local_memory_and_all_keep_enough_in_flight(self, hot_loops, resources):
        for name, loop in hot_loops.items():
            assert not any(map(sass.is_local, loop.body)), name
            assert max(i.width for i in loop.body if i.mnemonic == "LDG") == 16, name
            threads = sass.resident_threads(resources[name].registers, 256)
            assert threads * loop.bytes_in_flight >= 24 * 1024, name

    def test_the_documented_table_is_that_of_this_build(self, hot_loops, resources):
        table = sass.markdown("9.0", sass.rows(list(hot_loops.values()), resources, "9.0"))
        assert sass.block_of("9.0", sass.DOCUMENT.read_text()) == table, (
            "run `python -m benchmarks sass --write`"
        )


@pytest.fixture(scope="module")
def compiler():
    if (reason := cuda_build.why_not()) is not None:
        pytest.skip(reason)


@pytest.mark.slow
class TestCompilation:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_without_a_warning_within_the_budgets(self, compiler, architecture):
        _, log = cuda_build.compile_cubins(architecture)
        found = cuda_build.parse_ptxas(log)
        assert len(found) >= len(cuda_build.sources())
        check_resources(found)

    def test_ptx_and_host_side_without_a_warning(self, compiler):
        cuda_build.check_ptx("9.0")

    def test_a_warning_is_an_error(self, compiler, tmp_path, monkeypatch):
        source = tmp_path / "unused.cu"
        source.write_text("__global__ void f(int* out) { int unused; *out = 1; }\n")
        monkeypatch.setattr(cuda_build, "sources", lambda: [source])
        monkeypatch.setattr(cuda_build, "OUT", tmp_path)
        with pytest.raises(RuntimeError, match=r"unused\.cu for 90"):
            cuda_build.compile_cubins("9.0")

    def test_a_spill_is_seen(self, compiler, tmp_path, monkeypatch):
        source = tmp_path / "spill.cu"
        source.write_text(
            "__global__ void __launch_bounds__(1024, 2) f(const float* in, float* out) {\n"
            "  float v[64];\n"
            "  for (int i = 0; i < 64; ++i) v[i] = in[i * 1024 + threadIdx.x];\n"
            "  __syncthreads();\n"
            "  for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = v[63 - i] * v[i];\n"
            "}\n"
        )
        monkeypatch.setattr(cuda_build, "sources", lambda: [source])
        monkeypatch.setattr(cuda_build, "OUT", tmp_path)
        found = cuda_build.parse_ptxas(cuda_build.compile_cubins("9.0")[1])
        with pytest.raises(AssertionError, match="spills"):
            check_resources(found)

    def test_the_documented_tables_are_those_of_the_sources(self, compiler, disassembler):
        document = sass.DOCUMENT.read_text()
        for architecture in sorted({device.architecture for device in sass.DEVICES}):
            table = sass.markdown(architecture, sass.from_sources(architecture))
            assert sass.block_of(architecture, document) == table, (
                "run `python -m benchmarks sass --write`"
            )


# A loop of two wide loads and two pairs per round (8-byte logits): far tokens out of line and in a
# loop of their own, the frame move inline and jumped over.
LISTING = """
\t\tFunction : _Z4loopv
        /*0000*/                   MOV R1, c[0x0][0x28] ;                    /* 0x0 */
                                                                             /* 0x0 */
        /*0010*/               @P0 BRA 0x0190 ;
        /*0020*/                   LDG.E.EF.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.EF.128 R8, desc[UR4][R12.64+0x10] ;
        /*0040*/                   BSSY B0, 0x0110 ;
        /*0050*/               @P1 BRA 0x0080 ;
        /*0060*/                   MUFU.EX2 R1, R1 ;
        /*0070*/                   FMUL R2, R2, R1 ;
        /*0080*/               @P2 BRA 0x01b0 ;
        /*0090*/                   MUFU.EX2 R1, R4 ;
        /*00a0*/                   MUFU.EX2 R2, R5 ;
        /*00b0*/              @!P3 FFMA R6, R1, R2, R6 ;
        /*00c0*/                   FMNMX R6, R1, R2, !PT ;
        /*00d0*/                   FFMA2 R6, R1, R2, R6 ;
        /*00e0*/                   NOP ;
        /*00f0*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0100*/                   BSYNC B0 ;
        /*0110*/                   ISETP.GE.AND P0, PT, R2, R3, PT ;
        /*0120*/              @!P0 BRA 0x0020 ;
        /*0130*/                   LDG.E R5, desc[UR4][R2.64] ;
        /*0140*/                   LDG.E.64 R6, desc[UR4][R2.64] ;
        /*0150*/               @P1 BRA 0x0130 ;
        /*0160*/                   STG.E.U16 desc[UR4][R2.64], R5 ;
        /*0190*/                   EXIT ;
        /*01b0*/                   MUFU.EX2 R1, R4 ;
        /*01c0*/                   MUFU.EX2 R2, R5 ;
        /*01d0*/                   MUFU.EX2 R3, R4 ;
        /*01e0*/               @P4 BRA 0x01b0 ;
        /*01f0*/                   BSYNC B0 ;
        /*0200*/                   BRA 0x0200;
"""


class TestReader:
    @pytest.fixture
    def loop(self):
        (function,) = sass.parse(LISTING)
        return sass.hot_loop(function, 16)

    def test_blocks_and_loops(self):
        (function,) = sass.parse(LISTING)
        blocks = sass.graph(function)
        assert blocks[0x0][1] == (0x20, 0x190)
        assert blocks[0x20][1] == (0x60, 0x80)
        assert blocks[0x90][1] == (0x110,) and blocks[0x1F0][1] == (0x110,)
        assert blocks[0x190][1] == ()
        assert sorted(header for header, _ in sass.loops(blocks)) == [0x20, 0x130, 0x1B0]

    def test_near_path(self, loop):
        addresses = [i.address for i in loop.path]
        expected = [*range(0x20, 0x60, 0x10), *range(0x80, 0xE0, 0x10)]
        assert addresses == [*expected, 0xF0, 0x100, 0x110, 0x120]
        assert loop.pairs == 2 and loop.bytes_in_flight == 32

    def test_a_shorter_way_with_more_exponentials_is_not_the_near_path(self, loop):
        (function,) = sass.parse(LISTING.replace("@P4 BRA 0x01b0", "    NOP"))
        assert sass.hot_loop(function, 16).path == loop.path

    def test_costs(self, loop):
        assert loop.cost() == {
            "issue": 14 / 2,
            "special": 2 / 2,
            "alu": 3 / 2,
            "fp32": (1 + 2) / 2,
            "bytes": 16,
        }

    def test_far_and_move_are_in_the_body_only(self, loop):
        assert {0x60, 0x1D0} <= {i.address for i in loop.body}
        assert 0x140 not in {i.address for i in loop.body}

    def test_a_loop_without_wide_loads_has_none(self):
        (function,) = sass.parse(LISTING.replace(".EF.128", ""))
        with pytest.raises(ValueError, match="no loop with 128-bit"):
            sass.hot_loop(function, 16)

    def test_an_exponential_that_is_missing_is_said(self):
        (function,) = sass.parse(LISTING.replace("MUFU.EX2", "MUFU.RCP"))
        with pytest.raises(ValueError, match="no way round the loop with 2 exponentials"):
            sass.hot_loop(function, 16)

    def test_widths(self):
        for opcode, width in {
            "LDG.E": 4,
            "LDG.E.U8": 1,
            "LDG.E.U16.CONSTANT": 2,
            "LDG.E.64": 8,
            "LDG.E.EF.128": 16,
            "STG.E.EF.128": 16,
            "LDG.E.128.CONSTANT": 16,
            "LDG.E.ENL2.256": 32,
        }.items():
            assert sass.Instruction(0, "", opcode, "").width == width, opcode

    def test_predictions_are_those_of_the_design(self):
        """Issue slots per bf16 pair at 90 % of the peak, worked out by hand: 39, 27, 20."""
        cost = {"issue": 20.0, "special": 1.0, "alu": 0.0, "fp32": 0.0, "bytes": 4.0}
        slots = {}
        for device in sass.DEVICES:
            seconds = device.seconds_per_pair(cost)
            slots[device.name] = cost["issue"] * seconds["memory"] / seconds["issue"]
        assert [round(slots[name], 1) for name in ("H100", "H200", "B200")] == [39.3, 27.5, 20.0]

    def test_names(self):
        name = "void trm::kernels::stream_divergence_kernel<trm::BFloat16, float, (bool)1>"
        assert cuda_build.short(f"{name}(trm::A, int)") == (
            "stream_divergence_kernel<BFloat16, float, true>"
        )
        assert sass.label(cuda_build.short(name)) == "divergence bf16 fp32 true"
        assert sass.logit_types(cuda_build.short(name)) == ("BFloat16", "float")

    def test_ptxas_log(self):
        log = (
            "ptxas info    : Compiling entry function '_Z1fv' for 'sm_90'\n"
            "ptxas info    : Function properties for _Z1fv\n"
            "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
            "ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack, 1024 bytes smem\n"
            "ptxas info    : Function properties for _Z1gv\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        )
        assert cuda_build.parse_ptxas(log) == [
            cuda_build.Resources("f", 40, 1024, 16, 12),
            cuda_build.Resources("g", None, 0, 0, 0),
        ]
