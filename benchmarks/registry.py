"""Lists the model classes of an engine's registry whose code has fused experts.

    ENGINE_PYTHON benchmarks/registry.py

Run with the python of an environment with vLLM or SGLang. Replaces the engine's entry in
benchmarks/results/registry-classes.json, from which support.py tells which classes were not tried.
Only the text of the engine's model files is read, with those that they import from each other.
Drafts, embedding and classification models are left out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

KEPT = Path(__file__).parent / "results/registry-classes.json"
_EXPERTS = re.compile(
    r"\b(FusedMoE|SharedFusedMoE|FusedMoEFactory)\(|(?<!import )get_moe_impl_class\("
)
_IMPORT = re.compile(
    r"from (?:\.|sglang\.srt\.models\.|vllm\.model_executor\.models\.)(\w+) import"
)
_OTHERS = re.compile(
    r"MTP|NextN|Eagle|Draft|DSpark|DFlash|Assistant|Model$|Classification|Embedding|ColBERT|^Col|"
    r"^Transformers|^Roberta|^XLMRoberta|Pooling|LMHead$|Mtp"
)
_SHARED = ("utils", "interfaces", "interfaces_base", "module_mapping", "vision", "transformers")


def vllm_classes(folder: Path) -> list[str]:
    text = (folder / "model_executor/models/registry.py").read_text()
    entries = re.findall(r'"(\w+)":\s*\(\s*"([\w.]+)",', text)
    models = folder / "model_executor/models"
    found = set()
    for name, module in entries:
        path = models / module
        if module.startswith("vllm."):
            path = folder / module.removeprefix("vllm.").replace(".", "/")
        if has_experts(path, models, set()):
            found.add(name)
    return sorted(found)


def sglang_classes(folder: Path) -> list[str]:
    models = folder / "srt/models"
    found = set()
    for file in models.glob("*.py"):
        entry = re.search(r"^EntryClass\s*=\s*(\[[^\]]*\]|.*)", file.read_text(), re.MULTILINE)
        if entry and has_experts(file.with_suffix(""), models, set()):
            found |= set(re.findall(r"\w+", entry.group(1)))
    return sorted(found)


def has_experts(path: Path, models: Path, seen: set[Path]) -> bool:
    """Of a module or package without its suffix; ``seen``: those that were looked at."""
    if path in seen or path.name in _SHARED:
        return False
    seen.add(path)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    text = "\n".join(file.read_text() for file in files if file.exists())
    if _EXPERTS.search(text):
        return True
    return any(has_experts(models / name, models, seen) for name in _IMPORT.findall(text))


def main() -> None:
    for module, name, classes in (
        ("vllm", "vLLM", vllm_classes),
        ("sglang", "SGLang", sglang_classes),
    ):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        version = importlib.metadata.version(module).partition("+")[0]
        names = [one for one in classes(Path(spec.origin).parent) if not _OTHERS.search(one)]
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        kept[f"{name} {version}"] = names
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        print(f"{name} {version}: {len(names)} classes")


if __name__ == "__main__":
    main()
