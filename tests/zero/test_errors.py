"""What is refused says what was expected, what was got and what to do; what is read and written whole; precision; meshes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import ring_attention
import zeroshard
from tests.harness import RankPools, assert_equal
from tests.models import CASES, Net, sgd, train_reference, trainable
from tests.zero.runs import collect, parameters


def sharded(stage: int = 3, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASES["net"].build()
    return zeroshard.shard(model, sgd(model.parameters()), stage=stage, **options)


# ------------------------------------------------------------------------------------------ refusals


def already_sharded() -> None:
    model, optimizer = sharded()
    zeroshard.shard(model, optimizer)


def deepcopy() -> None:
    copy.deepcopy(sharded()[0])


def save_by_torch() -> None:
    torch.save(sharded()[0].state_dict(), "/dev/null")


def gradient_before() -> None:
    model = CASES["net"].build()
    model(torch.ones(2, 7)).sum().backward()
    zeroshard.shard(model, sgd(model.parameters()))


def edit_without_write() -> None:
    model, _ = sharded()
    with zeroshard.gathered(model), torch.no_grad():
        model.head.weight.zero_()


def train_without_optimizer() -> None:
    model, _ = zeroshard.shard(CASES["net"].build(), None, stage=3)
    model(torch.ones(2, 7)).sum().backward()


def create_graph() -> None:
    model, _ = sharded()
    model(torch.ones(2, 7)).pow(2).sum().backward(create_graph=True)


def not_sharded() -> None:
    zeroshard.full_state_dict(nn.Linear(2, 2))


def gathered_of_a_stranger() -> None:
    with zeroshard.gathered(nn.Linear(2, 2)):
        pass


def gathered_slice_write() -> None:
    model, _ = sharded()
    with torch.no_grad():
        model.head.weight[0].zero_()


def whole_gradient() -> None:
    model, _ = sharded()
    model(torch.ones(2, 7)).sum().backward()
    model.head.weight.grad.sort()


def swapped(stage: int) -> None:
    model, _ = sharded(stage)
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.ones_like(model.head.weight, device="cpu")))
    model(torch.ones(2, 7)).sum().backward()


def swapped_whole() -> None:
    swapped(1)


def swapped_sharded() -> None:
    swapped(3)


def no_sync_after_a_reduction_inside_join() -> None:
    model, _ = sharded(1)
    with zeroshard.join(model):
        model(torch.ones(2, 7)).sum().backward()
        with model.no_sync():
            model(torch.ones(2, 7)).sum().backward()


REFUSALS: dict[Callable[[], None], str] = {
    already_sharded: "list",
    deepcopy: "EMA",
    save_by_torch: "zeroshard.save",
    gradient_before: "zero_grad",
    edit_without_write: "write",
    train_without_optimizer: "optimizer",
    create_graph: "create_graph",
    not_sharded: "zeroshard.shard",
    gathered_of_a_stranger: "gathered",
    gathered_slice_write: "gathered",
    whole_gradient: "full_gradients",
    swapped_whole: "swap_tensors",
    swapped_sharded: "swap_tensors",
    no_sync_after_a_reduction_inside_join: "zero_grad",
}


def refuse(rank: int, call: Callable[[], None]) -> str:
    try:
        call()
    except zeroshard.ShardError as error:
        return str(error)
    return "no error"


def test_refusals_name_the_remedy_on_every_rank(ranks: RankPools) -> None:
    for (call, word), of_ranks in zip(REFUSALS.items(), collect(ranks(2), refuse, list(REFUSALS)), strict=True):
        assert all(word in text for text in of_ranks), (call.__name__, of_ranks)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"stage": 4}, "stage=4"),
        ({"stage": True}, "stage=True"),
        ({"reduce": "avg"}, "reduce='avg'"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"precision": torch.bfloat16}, "precision"),
        ({"units": ["nothing.*"]}, "nothing"),
        ({"mesh": 3}, "mesh=3"),
    ],
)
def test_arguments_of_shard(options: dict[str, Any], word: str) -> None:
    """Without any process group: one rank."""
    model = Net()
    with pytest.raises(zeroshard.ShardError, match="(?s)" + word.replace("(", r"\(")):
        zeroshard.shard(model, sgd(model.parameters()), **options)
    assert "_zeroshard" not in model.__dict__ and type(model.head.weight) is nn.Parameter


def test_what_is_not_a_model_or_an_optimizer() -> None:
    with pytest.raises(zeroshard.ShardError, match="Module"):
        zeroshard.shard([nn.Linear(2, 2)])
    with pytest.raises(zeroshard.ShardError, match="Optimizer"):
        zeroshard.shard(nn.Linear(2, 2), "adam")


# ------------------------------------------------------------------------------------------ whole reads and writes


def whole(rank: int, stage: int) -> dict[str, Any]:
    model, optimizer = sharded(stage)
    plain = CASES["net"].build()
    seen: dict[str, Any] = {"state": zeroshard.full_state_dict(model), "plain": plain.state_dict()}
    with zeroshard.gathered(model):
        seen["inside"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with zeroshard.gathered(model, write=True), torch.no_grad():
        model.head.weight.fill_(7.0 if rank == 0 else 3.0)
        model.blocks[0].up.bias[1:3] += 1
    seen["edited"] = parameters(model)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen["moved"] = parameters(model)["head.weight"]
    seen["rank 0 only"] = len(zeroshard.full_state_dict(model, rank0_only=True))
    model.load_state_dict(plain.state_dict())
    seen["loaded"] = parameters(model)
    return seen


def test_reading_and_writing_whole_parameters(ranks: RankPools) -> None:
    for of_ranks in collect(ranks(2), whole, [1, 2, 3]):
        for rank, seen in enumerate(of_ranks):
            assert_equal(dict(seen["state"]), dict(seen["plain"]))
            assert_equal(seen["inside"], dict(seen["plain"]))
            want = {name: value.clone() for name, value in seen["plain"].items()}
            want["head.weight"].fill_(7.0)
            want["blocks.0.up.bias"][1:3] += 1
            assert_equal(seen["edited"], want)
            assert not torch.equal(seen["moved"], want["head.weight"])
            assert seen["rank 0 only"] == (len(want) if rank == 0 else 0)
            assert_equal(seen["loaded"], dict(seen["plain"]))


# ------------------------------------------------------------------------------------------ precision


def low(rank: int, item: tuple[int, tuple[str, ...]]) -> dict[str, Any]:
    stage, kept = item
    model = CASES["net"].build()
    precision = zeroshard.Precision(compute=torch.bfloat16, keep_fp32=kept)
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage, precision=precision)
    dtypes: dict[str, torch.dtype] = {}
    model.blocks[0].norm.register_forward_pre_hook(lambda m, args: dtypes.update(norm=args[0].dtype))
    model.blocks[0].up.register_forward_pre_hook(lambda m, args: dtypes.update(up=args[0].dtype, weight=m.weight.dtype))
    for step in range(2):
        out = model(CASES["net"].batch(step, rank).inputs[0])
        out.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"dtypes": dtypes, "out": out.dtype, "parameters": parameters(model)}


def low_reference(kept: tuple[str, ...], world: int) -> dict[str, torch.Tensor]:
    """fp32 masters, a bf16 copy for each rank's forward and backward, gradients summed in fp32."""
    masters = CASES["net"].build()
    optimizer = sgd(masters.parameters())
    for step in range(2):
        total: list[torch.Tensor] = []
        for rank in range(world):
            copied = copy.deepcopy(masters).bfloat16()
            if kept:
                for block, master in zip(copied.blocks, masters.blocks, strict=True):
                    block.norm = copy.deepcopy(master.norm)
                    block.norm.register_forward_pre_hook(lambda m, args: (args[0].float(),))
                    block.norm.register_forward_hook(lambda m, args, out: out.bfloat16())
            copied(CASES["net"].batch(step, rank).inputs[0].bfloat16()).float().pow(2).mean().backward()
            grads = [p.grad.float() for p in copied.parameters()]
            total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
        for p, grad in zip(masters.parameters(), total, strict=True):
            p.grad = grad / world
        optimizer.step()
    return {name: p.detach() for name, p in masters.named_parameters()}


def test_bf16_compute_with_fp32_masters(ranks: RankPools) -> None:
    """To the bit: weights cast, computed in bf16, gradients summed in fp32, masters stepped in fp32."""
    items = [(stage, kept) for stage in (0, 1, 3) for kept in ((), ("blocks.*.norm",))]
    for (_, kept), of_ranks in zip(items, collect(ranks(2), low, items), strict=True):
        want = low_reference(kept, 2)
        for got in of_ranks:
            assert got["dtypes"] == {
                "norm": torch.float32 if kept else torch.bfloat16, "up": torch.bfloat16, "weight": torch.bfloat16,
            }  # fmt: skip
            assert got["out"] == torch.bfloat16
            assert all(value.dtype == torch.float32 for value in got["parameters"].values())
            assert_equal(got["parameters"], want)


# ------------------------------------------------------------------------------------------ meshes


def on_a_mesh(rank: int, item: tuple[int, str]) -> dict[str, torch.Tensor]:
    stage, kind = item
    square = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    case = CASES["net"]
    model = case.build(dtype=torch.float64)
    mesh = {"2-D": square, "flat": square._flatten("all"), "group": dist.group.WORLD}[kind]
    model, optimizer = zeroshard.shard(model, sgd(trainable(model)), stage=stage, mesh=mesh)
    for step in range(3):
        case.loss(model, case.batch(step, rank, dtype=torch.float64)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def test_replicas_of_shards_on_four_ranks(ranks: RankPools) -> None:
    items = [(stage, kind) for stage in (1, 2, 3) for kind in ("2-D", "flat", "group")]
    want = train_reference(CASES["net"], world=4, clip=0.1, dtype=torch.float64).parameters
    for item, of_ranks in zip(items, collect(ranks(4), on_a_mesh, items), strict=True):
        for got in of_ranks:
            try:
                assert_equal(got, want, rtol=1e-11, atol=1e-13)
            except AssertionError as error:
                raise AssertionError(f"{item}:\n{error}") from None


def outside(rank: int, world: int) -> list[str]:
    """What the one rank hears that is in neither the group nor the mesh."""
    handles = [dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1]), "data"]
    said = []
    for call in (lambda handle: zeroshard.shard(nn.Linear(2, 2), mesh=handle), ring_attention.ContextParallel):
        for handle in handles if rank == 2 else []:
            with pytest.raises((zeroshard.ShardError, ring_attention.RingError)) as error:
                call(handle)
            said.append(str(error.value))
    return said


def test_a_rank_outside_the_mesh_is_told(ranks: RankPools) -> None:
    *_, said = ranks(3).run(outside)
    assert len(said) == 6 and all("that this rank is part of" in text for text in said)


def forgotten_group() -> str:
    """What a rank of torchrun sees that shards before it has made a process group."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(zeroshard.ShardError) as error:
        patch.setenv("WORLD_SIZE", "2")
        zeroshard.shard(nn.Linear(2, 2), None)
    return str(error.value)


def test_ranks_without_a_process_group_are_told() -> None:
    assert "init_process_group" in forgotten_group()


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(zeroshard.ShardError, match="optimizer"):
        zeroshard.shard(model, torch.optim.SGD(other.parameters(), lr=0.1))
