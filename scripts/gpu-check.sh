#!/usr/bin/env bash
# A GPU against the CPU on random weights (examples/gpu_check.rs): logits, fork, rollback, prefix cache, prefixes on disk, tok/s.
#
#   scripts/gpu-check.sh [--small]          builds with --features cuda where no binary is given
#   GPU_CHECK=PATH scripts/gpu-check.sh     a binary that was built elsewhere: nothing is built here
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${GPU_CHECK:-}" ]; then
  exec "$GPU_CHECK" --device cuda "$@"
fi
command -v nvcc >/dev/null || { echo "gpu-check: nvcc is not on PATH; install the CUDA toolkit, or name a built binary with GPU_CHECK=PATH" >&2; exit 2; }
exec cargo run --release --locked --features cuda --example gpu_check -- --device cuda "$@"
