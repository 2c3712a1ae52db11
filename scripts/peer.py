#!/usr/bin/env python3
"""One measurement of llama.cpp, as one JSON object: what `examples/compare.rs` compares cob with.

    PYTHON scripts/peer.py MODEL.gguf --threads N prefill TOKENS | decode DEPTH TOKENS | start TOKENS | memory TOKENS
    PYTHON scripts/peer.py MODEL.gguf --threads N ids FILE       (the ids of FILE, a JSON list, are read)

PYTHON has `llama-cpp-python` (0.3.36 was measured). Rates are the better of its flash attention on and off. Ids are new in each run.
"""

import argparse
import json
import random
import time


def load(model, threads, context, flash):
    from llama_cpp import Llama

    return Llama(model, n_ctx=context, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, flash_attn=flash, verbose=False)  # fmt: skip


def fresh(n):
    return [random.randrange(1000, 150_000) for _ in range(n)]


def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def read_rate(a, ids):
    best = 0.0
    for flash in (False, True):
        model = load(a.model, a.threads, len(ids) + 64, flash)
        model.eval(fresh(32))
        model.reset()
        start = time.perf_counter()
        model.eval(ids)
        best = max(best, len(ids) / (time.perf_counter() - start))
        del model
    return {"tokens": len(ids), "tokens_per_s": best}


def write_rate(a, depth, tokens):
    best = 0.0
    for flash in (False, True):
        model = load(a.model, a.threads, depth + tokens + 64, flash)
        model.eval(fresh(max(depth, 8)))
        start = time.perf_counter()
        for i in fresh(tokens):
            model.eval([i])
        best = max(best, tokens / (time.perf_counter() - start))
        del model
    return {"tokens": tokens, "tokens_per_s": best}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("what", choices=["prefill", "decode", "start", "memory", "ids"])
    p.add_argument("numbers", nargs="+")
    a = p.parse_args()
    if a.what == "prefill":
        result = read_rate(a, fresh(int(a.numbers[0])))
    elif a.what == "decode":
        result = write_rate(a, int(a.numbers[0]), int(a.numbers[1]))
    elif a.what == "ids":
        with open(a.numbers[0]) as file:
            result = read_rate(a, json.load(file))
    elif a.what == "start":
        import llama_cpp  # not counted

        start = time.perf_counter()
        model = load(a.model, a.threads, 2048, False)
        model.eval(fresh(int(a.numbers[0])))
        model.sample(temp=0.0)
        result = {"seconds": time.perf_counter() - start}
    else:
        model = load(a.model, a.threads, 2048, False)
        model.eval(fresh(int(a.numbers[0])))
        result = {"peak_bytes": peak_kib() * 1024}
    print(json.dumps(result))


main()
