#!/usr/bin/env bash
# Tool calling on a folder of files in BFCL's form.
#
#   scripts/bfcl.sh DIR [--model ID|FILE] [--json] [--out FILE] [--only STEM,…] [--limit N] [--no-rescue | --both]
#
# Rates: schema-valid over emitted calls; called, right tool, right (tool and arguments) over cases. No tool is run. "in text": the
# text of a case without a call holds one as JSON all the same; with --both that of the rows without rescue is what the model's
# unconstrained text gives.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
dir=$(realpath "$1"); shift
model=qwen2.5-coder-1.5b-instruct-q4_k_m args=()
while [ $# -gt 0 ]; do
  case $1 in
    --model) if [ -e "$2" ]; then model=$(realpath "$2"); else model=$2; fi; shift 2 ;;
    --out) args+=(--out "$(realpath -m "$2")"); shift 2 ;;
    *) args+=("$1"); shift ;;
  esac
done
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --release --quiet --bin cob --example bfcl
[ -e "$model" ] || "$target/release/cob" model pull "$model" >/dev/null
exec "$target/release/examples/bfcl" "$dir" --model "$model" ${args[@]+"${args[@]}"}
