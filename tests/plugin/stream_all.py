"""Batches that are streamed have all their cold experts on the GPU, however small they are."""

from kt_kernel.serving import streaming

streaming._WORTH_SHARING = -1.0
