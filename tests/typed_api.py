"""The types of the public API as a type checker sees them. Nothing runs this file: `.ci/lint types`
checks that the assertions hold, and that each line marked as an error is one."""

import os
from typing import assert_type

import torch

import kt_kernel
from kt_kernel import (
    BaseMoEWrapper,
    InferenceMoEWrapper,
    KExpertsCPUBuffer,
    KTMoEWrapper,
    cpu_features,
    generate_gpu_experts_masks,
    model_scope,
)
from kt_kernel.checkpoint import Checkpoint, open_checkpoint
from kt_kernel.sft import BaseSFTMoEWrapper
from kt_kernel.utils.loader import BF16SafeTensorLoader, SafeTensorLoader
from kt_kernel.weights.expert_tensors import ExpertTensors


def of_a_layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    wrapper = KTMoEWrapper(0, 8, 2, 64, 32, method="BF16", numa_nodes=[0])
    assert_type(wrapper, InferenceMoEWrapper)
    base: BaseMoEWrapper = wrapper
    assert_type(base.num_experts, int)
    assert_type(base.gpu_experts_mask, torch.Tensor)
    assert_type(base.weight_path, str | os.PathLike[str] | None)
    wrapper.load_weights(torch.arange(8))
    assert_type(wrapper.forward(x, ids, weights, None), torch.Tensor)
    wrapper.submit_forward(x, ids, weights, None)
    assert_type(wrapper.sync_forward(x, None), torch.Tensor)
    assert_type(
        KTMoEWrapper.select_deferred_experts(ids, weights, 1), tuple[torch.Tensor, torch.Tensor]
    )
    KTMoEWrapper.set_capture_batch_sizes([1])
    assert_type(KTMoEWrapper.get_capture_batch_sizes(), list[int])
    assert_type(KTMoEWrapper.clear_buffer_cache(), int)


def of_a_layer_for_fine_tuning(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    wrapper = KTMoEWrapper(0, 8, 2, 64, 32, method="AMXBF16_SFT", mode="sft", lora_rank=8)
    assert_type(wrapper, BaseSFTMoEWrapper)
    assert_type(wrapper.forward_sft(x, ids, weights), torch.Tensor)


def of_the_package(frequencies: torch.Tensor) -> None:
    assert_type(kt_kernel.__version__, str)
    assert_type(kt_kernel.__cpu_variant__, str)
    assert_type(kt_kernel.__cpu_kernel__, str)
    assert_type(kt_kernel.INFERENCE_METHODS, frozenset[str])
    assert_type(cpu_features(), dict[str, bool])
    assert_type(generate_gpu_experts_masks(frequencies, 3), torch.Tensor)
    assert_type(KExpertsCPUBuffer.clear(), int)
    with model_scope():
        pass


def of_checkpoints() -> None:
    checkpoint = open_checkpoint("model")
    assert_type(checkpoint, Checkpoint)
    assert_type(checkpoint.read_experts(0, 8, 64, 32), ExpertTensors)
    assert_type(checkpoint.read_tensor("norm.weight"), torch.Tensor)
    for loader in (SafeTensorLoader("model"), BF16SafeTensorLoader("model")):
        assert_type(loader.load_tensor("norm.weight"), torch.Tensor)
        assert_type(loader.has_tensor("norm.weight"), bool)


def wrong() -> None:
    KTMoEWrapper(0, "8", 2, 64, 32)  # type: ignore[call-overload]
    KTMoEWrapper(0, 8, 2, 64, 32, threads=1)  # type: ignore[call-overload]
    KTMoEWrapper(0, 8, 2, 64, 32).forwards()  # type: ignore[attr-defined]
