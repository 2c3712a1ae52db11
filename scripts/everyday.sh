#!/usr/bin/env bash
# 20 everyday tasks of one to three steps on the real model, judged by files and facts.
#
#   scripts/everyday.sh [--model ID|FILE] [--seeds N] [--variants full,no-rescue,no-guard] [--only NAME,…] [--json FILE]
#
# Defaults: the default model, five seeds at temperature 0.7, all three variants. Prints a line a task and the rates.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
exec python3 scripts/everyday.py --cob ./target/release/cob "$@"
