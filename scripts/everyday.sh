#!/usr/bin/env bash
# 20 everyday tasks of one to three steps on the real model, judged by files and facts.
#
#   scripts/everyday.sh [--model ID|FILE] [--set tasks|held-out] [--seeds N] [--temperature T] [--variants full,no-rescue,no-guard]
#                       [--only NAME,…] [--json FILE] [--verbose] [--flag=--FLAG-OF-THE-RUNNER …]
#
# Defaults: the default model, five seeds at temperature 0.7, all three variants. Prints a line a task and the rates. The tasks are
# those that prompts and settings were chosen on; `--set held-out` has 20 others.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --release --quiet --bin cob --example everyday
model=qwen2.5-coder-1.5b-instruct-q4_k_m
for ((i = 1; i < $#; i++)); do
  if [ "${!i}" = --model ]; then j=$((i + 1)) && model=${!j}; fi
done
[ -e "$model" ] || "$target/release/cob" model pull "$model" >/dev/null
exec python3 scripts/everyday.py --runner "$target/release/examples/everyday" "$@"
