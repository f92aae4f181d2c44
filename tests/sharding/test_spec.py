"""Tests specs: the text form parses back, shards partition the tensor, and assembled shards equal
it.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtensor.errors import PlanningError
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.parse import parse
from dtensor.sharding.spec.placements import (
    Column,
    Partial,
    Placement,
    Row,
    Shard,
    Zigzag,
    index_sets,
)
from dtensor.sharding.spec.shards import assemble, shard_of
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.testing import strategies

MESH = Mesh(dp=2, tp=2)


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ({}, "f32[8,16]"),
        ({"tp": Row()}, "f32[8@tp,16]"),
        ({"tp": Column()}, "f32[8,16@tp]"),
        ({"tp": Shard(1, blocks=4)}, "f32[8,4*4@tp]"),
        ({"tp": Shard(1, blocks=(8, 4, 4))}, "f32[8,(8+4+4)@tp]"),
        ({"tp": Shard(1, unit=4)}, "f32[8,4@tp*4]"),
        ({"tp": Shard(1, blocks=(8, 4, 4), unit=2)}, "f32[8,(4+2+2)@tp*2]"),
        ({"tp": Row(), "dp": Row()}, "f32[8@(tp,dp),16]"),
        ({"dp": Row(), "tp": Row()}, "f32[8@(dp,tp),16]"),
        ({"dp": Row(), "tp": Column()}, "f32[8@dp,16@tp]"),
        ({"tp": Partial("sum")}, "f32[8,16]{sum@tp}"),
        ({"tp": Partial("max"), "dp": Partial("max")}, "f32[8,16]{max@dp,max@tp}"),
        ({"tp": Partial("sum"), "dp": Row()}, "f32[8@dp,16]{sum@tp}"),
        ({"tp": Zigzag(1)}, "f32[8,16@tp:zigzag]"),
        ({"tp": Zigzag(-1, blocks=2, unit=2)}, "f32[8,2*4@tp:zigzag*2]"),
        ({"tp": Zigzag(1), "dp": Column()}, "f32[8,16@(tp:zigzag,dp)]"),
        ({"dp": Column(), "tp": Zigzag(1)}, "f32[8,16@(dp,tp:zigzag)]"),
        ({"tp": Shard(1, shift=1)}, "f32[8,16@tp:shift1]"),
        ({"tp": Shard(1, shift=2)}, "f32[8,16@tp]"),
        ({"tp": Shard(1, zigzag=True, shift=1)}, "f32[8,16@tp:zigzag:shift1]"),
        ({"tp": Row(sizes=(6, 2))}, "f32[(6|2)@tp,16]"),
        ({"tp": Row(sizes=[4, 4])}, "f32[8@tp,16]"),
        ({"tp": Shard(0, sizes=(6, 2), shift=1)}, "f32[(6|2)@tp:shift1,16]"),
        ({"tp": Column(sizes=(0, 16)), "dp": Column()}, "f32[8,(0|16)@(tp,dp)]"),
        ({"tp": Row(sizes=(5, 3)), "dp": Row()}, "f32[(5|3)@(tp,dp),16]"),
        ({"dp": Row(), "tp": Row(sizes=(5, 3))}, "f32[8@dp&(5|3)@tp,16]"),
        ({"dp": Row(sizes=(8, 0)), "tp": Row(sizes=(0, 8))}, "f32[(8|0)@dp&(0|8)@tp,16]"),
    ],
)
def test_spec_text_parses_back(placements: dict[str, Placement], text: str) -> None:
    spec = make_spec((8, 16), torch.float32, MESH, placements)
    assert str(spec) == text
    assert parse(text, MESH) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    both = TensorSpec((12,), torch.float32, MESH, (Shard(0, blocks=3), Shard(0)))
    assert str(both) == "f32[3*4@dp&12@tp]" and parse(str(both), MESH) == both


def test_mesh_name_is_part_of_equality_and_repr() -> None:
    play = Mesh(tp=2, name="play")
    assert play != Mesh(tp=2) and play == Mesh(name="play", tp=2) and play.shape == {"tp": 2}
    assert len({play, Mesh(tp=2), Mesh(tp=2, name="train")}) == 3
    assert repr(play) == 'Mesh(tp=2, name="play")' and eval(repr(play)) == play
    assert str(play) == 'mesh(tp=2, name="play")' and str(Mesh(tp=2)) == "mesh(tp=2)"
    assert pickle.loads(pickle.dumps(play)) == copy.deepcopy(play) == play
    assert play.extended("mb", 4).without("mb") == play
    with pytest.raises(PlanningError, match="fix: rename the axis"):
        Mesh(name=2)
    with pytest.raises(PlanningError, match="name="):
        Mesh(tp=2, name=None)  # pyright: ignore[reportArgumentType]


def test_mesh_axes_without_names_are_refused_with_fix() -> None:
    for sizes, fix in (((2, 2), "dp=2, tp=2"), ((4,), "tp=4"), (((2, 2),), "dp=2, tp=2")):
        with pytest.raises(PlanningError, match=rf"fix: dt\.Mesh\({fix}\)"):
            Mesh(*sizes)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_spec_text_covers_submesh_scalar_and_bool() -> None:
    spec = parse("f32[8@tp,16] on pp=1", Mesh(pp=2, tp=2))
    assert spec.on == (("pp", 1),) and str(spec) == "f32[8@tp,16] on pp=1"
    assert str(parse("f32[]{sum@tp}", MESH)) == "f32[]{sum@tp}"
    assert parse("bool[4]", MESH).dtype == torch.bool


# -- properties ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(strategies.specs(dtype=torch.float64, pending=True))
def test_random_spec_parses_back_and_its_shards_assemble_to_tensor(spec: TensorSpec) -> None:
    assert parse(str(spec), spec.mesh) == spec
    x = torch.arange(math.prod(spec.shape), dtype=spec.dtype).view(spec.shape) - 3
    shards = [shard_of(x, spec, spec.mesh.coordinates(r)) for r in range(spec.mesh.size)]
    for rank, shard in enumerate(shards):
        assert tuple(shard.shape) == spec.local_shape(spec.mesh.coordinates(rank))
    assert torch.equal(assemble(shards, spec), x)


@settings(deadline=None)
@given(
    size=st.integers(0, 24),
    num=st.integers(1, 5),
    blocks=st.integers(1, 4),
    zigzag=st.booleans(),
    shift=st.integers(0, 4),
)
def test_index_sets_partition_dim(
    size: int, num: int, blocks: int, zigzag: bool, shift: int
) -> None:
    assume(size % blocks == 0)
    sets = index_sets(Shard(0, blocks, zigzag=zigzag, shift=shift % num), size, num)
    held = [i for intervals in sets for lo, hi in intervals for i in range(lo, hi)]
    assert sorted(held) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 24), num=st.integers(1, 5))
def test_shard_without_blocks_splits_like_torch_chunk(size: int, num: int) -> None:
    chunks = torch.arange(size).chunk(num)
    sets = index_sets(Shard(0), size, num)
    assert [len(c) for c in chunks] == [hi - lo for item in sets for lo, hi in item]


@settings(deadline=None)
@given(size=st.integers(0, 40), num=st.integers(1, 5))
def test_zigzag_rank_holds_early_and_late_piece(size: int, num: int) -> None:
    each, more = divmod(size, 2 * num)
    order = [p for r in range(num) for p in (r, 2 * num - 1 - r)]  # the pieces that are enlarged
    sizes = {p: each + (i < more) for i, p in enumerate(order)}
    starts = [sum(sizes[q] for q in range(p)) for p in range(2 * num)]
    for rank, intervals in enumerate(index_sets(Zigzag(0), size, num)):
        held = [i for lo, hi in intervals for i in range(lo, hi)]
        pieces = (rank, 2 * num - 1 - rank)
        assert held == [starts[p] + i for p in pieces for i in range(sizes[p])]


@settings(deadline=None, max_examples=60)
@given(strategies.specs())
def test_largest_shard_is_that_of_fullest_rank_for_one_split_per_dim(spec: TensorSpec) -> None:
    ranks = range(spec.mesh.size)
    largest = max(spec.local_nbytes(spec.mesh.coordinates(rank)) for rank in ranks)
    if len({p.dim for p in spec.placements if isinstance(p, Shard)}) == sum(
        isinstance(p, Shard) for p in spec.placements
    ):
        assert spec.max_local_nbytes == largest


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Shard(0, sizes=(5, 2)), "sizes=(5, 2) add up to 7, dim 0 has 8.\nfix: sizes=(5, 3)"),
        (Shard(0, sizes=(9, 1)), "sizes=(9, 1) add up to 10, dim 0 has 8.\nfix: sizes=(8, 0)"),
        (
            Shard(-1, sizes=(2, 2, 2)),
            "sizes=(2, 2, 2) has length 3, and the axis has 2 ranks.\nfix: sizes=(2, 4)",
        ),
        (Shard(2), "names dim 2 of a tensor of shape [8, 6], which has 2 dims"),
        (Shard(0, blocks=3), "a dim of size 8 is not 3 equal blocks"),
        (Shard(0, blocks=(4, 2)), "blocks=(4, 2) add up to 6, but the dim has size 8"),
        (Shard(0, unit=3), "a block of size 8 is not a multiple of unit=3"),
        (Zigzag(0, blocks=4), "a block of dim 0 has only 2 elements"),
        (
            Zigzag(1, unit=2),
            "dim 1 has only 3 units of 2.\nfix: tp=dt.Shard(1, unit=2), or at least",
        ),
    ],
)
def test_invalid_placements_for_shape_are_refused(placement: Placement, message: str) -> None:
    with pytest.raises(PlanningError) as raised:
        make_spec((8, 6), torch.float32, MESH, {"tp": placement})
    assert message in str(raised.value)


def test_invalid_placement_values_and_axes_are_refused() -> None:
    with pytest.raises(PlanningError, match="at least 1"):
        Shard(0, blocks=0)
    with pytest.raises(PlanningError, match=r"at least 0, .*fix: sizes=\(48, 16\)"):
        Row(sizes=(-1, 2))
    with pytest.raises(PlanningError, match=r"fix: dt.Shard\(0, sizes=\(2, 1\)\)"):
        Row(blocks=3, sizes=(2, 1))
    with pytest.raises(PlanningError, match="the op is"):
        Partial("mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanningError, match="pending under"):
        make_spec((4,), torch.float32, MESH, {"dp": Partial("sum"), "tp": Partial("max")})
    with pytest.raises(PlanningError, match="has no axis 'pp'"):
        make_spec((4,), torch.float32, MESH, {"pp": Row()})
    with pytest.raises(PlanningError, match="cannot split a scalar"):
        make_spec((), torch.float32, MESH, {"tp": Row()})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32 8", "is not a spec"),
        ("q7[8]", "'q7' is not a dtype"),
        ("f32[x]", "'x' is not a dim"),
        ("f32[8@tp,16@tp]", "places axis 'tp' twice"),
        ("f32[8@pp]", "has no axis 'pp'"),
        ("f32[8@tp&9@dp]", "states two sizes, 8 and 9"),
        ("f32[8] on tp=2", "is not a part of"),
        ("f32[8]{mean@tp}", "the op is"),
    ],
)
def test_invalid_spec_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        parse(text, MESH)
