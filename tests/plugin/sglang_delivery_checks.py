"""Parts of sglang_hooks.py: how experts reach the layer, without an engine."""

import re
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

from kt_kernel.moe.placement import Placement
from kt_kernel.plugin_entrypoints.sglang import layer as kt_layer
from kt_kernel.plugin_entrypoints.sglang import probe as kt_probe
from kt_kernel.serving.hot_delivery import HotDelivery
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.options import KTOptions


def check_hot_experts_are_delivered() -> None:
    """A start ends unless SGLang's loader has filled each tensor of each hot expert, with cold
    experts and without, and whether it calls the loader of a parameter or that of the layer."""
    shards = {"w13": ("w1", "w3"), "w2": ("w2",)}
    names = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv")
    for hot, fused in ((3, 0), (4, 0), (4, 1)):
        layer = object.__new__(FusedMoE)
        torch.nn.Module.__init__(layer)
        layer.top_k, layer.num_fused_shared_experts = 2, fused
        layer.moe_tp_size, layer.moe_tp_rank, layer.moe_ep_size = 1, 0, 1
        layer.is_shared_fused_moe = False
        layer.moe_runner_config = MoeRunnerConfig(layer_id=7, num_experts=4 + fused)
        loaded: list[Any] = []
        layer._weight_loader_impl = lambda loaded=loaded, **each: loaded.append(each["expert_id"])

        def create_weights(layer: Any, weight_loader: Any, **given: Any) -> None:
            for name in (*names, "w13_input_scale"):
                parameter = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
                parameter.weight_loader = weight_loader
                layer.register_parameter(name, parameter)

        method = object.__new__(kt_layer.KTEPWrapperMethod)
        method.gpu_method = SimpleNamespace(create_weights=create_weights)
        options = KTOptions(method="BF16", num_gpu_experts=hot)
        method.config = kt_layer.LayerConfig(HybridModel(options), {}, 7, 16, 2)
        method.create_weights(
            layer,
            4 + fused,
            64,
            32,
            torch.float32,
            weight_loader=lambda p, w, name, shard, e, loaded=loaded: loaded.append(e),
        )
        method.hybrid.finish_loading = iter(()).__next__
        experts = range(hot + fused)  # shared ones have the last numbers
        parts = [(e, n, s) for e in experts for n in names for s in shards[n.partition("_")[0]]]

        def error(method: Any = method, layer: Any = layer) -> str:
            try:
                method.process_weights_after_loading(layer)
            except ValueError as error:
                return str(error)
            except StopIteration:  # of finish_loading
                return ""
            raise AssertionError("finish_loading was not called")

        for expert, name, shard in parts:
            what = {"w1": "gate", "w3": "up", "w2": "down"}[shard]
            said = error()
            said_of = r" \(from 4 on, shared ones\)" if fused else ""
            begin = rf"layer 7: SGLang did not load weights of hot experts{said_of}: {expert}\b"
            assert re.match(begin, said) and f"{what} of {name}" in said, said
            assert "input_scale" not in said, said
            load = layer.weight_loader if expert == 2 else layer.get_parameter(name).weight_loader
            load(layer.get_parameter(name), torch.zeros(2, 2), "w", shard, expert)
        assert loaded == [expert for expert, *_ in parts] and error() == "", error()
        if hot == 4:  # as SGLang's loader passes some formats
            method.delivery = HotDelivery("layer 7", "SGLang", method.hybrid.activation.matrices)
            for name in names:
                assert name in error()
                layer.weight_loader(layer.get_parameter(name), torch.zeros(4, 2), "w", None, None)
            assert error() == ""
        # What a checkpoint need not have must be whole, if it has a part.
        scale = layer.w13_input_scale
        scale.weight_loader(scale, torch.zeros(2, 2), "w", "w1", 0)
        assert ": 0 (up of w13_input_scale); 1-" in error()


def check_random_weights() -> None:
    """kt model check sets them in place of loading: experts by the layer's loader, moved on as
    asked, and what a class derives from its weights afterwards."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Module()
            self.experts.num_experts, self.got = 3, {}
            for name, shape in (("w13_weight", (3, 8, 6)), ("w2_weight", (3, 6, 4))):
                parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
                parameter.weight_loader = self.take
                self.experts.register_parameter(name, parameter)
            self.absorb = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
            self.derived = None

        def take(
            self, param: Any, matrix: torch.Tensor, name: str, shard_id: str, expert_id: int
        ) -> None:
            self.got[shard_id, expert_id] = matrix

        def load_weights(self, weights: Any) -> None:
            raise AssertionError("a checkpoint is read")

        def post_load_weights(self) -> None:
            self.derived = self.absorb.clone()

    original, found = DefaultModelLoader.load_weights_and_postprocess, []
    for moved in (0, 1):
        kt_probe._set_weights(moved)
        model = Model()
        DefaultModelLoader.load_weights_and_postprocess(model, iter(()), torch.device("cpu"))
        DefaultModelLoader.load_weights_and_postprocess = staticmethod(original)
        assert model.derived is not None and model.derived.any()
        found.append(model.got)
    plain, after = found
    assert len(plain) == len(after) == 9
    for (shard, expert), matrix in plain.items():
        assert matrix.any() and torch.equal(after[shard, (expert + 1) % 3], matrix), shard
        assert not torch.equal(after[shard, expert], matrix), shard


def check_what_models_see_while_they_load() -> None:
    """While a model loads, it sees no parameters of layers whose experts kt-moe reads: of those
    with no hot expert, and of all if kt-moe reads the hot ones, too."""
    options = dict(method="BF16", weight_path="a folder", num_gpu_experts=1)
    for given, seen in (({}, ["1.w"]), ({"hot_format": "bf16"}, [])):
        own, model = HybridModel(KTOptions(**options, **given)), torch.nn.ModuleList()
        own.plan = SimpleNamespace(of=lambda number: Placement.first(4, number))
        for number in range(2):
            method = object.__new__(kt_layer.KTEPWrapperMethod)
            method.config = kt_layer.LayerConfig(own, {}, number, 16, 2)
            method.hybrid = SimpleNamespace(layer_idx=number, placement=own.plan.of(number))
            own.layers.append(method.hybrid)
            model.append(torch.nn.Module())
            model[-1].quant_method = method
            model[-1].w = torch.nn.Parameter(torch.zeros(number), requires_grad=False)
        before = dict(model.named_parameters())
        names = [f"model.layers.{n}.mlp.experts.{e}.w1.weight" for n in range(2) for e in range(4)]
        read = iter([(name, torch.zeros(0)) for name in names])
        weights = kt_layer._around_get_all_weights(
            lambda loader, config, model, read=read: read, None, None, model
        )
        assert [*dict(model.named_parameters())] == seen
        left = [name for name, _ in weights]
        assert left == ([names[4]] if seen else []), left
        after = dict(model.named_parameters())
        assert after.keys() == before.keys() and all(after[k] is before[k] for k in after)
