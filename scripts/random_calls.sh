#!/usr/bin/env bash
# 1,000 complete calls written at temperature 1.5 inside the grammars of ten random sets of tools, each checked from outside.
#
#   scripts/random_calls.sh [--model ID|FILE] [--calls N] [--temperature T] [--seed N]
#
# Ends with 1 if a call is unparsable, of an unknown tool, or not what its schema allows.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --release --quiet --bin cob --example random_calls
model=qwen2.5-coder-0.5b-instruct-q4_k_m
for ((i = 1; i < $#; i++)); do
  if [ "${!i}" = --model ]; then j=$((i + 1)) && model=${!j}; fi
done
[ -e "$model" ] || "$target/release/cob" model pull "$model" >/dev/null
exec "$target/release/examples/random_calls" "$@"
