"""Lists the model classes of an engine's registry that can build fused experts.

    ENGINE_PYTHON benchmarks/registry.py

Run with the python of an environment with vLLM or SGLang. Replaces the engine's entries in
benchmarks/results/registry-classes.json, from which support.py tells which classes were not tried.
Only the text of the engine's model files is read: a class can build experts if it, or a class or
function that it names, or one that these name, and so on, calls a layer with fused experts.
Drafts, embedding and classification models are left out.

Entries, by engine and version: the classes that can build experts; with DENSE, those whose file
imports or names such classes, but that build none themselves.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

KEPT = Path(__file__).parent / "results/registry-classes.json"
DENSE = ", dense"
_EXPERTS = {"FusedMoE", "SharedFusedMoE", "FusedMoEFactory", "get_moe_impl_class"}
_OTHERS = re.compile(
    r"MTP|NextN|Eagle|Draft|DSpark|DFlash|Assistant|Model$|Classification|Embedding|ColBERT|^Col|"
    r"^Transformers|^Roberta|^XLMRoberta|Pooling|LMHead$|Mtp"
)
# Modules that all models import, and that build no layers of their own.
_SHARED = ("utils", "interfaces", "interfaces_base", "module_mapping", "vision", "transformers")
# Classes that name some with experts, but build none in any configuration: the first one refuses
# experts, although its backbone has them; the layers of the other one are another framework's.
_WITHOUT = {"Cosmos3EdgeForConditionalGeneration", "MindSporeForCausalLM"}

# Of models, in both engines.
_FOLDERS = (("model_executor", "models"), ("models",), ("srt", "models"))

Place = tuple[Path, str]


def vllm_classes(folder: Path) -> dict[str, Place]:
    """The file and the name of each class of the registry, by architecture."""
    text = (folder / "model_executor/models/registry.py").read_text()
    found = {}
    for name, module, own in re.findall(r'"(\w+)":\s*\(\s*"([\w.]+)",\s*"(\w+)"', text):
        parts = module.split(".") if module.startswith("vllm.") else ["", *_FOLDERS[0], module]
        if (path := _file(folder.joinpath(*parts[1:]))) is not None:
            found[name] = path, own
    return found


def sglang_classes(folder: Path) -> dict[str, Place]:
    found = {}
    for file in sorted((folder / "srt/models").glob("*.py")):
        entry = re.search(r"^EntryClass\s*=\s*(\[[^\]]*\]|.*)", file.read_text(), re.MULTILINE)
        for name in re.findall(r"\w+", entry.group(1)) if entry else ():
            found[name] = file, name
    return found


class Reached:
    """What classes of an engine name, directly and through others. package: the engine's folder.
    registered: where its architectures are, which a class may name as strings."""

    def __init__(self, package: Path, registered: dict[str, Place]) -> None:
        self.package = package
        self.registered = registered

    def builds_experts(self, start: Place) -> bool:
        seen, left = set(), [start]
        while left:
            place = left.pop()
            if place in seen:
                continue
            seen.add(place)
            file, own = place
            if own not in _parsed(file)[0]:
                left += self._imports(file).get(own) or _inside(file, own)
            for name in _used(place):
                if name in _EXPERTS:
                    return True
                left += self._places(file, name)
        return False

    def shares_a_file(self, start: Path) -> bool:
        """Whether a file, or one that it imports, and so on, calls a layer with fused experts."""
        seen, left = set(), [start]
        while left:
            file = left.pop()
            if file in seen or {file.stem, file.parent.name} & {*_SHARED}:
                continue
            seen.add(file)
            if any(name in _EXPERTS for place in _parsed(file)[0] for name in _used((file, place))):
                return True
            left += [path for paths in self._imports(file).values() for path, _ in paths]
        return False

    def _places(self, file: Path, name: str) -> list[Place]:
        """Where a name that is used in a file may be defined: nowhere if not in a model's file."""
        imported = self._imports(file)
        files = [file, *(module for module, _ in imported.get("", []))]
        places = imported.get(name, []) + [(f, name) for f in files if name in _parsed(f)[0]]
        if not places and name in self.registered and f'"{name}"' in file.read_text():
            places = [self.registered[name]]
        return [place for place in places if place[0].stem not in _SHARED]

    def _imports(self, file: Path) -> dict[str, list[Place]]:
        return _imported(file, self.package)


@functools.cache
def _parsed(file: Path) -> tuple[dict[str, ast.AST], list[ast.ImportFrom]]:
    """Definitions at the top of a file, by name, and all imports of names."""
    tree = ast.parse(file.read_text())
    tops = {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            tops[node.targets[0].id] = node.value
    return tops, [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


@functools.cache
def _used(place: Place) -> frozenset[str]:
    """Names in a definition, except in annotations; strings are names of architectures."""
    file, name = place
    node = _parsed(file)[0].get(name)
    return frozenset() if node is None else frozenset(_names(node))


def _names(node: ast.AST) -> Iterator[str]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Name):
                yield child.id
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                if child.value.isidentifier():
                    yield child.value
            elif isinstance(child, ast.AST):
                if isinstance(child, ast.Attribute):
                    yield child.attr
                yield from _names(child)


@functools.cache
def _imported(file: Path, package: Path) -> dict[str, list[Place]]:
    """Imported names, and where they are defined, of which there may be one for each device; with
    an empty name, imported modules."""
    found: dict[str, list[Place]] = {}
    for node in _parsed(file)[1]:
        module = (node.module or "").split(".") if node.module else []
        if node.level:
            base = file.parent
            for _ in range(node.level - 1):
                base = base.parent
        elif module and module[0] == package.name:
            base, module = package, module[1:]
        else:
            continue
        for alias in node.names:
            inner = _file(base.joinpath(*module, alias.name))
            target = inner or _file(base.joinpath(*module))
            if target is not None and target != file and _is_model(target, package):
                key = "" if inner is not None else alias.asname or alias.name
                found.setdefault(key, []).append((target, alias.name))
    return found


def _is_model(file: Path, package: Path) -> bool:
    return any(package.joinpath(*folder) in file.parents for folder in _FOLDERS)


def _inside(file: Path, name: str) -> list[Place]:
    """Where a package defines a name that it imports when it is asked for."""
    if file.name != "__init__.py":
        return []
    return [(one, name) for one in sorted(file.parent.rglob("*.py")) if name in _parsed(one)[0]]


def _file(path: Path) -> Path | None:
    """Of a module or package."""
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


def main() -> None:
    for module, name, classes in (
        ("vllm", "vLLM", vllm_classes),
        ("sglang", "SGLang", sglang_classes),
    ):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        version = importlib.metadata.version(module).partition("+")[0]
        folder = Path(spec.origin).parent
        known = classes(folder)
        reached = Reached(folder, known)
        names, dense = [], []
        for one, place in sorted(known.items()):
            if _OTHERS.search(one):
                continue
            if reached.builds_experts(place):
                (dense if one in _WITHOUT else names).append(one)
            elif reached.shares_a_file(place[0]):
                dense.append(one)
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        kept |= {f"{name} {version}": names, f"{name} {version}{DENSE}": dense}
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        print(f"{name} {version}: {len(names)} classes, and {len(dense)} dense ones beside them")


if __name__ == "__main__":
    main()
