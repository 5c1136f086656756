"""Another SGLang plugin. It wraps functions that kt-moe wraps and, depending on SGLANG_OTHER, takes
what kt-moe replaces: "replace" uses SGLang's registry, "assign" does not."""

import os
from typing import Any

CALLS: list[str] = []
WRAPPED = {
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__": "layer",
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.check_weights": "check",
    "sglang.srt.server_args.ServerArgs.check_server_args": "arguments",
}


def register() -> None:
    from sglang.srt.layers.moe import kt_ep_wrapper
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    class OtherMethod(kt_ep_wrapper.KTEPWrapperMethod):
        pass

    def other_config(server_args: Any, layer_id: int) -> str:
        return "other"

    def around(name: str) -> Any:
        def hook(original: Any, *args: Any, **given: Any) -> Any:
            CALLS.append(name)
            return original(*args, **given)

        return hook

    place, wanted = "sglang.srt.layers.moe.kt_ep_wrapper", os.environ["SGLANG_OTHER"]
    if wanted == "replace":
        HookRegistry.register(f"{place}.KTEPWrapperMethod", OtherMethod, HookType.REPLACE)
        HookRegistry.register(
            f"{place}.create_kt_config_from_server_args", other_config, HookType.REPLACE
        )
    elif wanted == "assign":
        kt_ep_wrapper.KTEPWrapperMethod = OtherMethod
    for target, name in WRAPPED.items():
        HookRegistry.register(target, around(name), HookType.AROUND)
