"""Runs in the vLLM environment: another plugin that replaces RoutedExperts, together with kt-moe.

    vllm_other_plugin.py FOLDER before|after

FOLDER has a distribution with an entry point, which vLLM loads before or after kt-moe's. Prints OK
at the end. An assertion names what is wrong.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "vllm.general_plugins"
MODULE = """
def register():
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    class OtherExperts(RoutedExperts):
        pass

    RoutedExperts.register_oot(OtherExperts)
"""
LINE = (
    "another plugin has replaced vLLM's RoutedExperts with other_plugin.register.<locals>."
    "OtherExperts, which kt-moe must replace, too; choose one with VLLM_PLUGINS, or remove the kt "
    "options"
)


def write(folder: Path) -> Path:
    """Writes the other distribution, as pip would install it."""
    information = folder / "other_plugin-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "other_plugin.py").write_text(MODULE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[{GROUP}]\nother = other_plugin:register\n")
    return folder


def main(folder: str, order: str) -> None:
    sys.path.insert(0 if order == "before" else len(sys.path), folder)
    names = [found.name for found in entry_points(group=GROUP)]
    assert (names.index("other") < names.index("kt_moe")) == (order == "before"), names

    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import op_registry_oot

    import kt_kernel
    from kt_kernel.plugin_entrypoints.vllm import slot
    from kt_kernel.serving.option_table import OptionError

    model = str(Path(kt_kernel.__file__).parent / "demo_model")
    EngineArgs(model=model, max_model_len=128).create_engine_config()
    other = op_registry_oot["RoutedExperts"]
    assert other.__name__ == "OtherExperts"
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    assert type(RoutedExperts.__new__(RoutedExperts)) is other

    def refused(call: object) -> None:
        try:
            call()
        except OptionError as error:
            assert str(error) == LINE, error
        else:
            raise AssertionError("not refused")

    given = {"additional_config": {"kt": {}}}
    refused(EngineArgs(model=model, max_model_len=128, **given).create_engine_config)
    refused(slot.taken().__enter__)  # in a worker, where a plugin may be loaded later
    assert op_registry_oot == {"RoutedExperts": other}
    print("OK")


if __name__ == "__main__":
    main(*sys.argv[1:])
