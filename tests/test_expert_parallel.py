"""Experts on two processes: what one process gives, forward and backward."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
from regard.ffn import MLP, ExpertBank, MixtureOfExperts, Router, ShardedExpertBank

DIM, COUNT, SIZES = 6, 4, (5, 2)  # examples of each process


def built():
    torch.manual_seed(0)
    bank = ExpertBank(lambda: MLP(DIM, 5), COUNT)
    return MixtureOfExperts(
        bank, Router(DIM, COUNT), top_k=2, capacity=0.75, balance_loss_weight=0
    ).double()


def inputs(case):
    """x (b n d), its mask, and a weight for each output.  In the case "idle" the second process has
    padding only."""
    make = torch.Generator().manual_seed(7)
    x, weight = (
        torch.randn(sum(SIZES), 9, DIM, dtype=torch.float64, generator=make) for _ in range(2)
    )
    mask = torch.arange(9).expand(len(x), 9) < torch.tensor([9, 4, 6, 1, 9, 9, 3])[:, None]
    if case == "idle":
        mask = mask & (torch.arange(len(x)) < SIZES[0])[:, None]
    return x, mask, weight


def run(experts, x, mask, weight):
    x = x.clone().requires_grad_()
    y = experts(x, mask)
    (y * weight).sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: p.grad for name, p in experts.named_parameters()},
    }


def process(rank, path, cases):
    """One of the two: its own examples, and half of the experts."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/meet", rank=rank, world_size=len(SIZES)
    )
    mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    for case in cases:
        experts = built().shard()
        assert experts.bank.bank.expert.up.weight.shape[0] == COUNT // len(SIZES)
        torch.save(run(experts, *(t[mine] for t in inputs(case))), f"{path}/{case}{rank}")
    with pytest.raises(regard.Unsupported, match="already sharded"):
        experts.shard()
    with pytest.raises(ValueError, match="3 experts cannot be sharded evenly over 2"):
        ShardedExpertBank(ExpertBank(lambda: MLP(DIM), 3))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Fails if experts that live elsewhere give other results or gradients: of tokens, of experts,
    or of the router; if the processes need as many tokens each, or wait for one that has none."""
    cases = ("both", "idle")
    mp.spawn(process, (str(tmp_path), cases), nprocs=len(SIZES))
    for case in cases:
        want = run(built(), *inputs(case))
        got = [
            torch.load(tmp_path / f"{case}{rank}", weights_only=True) for rank in range(len(SIZES))
        ]
        for name in ("y", "x"):
            torch.testing.assert_close(torch.cat([part[name] for part in got]), want.pop(name))
        torch.testing.assert_close(
            sum(part["router.weight"] for part in got), want.pop("router.weight")
        )
        for name, grad in want.items():  # those of an expert are whole where it lives
            there = name.replace("bank.", "bank.bank.")
            torch.testing.assert_close(torch.cat([part[there] for part in got]), grad)
        assert want["bank.expert.up.weight"].any()
