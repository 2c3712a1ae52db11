#!/usr/bin/env bash
# Kills a run with SIGKILL after every kind of event and inside a tool, on the real model, and resumes it.
#
#   scripts/kill9.sh [--only NAME]
#
# Prints a line a case; ends with 1 if a session does not resume, or a call ran twice.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --release --quiet --bin cob
for model in qwen2.5-coder-0.5b-instruct-q4_k_m qwen2.5-coder-1.5b-instruct-q4_k_m; do
  "$target/release/cob" model pull "$model" >/dev/null
done
exec python3 scripts/kill9.py --cob "$target/release/cob" "$@"
