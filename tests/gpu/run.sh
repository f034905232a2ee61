#!/usr/bin/env bash
# Runs the vLLM-side tests on a machine with CUDA, in one call: tests/gpu/run.sh [pytest arguments].
# PYTHON and PYTHONPATH choose the environment; tests that need two ranks need two cards.
set -uo pipefail
cd "$(dirname "$0")/../.."
export VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_HOST_IP=127.0.0.1
export VLLM_WORKER_MULTIPROC_METHOD=spawn  # the tests use CUDA before they start workers
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
exec "${PYTHON:-python3}" -m pytest -m "not long" -q -rs --durations 10 "${@:-tests/worker}"
