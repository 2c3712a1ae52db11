//! A device against the CPU, on random weights: logits, fork, rollback, prefix cache, prefixes on disk, and how fast it is.
//!
//! `cargo run --release --features cuda --example gpu_check -- [--device cuda] [--small]`, or `scripts/gpu-check.sh`.
//!
//! Two models in the shape of Qwen2.5-0.5B: a GGUF file in the types of its Q4_K_M, and bf16 safetensors. With `--small` a few thousand
//! times less, and with `--device cpu` on candle's CPU tensors: then it checks itself. Exit code 1 if a check fails.

// A program of its own, outside of the library's rooms; it shares the writers of models with benches and tests.
#![allow(clippy::disallowed_methods, dead_code)]

#[path = "../benches/common/mod.rs"]
mod common;
#[path = "../tests/it/tiny.rs"]
mod tiny;

use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device};
use clap::{Parser, ValueEnum};
use cob::engine::store::{self, StoreSettings};
use cob::engine::{CHUNK, Engine, Report, Request, Settings};
use cob::model::{Backend, Kv, KvType, Logits, Model, candle_error};

type Fault = Box<dyn std::error::Error>;

/// How far the device's logits may be from the CPU's, as a part of how much the logits vary. The CPU has 8-bit activations, and bf16
/// has 8 bits of precision: a wrong kernel is off by more than one.
const DIFFERENCE_MAX: f64 = 0.2;
/// The same between two ways on the device to one position: only the order of sums can differ.
const AGAIN_MAX: f64 = 0.01;

#[derive(Parser)]
#[command(about = "A device against the CPU on random weights")]
struct Arguments {
    #[arg(long, default_value = "cuda")]
    device: On,
    /// Models of a few layers
    #[arg(long)]
    small: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum On {
    Cuda,
    Cpu,
}

/// Checks of one model, and how many have failed.
struct Checks {
    failed: usize,
}

impl Checks {
    fn check(&mut self, holds: bool, what: &str) {
        println!("  {} {what}", if holds { "ok    " } else { "FAILED" });
        self.failed += usize::from(!holds);
    }
}

fn main() -> Result<(), Fault> {
    let a = Arguments::parse();
    let device = match a.device {
        On::Cpu => Device::Cpu,
        On::Cuda => Device::new_cuda(0).map_err(|error| format!("no CUDA device: {}", candle_error(&error)))?,
    };
    let backend = Backend::Candle { device, exact: false };
    let shape =
        tiny::Shape { vocab: 151_936, hidden: 896, layers: 24, heads: 14, kv_heads: 2, intermediate: 4864, tied: true };
    let shape = if a.small { tiny::Shape { vocab: 2000, ..tiny::SMALL } } else { shape };
    let folder = tempfile::tempdir()?;
    let gguf = folder.path().join("random.gguf");
    if a.small {
        tiny::write_gguf(&gguf, &shape, 1, GgmlDType::Q8_0);
    } else {
        common::write_random(&gguf);
    }
    let floats = folder.path().join("bf16");
    std::fs::create_dir(&floats)?;
    tiny::write_safetensors_as(&floats, &shape, 2, DType::BF16);

    let mut checks = Checks { failed: 0 };
    for (name, path) in [("quantised GGUF", &gguf), ("bf16 safetensors", &floats)] {
        println!("{name}, on {}", backend.name());
        against_the_cpu(&mut checks, path, &backend, shape.vocab)?;
        forks_and_rollbacks(&mut checks, path, &backend, shape.vocab)?;
        engine(&mut checks, path, &backend, shape.vocab, a.small)?;
    }
    match checks.failed {
        0 => Ok(()),
        n => Err(format!("{n} checks failed").into()),
    }
}

/// Reproducible ids; another `seed`, other ids.
fn ids(n: usize, seed: u32, vocab: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i.wrapping_mul(7919).wrapping_add(seed * 104_729 + 13)) % vocab as u32).collect()
}

fn forward(model: &mut Model, kv: &mut Kv, ids: &[u32]) -> Result<Vec<f32>, Fault> {
    let mut logits = Vec::new();
    let chunks: Vec<&[u32]> = ids.chunks(CHUNK).collect();
    for (i, chunk) in chunks.iter().enumerate() {
        let wanted = if i + 1 == chunks.len() { Logits::Last } else { Logits::None };
        logits = model.forward(kv, chunk, wanted, &|| false).map_err(|error| format!("{error:?}"))?;
    }
    Ok(logits)
}

/// Root mean square of the difference, as a part of the deviation of `b`.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let n = b.len().max(1) as f64;
    let mean = b.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let spread = b.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    let off = a.iter().zip(b).map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2)).sum::<f64>();
    // NaN is not a small difference.
    if a.len() != b.len() || !off.is_finite() { f64::INFINITY } else { (off / spread.max(f64::MIN_POSITIVE)).sqrt() }
}

/// A prompt in chunks, then token after token.
fn against_the_cpu(checks: &mut Checks, path: &Path, backend: &Backend, vocab: usize) -> Result<(), Fault> {
    let run = |backend: Backend| -> Result<Vec<Vec<f32>>, Fault> {
        let mut model = Model::open(path, backend, KvType::F16)?;
        let mut kv = model.new_kv();
        let mut logits = vec![forward(&mut model, &mut kv, &ids(300, 1, vocab))?];
        for id in ids(8, 2, vocab) {
            logits.push(forward(&mut model, &mut kv, &[id])?);
        }
        Ok(logits)
    };
    let (ours, theirs) = (run(Backend::cpu())?, run(backend.clone())?);
    let differences: Vec<f64> = theirs.iter().zip(&ours).map(|(a, b)| difference(a, b)).collect();
    let most = differences.iter().copied().fold(0.0, f64::max);
    checks.check(most < DIFFERENCE_MAX, &format!("logits against the CPU's: at most {most:.4} of their deviation"));
    Ok(())
}

/// Two branches of one prefix, and a way back.
fn forks_and_rollbacks(checks: &mut Checks, path: &Path, backend: &Backend, vocab: usize) -> Result<(), Fault> {
    let mut model = Model::open(path, backend.clone(), KvType::F16)?;
    let (prefix, left, right) = (ids(300, 3, vocab), ids(40, 4, vocab), ids(40, 5, vocab));
    let mut fresh = |behind: &[u32]| -> Result<Vec<f32>, Fault> {
        let mut kv = model.new_kv();
        forward(&mut model, &mut kv, &prefix)?;
        forward(&mut model, &mut kv, behind)
    };
    let (of_left, of_right) = (fresh(&left)?, fresh(&right)?);
    let mut kv = model.new_kv();
    forward(&mut model, &mut kv, &prefix)?;
    let mut fork = kv.clone();
    // In turns, so that each could spoil the other.
    forward(&mut model, &mut kv, &left[..20])?;
    forward(&mut model, &mut fork, &right[..20])?;
    let a = forward(&mut model, &mut kv, &left[20..])?;
    let b = forward(&mut model, &mut fork, &right[20..])?;
    let most = difference(&a, &of_left).max(difference(&b, &of_right));
    checks.check(most < AGAIN_MAX, &format!("two branches of one prefix: off by {most:.5}"));
    kv.truncate(prefix.len());
    let back = forward(&mut model, &mut kv, &right)?;
    let most = difference(&back, &of_right);
    checks.check(most < AGAIN_MAX, &format!("after a rollback: off by {most:.5}"));
    Ok(())
}

/// Through the engine that `cob run` uses: what is known is not read again, and how fast it is.
fn engine(checks: &mut Checks, path: &Path, backend: &Backend, vocab: usize, small: bool) -> Result<(), Fault> {
    let folder = tempfile::tempdir()?;
    let (pinned, asked) = if small { (300, 330) } else { (4000, 4096) };
    let start = || -> Result<Engine, Fault> {
        let kept =
            StoreSettings { dir: folder.path().to_owned(), fingerprint: [1; 32], bytes_max: 4 << 30, tokens_min: 64 };
        let model = Model::open(path, backend.clone(), KvType::F16)?;
        let context_tokens = model.config().context.min(8192);
        Ok(Engine::start(model, Settings { context_tokens, cache_bytes: 1 << 30, store: Some(kept), drafts: false })?)
    };
    let run = |engine: &Engine, prompt: Vec<u32>, output: usize| -> Result<Report, Fault> {
        Ok(engine.run(Request { pinned, ..Request::greedy(prompt, output) }).map_err(|error| format!("{error:?}"))?)
    };
    let question = |seed: u32| {
        let mut prompt = ids(pinned, 6, vocab);
        prompt.extend(ids(asked - pinned, seed, vocab));
        prompt
    };
    let first = start()?;
    // Kernels are loaded by the first pass.
    first.run(Request::greedy(ids(32, 20, vocab), 2)).map_err(|error| format!("{error:?}"))?;
    let cold = run(&first, question(7), 64)?;
    let cached = run(&first, question(8), 64)?;
    checks.check(
        cold.usage.prefilled_tokens == asked && cached.usage.cached_tokens >= pinned,
        &format!("a prefix in memory: {} of {asked} tokens are not read again", cached.usage.cached_tokens),
    );
    let written = Instant::now();
    while store::list(folder.path())?.0.is_empty() && written.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(first);
    let second = start()?;
    second.run(Request::greedy(ids(32, 20, vocab), 2)).map_err(|error| format!("{error:?}"))?;
    let restored = run(&second, question(9), 64)?;
    checks.check(
        restored.usage.restored_tokens == pinned,
        &format!("a prefix on disk: {} tokens from there", restored.usage.restored_tokens),
    );
    let short = second.run(Request::greedy(ids(if small { 100 } else { 512 }, 10, vocab), 64));
    let short = short.map_err(|error| format!("{error:?}"))?;
    for (what, report) in
        [("short", &short), ("long", &cold), ("long, in memory", &cached), ("long, from disk", &restored)]
    {
        let usage = &report.usage;
        println!(
            "         {what}: prefill {} tokens in {:.1} ms ({:.0} tok/s); decode {} tokens, {:.1} tok/s",
            usage.prefilled_tokens,
            usage.prefill_ms,
            usage.prefilled_tokens as f64 * 1e3 / usage.prefill_ms.max(1e-3),
            usage.sampled_tokens,
            usage.sampled_tokens as f64 * 1e3 / usage.decode_ms.max(1e-3),
        );
    }
    Ok(())
}
