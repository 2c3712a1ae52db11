#!/usr/bin/env python3
"""cob against llama.cpp on the same file, in turns in one run: prefill and decode, and the ratios of each pair.

    python3 scripts/compare.py --peer-python PATH [--model FILE] [--prefill 512] [--decode 64] [--threads 2] [--rounds 3]

PATH is a Python that has `llama-cpp-python` (0.3.36 was measured). Run it on an otherwise idle machine; quote the medians.
Build cob first: cargo build --release.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def peer(a):
    """One measurement of llama.cpp, printed as JSON: the better of its flash attention on and off."""
    from llama_cpp import Llama

    ids = [(i * 7919 + 13 + os.getpid() * 101) % 150000 for i in range(a.prefill)]
    best = {"prefill": 0.0, "decode": 0.0}
    for flash in (False, True):
        model = Llama(a.model, n_ctx=a.prefill + a.decode + 8, n_batch=512, n_ubatch=512, n_threads=a.threads,
                      n_threads_batch=a.threads, flash_attn=flash, verbose=False)  # fmt: skip
        model.eval(ids[:32])
        model.reset()
        start = time.perf_counter()
        model.eval(ids)
        read = time.perf_counter() - start
        start = time.perf_counter()
        for i in ids[: a.decode]:
            model.eval([i])
        wrote = time.perf_counter() - start
        best = {"prefill": max(best["prefill"], a.prefill / read), "decode": max(best["decode"], a.decode / wrote)}
    print(json.dumps(best))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peer-python", default=os.environ.get("COB_PEER_PYTHON"))
    p.add_argument("--cob", default="target/release/cob")
    p.add_argument("--model")
    p.add_argument("--prefill", type=int, default=512)
    p.add_argument("--decode", type=int, default=64)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.model is None:
        command = [a.cob, "model", "path", "qwen2.5-coder-0.5b-instruct-q4_k_m"]
        a.model = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if a.peer:
        return peer(a)
    if not a.peer_python:
        sys.exit("--peer-python (or COB_PEER_PYTHON): a Python that has llama-cpp-python is needed")
    sizes = ["--prefill", str(a.prefill), "--decode", str(a.decode), "--threads", str(a.threads), "--model", a.model]
    ratios = {"prefill": [], "decode": []}
    for turn in range(1, a.rounds + 1):
        ours = [a.cob, "bench", "--model", a.model, "--threads", str(a.threads), "--prompt-tokens", str(a.prefill),
                "--output-tokens", str(a.decode), "--runs", "2", "--json"]  # fmt: skip
        ours = json.loads(subprocess.run(ours, check=True, capture_output=True, text=True).stdout)
        ours = {"prefill": ours["prefill_tokens_per_s"], "decode": ours["decode_tokens_per_s"]}
        theirs = json.loads(subprocess.run([a.peer_python, __file__, "--peer", *sizes], check=True, capture_output=True, text=True).stdout)
        for what in ratios:
            ratios[what].append(ours[what] / theirs[what])
            print(f"{turn}: {what:8} cob {ours[what]:7.1f} tok/s   llama.cpp {theirs[what]:7.1f} tok/s   ratio {ratios[what][-1]:.2f}")
    for what, each in ratios.items():
        print(f"{what}: median ratio {statistics.median(each):.2f}")


main()
