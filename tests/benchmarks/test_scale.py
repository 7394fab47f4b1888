"""What steps move between devices: read from programs, and compiled for many devices."""

import json

import jax
import pytest

from benchmarks import scale
from benchmarks.collectives import collectives_of

PROGRAM = """
%body (c: f32[256]) -> f32[256] {
  %c = f32[256]{0} parameter(0)
  ROOT %sum = f32[256]{0} all-reduce(%c), to_apply=%add
}

%cheap (x: f32[256]) -> f32[256] {
  ROOT %x = f32[256]{0} parameter(0)
}

%dear (y: f32[256]) -> f32[256] {
  %y = f32[256]{0} parameter(0)
  ROOT %moved = (f32[128]{0}, f32[128]{0}) all-to-all(%y), dimensions={0}
}

ENTRY %main (a: f32[256], i: s32[]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %i = s32[] parameter(1)
  %whole = (bf16[32]{0}, bf16[256]{0}) all-gather-start(%a), dimensions={0}
  %done = bf16[256]{0} all-gather-done(%whole)
  %both = ((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0})) all-reduce-start(%a), to_apply=%add
  %k = f32[256]{0} while(%a), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %end = f32[256]{0} conditional(%i, %k, %k), branch_computations={%cheap, %dear}
}
"""


def test_collectives_are_read_with_their_loops_and_without_their_operands():
    found = collectives_of(PROGRAM)
    assert [(one.kind, one.times, one.nbytes) for one in found] == [
        ("all-gather", 1, 512),
        ("all-reduce", 1, 48),
        ("all-reduce", 5, 5 * 1024),
        ("all-to-all", 1, 1024),
    ]


def test_steps_are_compiled_for_a_mesh(tmp_path):
    path = tmp_path / "tiny.json"
    scale.main("tiny", ("1x8",), ("adafactor",), output=path)
    record = json.loads(path.read_text())["records"]["1x8"]["adafactor"]
    assert set(record["mib_moved"]) == {"all-reduce"}
    assert 0 < record["percent_of_gradients"] < 10


def test_the_models_have_their_sizes():
    mesh = jax.sharding.AbstractMesh((1, 8), ("fsdp", "tensor"))
    for name, billions in (("8B", 8.03), ("70B", 70.55)):
        shapes = scale.parameters(scale.LLAMAS[name], mesh).values()
        assert sum(x.size for x in shapes) == pytest.approx(billions * 1e9, rel=2e-3)
