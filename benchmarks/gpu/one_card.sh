#!/usr/bin/env bash
# Runs the commands of README.md that need one card: benchmarks/gpu/one_card.sh FOLDER [PART…]
# Parts: kernels capture stages served gaps-0.6b gaps-8b. What each prints is kept in FOLDER.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder="${1:?usage: benchmarks/gpu/one_card.sh FOLDER [PART…]}" python="${PYTHON:-python3}" status=0
shift
export VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_HOST_IP=127.0.0.1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_WORKER_MULTIPROC_METHOD=spawn PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
mkdir -p "$folder"

measure() { # NAME SCRIPT ARGUMENTS…
  "$python" "benchmarks/$2" "${@:3}" 2>"$folder/$1.err" | tee "$folder/$1.txt" || status=1
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
[ $# -gt 0 ] || set -- kernels capture stages served gaps-0.6b gaps-8b
for part in "$@"; do
  case "$part" in
    kernels)
      measure kernels-0.6b gpu/kernel_times.py --shape qwen3-0.6b
      measure kernels-8b gpu/kernel_times.py --shape qwen3-8b
      measure decode-8b gpu/decode_stage_commit.py --shape qwen3-8b
      ;;
    capture) measure capture gpu/extract.py --shape qwen3-0.6b --shape qwen3-8b ;;
    stages)
      measure stages-0.6b gpu/stage_interference.py --shape qwen3-0.6b
      measure stages-0.6b-16 gpu/stage_interference.py --shape qwen3-0.6b --objects 16
      ;;
    served) measure served end_to_end.py --via memory --device cuda --shape qwen3-0.6b --mbit 1000 ;;
    gaps-0.6b) measure "$part" gpu/commit_gap.py --shape qwen3-0.6b --versions 100 --streams 64 --logs "$folder/$part" ;;
    gaps-8b) measure "$part" gpu/commit_gap.py --shape qwen3-8b --versions 15 --streams 64 --logs "$folder/$part" ;;
    *) echo "no part '$part': kernels capture stages served gaps-0.6b gaps-8b" >&2 && exit 2 ;;
  esac
done
exit "$status"
