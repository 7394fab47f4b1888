"""Counting what a program does, and what ours do on an H100 where its compiler is installed."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import device_program, h100, program_counts, scale, tpu
from benchmarks.inputs import parameter_shapes, stacked

PROGRAM = """
%fused (p.0: f32[1024,8], p.1: s32[]) -> f32[1,8] {
  %p.0 = f32[1024,8]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %part = f32[1,8]{1,0} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={1,8}
}

%body (c: f32[256]) -> f32[256] {
  %c = f32[256]{0} parameter(0)
  ROOT %twice = f32[256]{0} add(%c, %c)
}

%cheap (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  ROOT %copy.1 = f32[256]{0} copy(%x)
}

%dear (x.1: f32[256]) -> f32[256] {
  %x.1 = f32[256]{0} parameter(0)
  ROOT %call.1 = f32[256]{0} custom-call(%x.1), custom_call_target="cusolver_gesvdj_ffi"
}

ENTRY %main (a: f32[1024,8], i: s32[], v: f32[256], b: bf16[1000]) -> f32[256] {
  %a = f32[1024,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %v = f32[256]{0} parameter(2)
  %b = bf16[1000]{0} parameter(3)
  %slice = f32[1,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused
  %wide = f32[1000]{0} convert(%b)
  %k = f32[256]{0} while(%v), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %open = f32[256]{0} while(%k), condition=%c, body=%body
  ROOT %end = f32[256]{0} conditional(%i, %open, %open), branch_computations={%cheap, %dear}
}
"""


def test_counts_of_a_program():
    shortest = program_counts.count(PROGRAM)
    assert (shortest.branches, shortest.loops_of_unknown_length) == (1, 1)
    assert shortest.kernels == 2 + 5 + 1 + 1  # slice and convert, two loops, a copy
    assert shortest.library_calls == 0
    # The slice alone of what is sliced; each vector of the additions twice read and once written.
    assert shortest.nbytes == (32 + 32 + 4) + (2000 + 4000) + 6 * 3 * 1024 + 2 * 1024
    launches = 9 * program_counts.LAUNCH
    assert shortest.seconds == pytest.approx(launches + 3 * program_counts.ROUND_TRIP)
    longest = program_counts.count(PROGRAM, max)
    assert (longest.library_calls, longest.decompositions) == (1, 1)
    assert longest.seconds > shortest.seconds


def test_layers_are_stacked_and_nothing_else():
    shapes = stacked(parameter_shapes("117M"))
    assert shapes["blocks"]["expand"]["kernel"].shape == (12, 768, 3072)
    assert shapes["blocks"]["expand"]["bias"].shape == (12, 3072)
    assert shapes["tokens"]["embedding"].shape == (50304, 768)


def test_a_missing_compiler_is_named(monkeypatch):
    missing = device_program.DEVICES["v5e"]._replace(is_available=lambda: False)
    monkeypatch.setitem(device_program.DEVICES, "v5e", missing)
    with pytest.raises(SystemExit, match=r"v5e: no compiler .* `make device-program`"):
        device_program.main("v5e", rows=("adamw",))


def test_cycles_of_loops_and_branches():
    """A loop's body counts as often as its condition allows, and of branches one."""
    text = """
%body (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  ROOT %next = s32[] add(%c, %c), backend_config={"estimated_cycles":"100"}
}

%less (c.1: s32[]) -> pred[] {
  %c.1 = s32[] parameter(0)
  %limit = s32[] constant(12)
  ROOT %is = pred[] compare(%c.1, %limit), direction=LT
}

%dear (x: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  ROOT %y = s32[] add(%x, %x), backend_config={"estimated_cycles":"3000"}
}

ENTRY %main (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %f = s32[] fusion(%a), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"1500"}
  %loop = s32[] while(%f), condition=%less, body=%body
  ROOT %end = s32[] conditional(%a, %loop), true_computation=%dear, false_computation=%body
}
"""
    found = tpu.figures(SimpleNamespace(as_text=lambda: text), "v5e")
    assert found["ms"] == pytest.approx((1500 + 12 * 100 + 100) / 1.5e6)
    assert found["ms_of_longest_branch"] == pytest.approx((1500 + 12 * 100 + 3000) / 1.5e6)
    assert (found["fusions"], found["loops"], found["branches"]) == (1, 1, 1)


needs_gpu_compiler = pytest.mark.skipif(not h100.is_available(), reason="no compiler for an H100")
needs_tpu_compiler = pytest.mark.skipif(not tpu.is_available(), reason="no compiler for TPUs")
H100, V5E, V6E = (device_program.DEVICES[name] for name in ("h100", "v5e", "v6e"))


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("row", "branches"),
    [
        ("adapprox", 0),
        ("adapprox rank 16", 0),
        ("adapprox 8 bits", 0),
        ("adapprox, stacked", 0),
        ("adapprox 1 to 64", 1),
    ],
)
def test_a_step_asks_the_host_only_to_choose_ranks(row, branches):
    record = device_program.record_of(row, parameter_shapes("tiny"), H100)
    assert record["branches"] == branches
    assert record["loops_of_unknown_length"] == 0
    if branches:
        assert record["library_calls_of_longest_branch"] <= 40
        return
    assert record["decompositions"] == 0
    assert record["library_calls"] <= 4
    # Of 18 matrices and 34 vectors; 16 or fewer a matrix, whatever the number of leaves.
    assert record["kernels"] <= 500


@needs_gpu_compiler
@pytest.mark.parametrize("row", ["adapprox 4 bits, stacked", "adapprox_muon 4 bits"])
def test_a_gpu_writes_no_average_in_float32(row):
    """It writes targets in bfloat16, which are half as large."""
    shape = (32_768, 1024)
    shapes = {"embedding": jax.ShapeDtypeStruct(shape, np.float32)}
    record = device_program.record_of(row, shapes, H100)
    assert record["temporaries_mib"] < 1.3 * 2 * math.prod(shape) / 2**20


@needs_gpu_compiler
def test_records_are_written(tmp_path):
    path = tmp_path / "records.json"
    device_program.main(model="tiny", rows=("adamw",), output=path)
    record = json.loads(path.read_text())["records"]["adamw"]
    assert record["kernels"] > 0
    assert record["gb_moved"] == pytest.approx(28e-9 * 875264, rel=0.2)


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("row", "shape", "device", "mebibytes"),
    [
        ("adapprox, stacked", (4096, 1024), V5E, 4),
        ("adapprox 4 bits, stacked, bfloat16", (4096, 1024), V5E, 4),
        ("adapprox 4 bits, bfloat16", (32_064, 1024), V5E, 270),  # blocks of codes are no fours
        ("adapprox, bfloat16", (1024, 32_064), V5E, 70),  # 63 for the update
        ("adapprox, stacked", (50_304, 768), V6E, 16),  # turned, it would be three times 147
    ],
)
def test_a_tpu_keeps_no_target_and_turns_nothing(row, shape, device, mebibytes):
    """The compiler may end in a failed check, and this process with it, where a pass is large."""
    shapes = {"embedding": jax.ShapeDtypeStruct(shape, np.float32)}
    record = device_program.record_of(row, shapes, device)
    assert record["branches"] == 0
    assert record["temporaries_mib"] < mebibytes
    assert record["ms"] < 6 or "4 bits" not in row


@needs_tpu_compiler
@needs_gpu_compiler
@pytest.mark.parametrize("device", [H100, V5E])
def test_split_weights_take_no_pass_of_their_own(device):
    """Parts are joined and cut where the optimizer reads and writes."""
    shapes = {"embedding": jax.ShapeDtypeStruct((4096, 1024), np.float32)}
    whole, split = (
        device_program.record_of(row, shapes, device) for row in ("adamw", "adamw, split")
    )
    kind = "kernels" if device is H100 else "fusions"
    assert split[kind] <= whole[kind]
    assert split["ms"] <= whole["ms"]
    assert split["temporaries_mib"] < 1


@needs_tpu_compiler
@pytest.mark.parametrize("name", ["adapprox", "adapprox_muon 4 bits"])
def test_a_mesh_of_tpus_gathers_nothing(name):
    mesh = V5E.mesh((2, 2), scale.AXES)
    sizes = scale.Llama(4, 512, 1024, 4, 2, 4096)
    tx, params = scale.OPTIMIZERS[name](), scale.parameters(sizes, mesh)
    record = scale.record_of(tx, params, mesh, "v5e")
    assert "all-gather" not in record["mib_moved"]
    if name == "adapprox_muon 4 bits":
        hidden = sum(x.size for x in params.values() if x.ndim == 3 and x.shape[1] > 8)
        assert record["mib_moved"]["all-to-all"] * 2**20 <= 1.01 * 4 * 2 * hidden / mesh.size
