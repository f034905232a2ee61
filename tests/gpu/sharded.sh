#!/usr/bin/env bash
# Sharded trainers over the cards of one machine, with NCCL, in one call: tests/gpu/sharded.sh [pytest arguments].
# Every layout, twenty GRPO steps each of DDP and FSDP2, ZeRO where DeepSpeed is installed, and the memory they take.
set -uo pipefail
cd "$(dirname "$0")/../.."
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_NVLS_ENABLE=0 HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
python="${PYTHON:-python3}"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$python" -m pytest -q -rs --durations 10 tests/trainer/test_layouts.py tests/trainer/test_sharded.py "$@"
status=$?
for strategy in ddp fsdp2; do
  "$python" benchmarks/sharded_memory.py --ranks 2 --strategy "$strategy" --steps 20 || status=1
done
exit "$status"
