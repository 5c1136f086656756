# Size: 2.3 GB, 2 to 10 minutes
# Stock SGLang on the CPU. Its own requirements are CUDA packages, so it is installed without them and
# gets what its CPU path imports. `sgl_kernel` has no CPU build on PyPI: the tests bring a stand-in.
install torch numpy safetensors transformers
install --no-deps sglang
install aiohttp cloudpickle dill distro einops fastapi interegular jsonschema msgspec openai orjson \
  packaging partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart \
  pyzmq requests setproctitle soundfile tqdm triton uvicorn uvloop xxhash zstandard
install --no-deps apache-tvm-ffi compressed-tensors gguf IPython loguru sentencepiece torchvision \
  traitlets xgrammar

# PyPI's torchvision is a CUDA build: beside the CPU build of torch this file of it fails to import.
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
: >"$site/torchvision/_meta_registrations.py"

python -c 'import sglang; print(sglang.__version__)'
