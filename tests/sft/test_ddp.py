"""Several processes: DDP has the gradients of the whole batch; FSDP is refused."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from kt_kernel.sft import wrap_experts

from .models import fill_lora, tiny, tokens

SETTINGS = dict(lora_rank=4, lora_alpha=8.0, num_gpu_experts=1)


def wrapped() -> nn.Module:
    model = tiny("qwen3_moe", torch.float32)
    fill_lora(wrap_experts(model, **SETTINGS))
    return model


def gradients(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    model(ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


def worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    model = wrapped()
    parallel = nn.parallel.DistributedDataParallel(model)
    # The weights of experts on the GPU are not sent around.
    assert not any(".hot." in name for name in parallel.named_module_buffers)
    grads = gradients(parallel, tokens(4)[rank::2])
    torch.save(grads, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for a, b, wanted in zip(*found, gradients(wrapped(), tokens(4)), strict=True):
        assert torch.equal(a, b)
        assert (a - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(
    ("shard", "arguments"),
    [
        (FullyShardedDataParallel, {"device_id": torch.device("cpu"), "use_orig_params": True}),
        (fully_shard, {}),
    ],
)
def test_sharded_parameters_are_refused(shard, arguments):
    """They would change unseen."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
        wrap_experts(model, lora_rank=4, cpuinfer_threads=2)
        if shard is fully_shard:
            arguments = {"mesh": init_device_mesh("cpu", (1,))}
        with pytest.raises(RuntimeError, match="layer 0: FSDP shards the parameters of experts"):
            shard(model, **arguments)(tokens())
    finally:
        torch.distributed.destroy_process_group()
