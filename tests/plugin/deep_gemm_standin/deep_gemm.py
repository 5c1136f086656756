"""Nothing, in the place of DeepGEMM on machines without it. For tests only.

SGLang's speculative decoding with a draft model imports all attention backends to see which one is
in use. The one of sparse attention imports deep_gemm, which other models do not call. With this
folder on PYTHONPATH and SGLANG_ENABLE_JIT_DEEPGEMM=false, they are served.
"""
