#!/usr/bin/env bash
# Every figure of README.md that one card gives and that needs no second machine: benchmarks/gpu/one_card.sh FOLDER [PART…]
# Parts: kernels stages gaps-0.6b gaps-8b; all of them take about twenty minutes. What each prints is kept in FOLDER.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder="$1" python="${PYTHON:-python3}" status=0
shift
export VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_HOST_IP=127.0.0.1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_WORKER_MULTIPROC_METHOD=spawn PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
mkdir -p "$folder"

measure() { # NAME SCRIPT ARGUMENTS…
  "$python" "benchmarks/gpu/$2" "${@:3}" 2>"$folder/$1.err" | tee "$folder/$1.txt" || status=1
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
[ $# -gt 0 ] || set -- kernels stages gaps-0.6b gaps-8b
for part in "$@"; do
  case "$part" in
    kernels)
      measure kernels-0.6b kernel_times.py --shape qwen3-0.6b
      measure kernels-8b kernel_times.py --shape qwen3-8b --density 0.001 --density 0.01
      measure decode-8b decode_stage_commit.py --shape qwen3-8b
      ;;
    stages) measure stages-0.6b stage_interference.py --shape qwen3-0.6b ;;
    gaps-0.6b) measure gaps-0.6b commit_gap.py --shape qwen3-0.6b --versions 100 --streams 64 --logs "$folder/logs-0.6b" ;;
    gaps-8b) measure gaps-8b commit_gap.py --shape qwen3-8b --versions 15 --streams 64 --logs "$folder/logs-8b" ;;
    *) echo "no part '$part': kernels stages gaps-0.6b gaps-8b" >&2 && exit 2 ;;
  esac
done
exit "$status"
