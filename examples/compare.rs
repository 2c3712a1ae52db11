//! cob against llama.cpp on one file, in turns in one run.
//!
//! `COB_PEER_PYTHON=PATH cargo run --release --example compare -- MODEL [--json] [--rounds 3] [--threads 2] [--only ROW,…]`
//!
//! PATH is a Python with `llama-cpp-python`; without one only cob's side is printed. Each figure comes from a process of its own,
//! through the engine that `cob run` uses, with an empty cache and new token ids; the machine should be otherwise idle. Ratios are of
//! each pair, and their median is shown.

// A program of its own, outside of the library's rooms.
#![allow(clippy::disallowed_methods)]

#[path = "../benches/common/mod.rs"]
mod common;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use cob::chat::mask::CallMask;
use cob::chat::qwen::{ChatFormat, Options, Qwen, Store};
use cob::engine::{Engine, Event, Mask, Report, Request, Settings};
use cob::hub::{Hub, HubSettings};
use cob::message::{Message, Sampling, ToolChoice};
use cob::model::{Backend, KvType, Model};
use serde_json::{Value, json};

type Fault = Box<dyn std::error::Error>;

#[derive(Parser)]
#[command(about = "cob against llama.cpp on one file, in turns in one run")]
struct Arguments {
    /// A GGUF file, or the id of an installed model
    model: String,
    /// One object for a machine
    #[arg(long)]
    json: bool,
    /// How often each pair is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Only these rows
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// What a process of its own measures
    #[arg(long, hide = true)]
    measure: Option<String>,
    /// A folder for a prefix store that several processes share
    #[arg(long, hide = true)]
    store: Option<PathBuf>,
}

/// How a pair of figures is compared.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Tokens a second: more is better, and the ratio is ours to theirs.
    Rate,
    /// Seconds: the ratio is ours to theirs, and less is better.
    Seconds,
    /// Bytes, against those of the file.
    Bytes,
}

struct Row {
    name: &'static str,
    /// What it must reach on the 0.5B file, and on a larger one; empty where nothing is asked.
    goals: [&'static str; 2],
    kind: Kind,
    ours: &'static str,
    theirs: &'static [&'static str],
    /// Beside a process that keeps a core busy.
    busy: bool,
}

impl Row {
    const fn new(
        name: &'static str,
        goals: [&'static str; 2],
        kind: Kind,
        ours: &'static str,
        theirs: &'static [&'static str],
    ) -> Self {
        Row { name, goals, kind, ours, theirs, busy: false }
    }

    const fn beside_another(mut self) -> Self {
        self.busy = true;
        self
    }
}

const ROWS: &[Row] = &[
    Row::new("prefill-512", ["≥ 2.2", "≥ 1.5"], Kind::Rate, "prefill 512", &["prefill", "512"]),
    Row::new("prefill-4096", ["≥ 2.2", "≥ 1.5"], Kind::Rate, "prefill 4096", &["prefill", "4096"]),
    Row::new("decode-0", ["≥ 1.25", "≥ 1.15"], Kind::Rate, "decode 8 64", &["decode", "8", "64"]),
    Row::new("decode-4096", ["≥ 1.8", "≥ 1.15"], Kind::Rate, "decode 4096 32", &["decode", "4096", "32"]),
    Row::new("start-20", ["≤ 0.7", ""], Kind::Seconds, "start 20", &["start", "20"]),
    Row::new("memory-512", ["≤ 1.3 of the file", ""], Kind::Bytes, "memory 512", &["memory", "512"]),
    Row::new("memory-tools", ["≤ 1.6 of the file", ""], Kind::Bytes, "memory-tools", &[]),
    Row::new("busy-prefill-512", ["≥ 1", "≥ 1"], Kind::Rate, "prefill 512", &["prefill", "512"]).beside_another(),
    Row::new("busy-decode-0", ["≥ 1", "≥ 1"], Kind::Rate, "decode 8 64", &["decode", "8", "64"]).beside_another(),
];

/// A process that keeps a core busy as long as this lives.
struct Busy(std::process::Child);

impl Busy {
    fn start(path: &Path) -> Result<Busy, Fault> {
        let mut command = Command::new(std::env::current_exe()?);
        Ok(Busy(command.arg(path).args(["--measure", "spin"]).stdout(Stdio::null()).spawn()?))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// 50 tools of five parameters, about 9,400 tokens; the question differs from that of the process that stored the prefix.
const TOOLS: usize = 50;

/// New ids in each process.
fn fresh(n: usize) -> Vec<u32> {
    let mut state = cob::session::random_u64() | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1000 + (state >> 33) as u32 % 149_000
    };
    (0..n).map(|_| next()).collect()
}

fn backend(threads: usize) -> Backend {
    let mut backend = Backend::cpu();
    if let Backend::Cpu { threads: of_backend, .. } = &mut backend {
        *of_backend = threads;
    }
    backend
}

/// As [`run`], greedy and to the end.
fn request(engine: &Engine, prompt: Vec<u32>, pinned: usize, mask: Box<dyn Mask>, tokens: usize) -> (f64, Report) {
    run(engine, Request { pinned, mask, ..Request::greedy(prompt, tokens) })
}

/// Runs a request; the seconds until the first token, and the report.
fn run(engine: &Engine, request: Request) -> (f64, Report) {
    let begin = Instant::now();
    let mut first = None;
    let mut events = engine.submit(request);
    loop {
        match events.blocking_recv() {
            Some(Event::Token { .. }) => {
                first.get_or_insert_with(|| begin.elapsed().as_secs_f64());
            }
            Some(Event::Finished(report)) => return (first.unwrap_or_default(), report),
            Some(Event::Failed(failure)) => panic!("{failure:?}"),
            Some(_) => {}
            None => panic!("the engine ended"),
        }
    }
}

fn peak_bytes() -> Result<u64, Fault> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM")).ok_or("no VmHWM here")?;
    let kib: u64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kib * 1024)
}

/// One figure, in a process of its own: a line of JSON, preceded by `first` when the first token is there.
fn measure(what: &str, path: &Path, a: &Arguments) -> Result<Value, Fault> {
    let mut words = what.split(' ');
    let kind = words.next().unwrap_or_default();
    let numbers: Vec<usize> = words.map(str::parse).collect::<Result<_, _>>()?;
    if let "memory-tools" | "tools" = kind {
        return with_tools(path, a, kind);
    }
    if kind == "spin" {
        // Whoever started it ends it; one that was left behind ends by itself.
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(600) {
            std::hint::spin_loop();
        }
        return Ok(Value::Null);
    }
    if kind == "batch" {
        return batched(path, a, numbers.first().copied().unwrap_or(1));
    }
    if let "copying" | "free" = kind {
        return with_drafts(path, a, kind == "copying");
    }
    let model = Model::open(path, backend(a.threads), KvType::F16)?;
    let engine =
        Engine::start(model, Settings { context_tokens: 8192, cache_bytes: 64 << 20, store: None, drafts: false })?;
    let run = |tokens: usize, out: usize| {
        engine
            .run(Request::greedy(fresh(tokens), out))
            .map(|report| report.usage)
            .map_err(|failure| format!("{failure:?}"))
    };
    Ok(match (kind, &numbers[..]) {
        ("prefill", &[tokens]) => {
            run(32, 1)?;
            let usage = run(tokens, 1)?;
            json!(usage.prefilled_tokens as f64 * 1e3 / usage.prefill_ms)
        }
        ("decode", &[depth, tokens]) => {
            // The first token's logits come from the prefill.
            let usage = run(depth, tokens + 1)?;
            json!(tokens as f64 * 1e3 / usage.decode_ms)
        }
        ("start", &[tokens]) => {
            run(tokens, 1)?;
            println!("first");
            json!(0)
        }
        ("memory", &[tokens]) => {
            run(tokens, 1)?;
            json!(peak_bytes()?)
        }
        _ => return Err(format!("nothing is known of {what}").into()),
    })
}

/// The prompt of many tools, with grammar, store and cache as `cob run` has them.
fn with_tools(path: &Path, a: &Arguments, kind: &str) -> Result<Value, Fault> {
    let store = a.store.clone().map(|dir| Store { dir, bytes_max: 4 << 30 });
    let options = Options {
        backend: backend(a.threads),
        kv_type: KvType::F16,
        context_tokens: 16_384,
        cache_bytes: 1 << 30,
        store,
        drafts: true,
        id: "compare".into(),
        digest: "compare".into(),
    };
    let qwen = Qwen::open(path, options)?;
    let warming = qwen.format().grammars.clone();
    let warm = std::thread::spawn(move || warming.warm());
    let tools = common::tools(TOOLS);
    let format = qwen.format();
    let ask = |question: String, tokens: usize| -> Result<(f64, Report, Vec<u32>), Fault> {
        let prompt = format.prompt(&[Message::User { text: question }], &tools)?;
        let grammar = format.grammars.compile(&tools);
        let mask = CallMask::new(format.grammars.clone(), grammar, ToolChoice::Auto, true)?;
        let (first, report) = request(qwen.engine(), prompt.ids.clone(), prompt.pinned, Box::new(mask), tokens);
        Ok((first, report, prompt.ids))
    };
    let number = cob::session::random_u64();
    let question = format!("Which tickets of today mention the number {number} in their title?");
    let (_, report, ids) = ask(question.clone(), 1)?;
    println!("first");
    if kind == "memory-tools" {
        ask(format!("And {number}?"), 32)?;
        let _ = warm.join();
        return Ok(json!(peak_bytes()?));
    }
    let (again, same, _) = ask(question, 1)?;
    let (next, other, _) =
        ask(format!("Whose are the {} tickets that were closed in the last week?", number % 1000), 1)?;
    let _ = warm.join();
    Ok(json!({
        "prompt_tokens": ids.len(),
        "restored_tokens": report.usage.restored_tokens,
        "first_token_ms": report.usage.prefill_ms,
        "all_but_one_ms": again * 1e3,
        "all_but_one_prefilled": same.usage.prefilled_tokens,
        "new_question_ms": next * 1e3,
        "new_question_prefilled": other.usage.prefilled_tokens,
        "ids": ids,
    }))
}

/// Tokens a second of so many sequences that are decoded together, and of the same one after another, and whether the outputs agree.
/// Their prompts are in the cache in both cases.
fn batched(path: &Path, a: &Arguments, sequences: usize) -> Result<Value, Fault> {
    let model = Model::open(path, backend(a.threads), KvType::F16)?;
    let settings = Settings { context_tokens: 4096, cache_bytes: 1 << 30, store: None, drafts: false };
    let engine = Engine::start(model, settings)?;
    let prompts: Vec<Vec<u32>> = (0..sequences).map(|_| fresh(100)).collect();
    for prompt in &prompts {
        request(&engine, prompt.clone(), 0, Box::new(cob::engine::Unmasked), 1);
    }
    let ask = |prompt: &Vec<u32>| engine.submit(Request::greedy(prompt.clone(), 96));
    let finish = |mut events: tokio::sync::mpsc::UnboundedReceiver<Event>| loop {
        match events.blocking_recv() {
            Some(Event::Finished(report)) => return report.ids,
            Some(Event::Failed(failure)) => panic!("{failure:?}"),
            Some(_) => {}
            None => panic!("the engine ended"),
        }
    };
    let begin = Instant::now();
    let running: Vec<_> = prompts.iter().map(ask).collect();
    let together: Vec<Vec<u32>> = running.into_iter().map(finish).collect();
    let together_s = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    let single: Vec<Vec<u32>> = prompts.iter().map(|prompt| finish(ask(prompt))).collect();
    let single_s = begin.elapsed().as_secs_f64();
    let tokens: usize = single.iter().map(Vec::len).sum();
    Ok(json!({
        "sequences": sequences,
        "together_tokens_per_s": tokens as f64 / together_s,
        "single_tokens_per_s": tokens as f64 / single_s,
        "same": together == single,
    }))
}

/// Decode with drafts and without: an edit of a text that is quoted, or a story. Tokens a second, and whether the outputs agree.
fn with_drafts(path: &Path, a: &Arguments, copying: bool) -> Result<Value, Fault> {
    let format = ChatFormat::open(path, None)?;
    let number = cob::session::random_u64() % 9000 + 1000;
    let functions = ["read", "write", "open", "close", "seek", "flush"].map(|name| {
        format!("pub fn {name}_file(path: &Path, limit: usize) -> io::Result<usize> {{\n    let file = File::options().{name}(true).open(path)?;\n    let count = handle_{name}(file, limit + {number})?;\n    Ok(count)\n}}\n")
    });
    let question = match copying {
        true => format!(
            "In this file rename the parameter `limit` to `bytes_max` and print the whole file again, nothing else:\n```rust\n{}```",
            functions.join("\n")
        ),
        false => format!("Tell a long story about a small horse, a cart and the number {number}."),
    };
    let prompt = format.prompt(&[Message::User { text: question }], &[])?;
    let mut rates = Vec::new();
    let mut outputs = Vec::new();
    for drafts in [true, false] {
        let model = Model::open(path, backend(a.threads), KvType::F16)?;
        let settings = Settings { context_tokens: 4096, cache_bytes: 64 << 20, store: None, drafts };
        let engine = Engine::start(model, settings)?;
        let mut request = Request::greedy(prompt.ids.clone(), 400);
        request.stop_ids = format.grammars.stop_ids();
        if !copying {
            // A small model that is greedy goes round in circles, which is easily guessed.
            request.sampling = Sampling { temperature: 0.7, seed: number, ..Sampling::qwen() };
        }
        let (_, report) = run(&engine, request);
        rates.push(report.ids.len() as f64 * 1e3 / report.usage.decode_ms);
        outputs.push(report);
    }
    let [on, off] = &outputs[..] else { return Err("two outputs".into()) };
    Ok(json!({
        "tokens": on.ids.len(),
        "drafts_tokens_per_s": rates[0],
        "plain_tokens_per_s": rates[1],
        "drafted": on.usage.drafted_tokens,
        "accepted": on.usage.accepted_tokens,
        "same": on.ids == off.ids,
    }))
}

/// Starts a measurement of ours; the figure, and the seconds from the start of the process to its first token.
fn ours(a: &Arguments, path: &Path, what: &str, store: Option<&Path>) -> Result<(Value, f64), Fault> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(path).args(["--threads", &a.threads.to_string(), "--measure", what]);
    if let Some(store) = store {
        command.arg("--store").arg(store);
    }
    let begin = Instant::now();
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let out = child.stdout.take().ok_or("no output")?;
    let (mut first, mut last) = (Duration::ZERO, String::new());
    for line in BufReader::new(out).lines() {
        let line = line?;
        if line == "first" {
            first = begin.elapsed();
        } else {
            last = line;
        }
    }
    if !child.wait()?.success() {
        return Err(format!("the measurement `{what}` failed").into());
    }
    Ok((serde_json::from_str(&last)?, first.as_secs_f64()))
}

/// A measurement of llama.cpp.
fn theirs(a: &Arguments, python: &str, path: &Path, what: &[&str]) -> Result<Value, Fault> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/peer.py");
    let threads = a.threads.to_string();
    let done = Command::new(python).arg(script).arg(path).args(["--threads", &threads]).args(what).output()?;
    if !done.status.success() {
        return Err(format!("{python} scripts/peer.py failed: {}", String::from_utf8_lossy(&done.stderr)).into());
    }
    Ok(serde_json::from_slice(&done.stdout)?)
}

fn median(mut of: Vec<f64>) -> Option<f64> {
    of.sort_by(f64::total_cmp);
    of.get(of.len() / 2).copied()
}

fn main() -> Result<(), Fault> {
    let a = Arguments::parse();
    let path = match Path::new(&a.model) {
        path if path.exists() => path.to_owned(),
        _ => Hub::new(HubSettings::from_env()?).installed(&a.model)?.path,
    };
    if let Some(what) = &a.measure {
        println!("{}", measure(what, &path, &a)?);
        return Ok(());
    }
    let python = std::env::var("COB_PEER_PYTHON").ok().filter(|python| !python.is_empty());
    if python.is_none() {
        eprintln!("COB_PEER_PYTHON is not set: only cob's side is measured");
    }
    let file_bytes = std::fs::metadata(&path)?.len() as f64;
    let larger = usize::from(file_bytes > 600e6);
    let mut results = serde_json::Map::new();
    let wanted = |name: &str| a.only.is_empty() || a.only.iter().any(|only| only == name);
    if !a.json {
        println!("{:<16} {:>12} {:>12} {:>8}  goal", "", "cob", "llama.cpp", "ratio");
    }
    for row in ROWS.iter().filter(|row| wanted(row.name)) {
        let (mut mine, mut peers, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let _busy = if row.busy { Some(Busy::start(&path)?) } else { None };
        let mut rounds = a.rounds;
        if row.kind == Kind::Seconds {
            // Short and noisy: more of them, after one that brings the file and the memory back.
            rounds = (2 * a.rounds).max(5);
            ours(&a, &path, row.ours, None)?;
        }
        for _ in 0..rounds {
            let (figure, first) = ours(&a, &path, row.ours, None)?;
            let figure = if row.kind == Kind::Seconds { first } else { figure.as_f64().ok_or("no figure")? };
            mine.push(figure);
            if let (Some(python), [_, ..]) = (&python, row.theirs) {
                let answer = theirs(&a, python, &path, row.theirs)?;
                let key = match row.kind {
                    Kind::Rate => "tokens_per_s",
                    Kind::Seconds => "seconds",
                    Kind::Bytes => "peak_bytes",
                };
                let figure = answer[key].as_f64().ok_or("no figure of the peer")?;
                peers.push(figure);
                ratios.push(mine[mine.len() - 1] / figure);
            }
        }
        if row.kind == Kind::Bytes {
            ratios = mine.iter().map(|bytes| bytes / file_bytes).collect();
        }
        let shown = |value: Option<f64>| match (value, row.kind) {
            (None, _) => "–".to_owned(),
            (Some(value), Kind::Rate) => format!("{value:.1} tok/s"),
            (Some(value), Kind::Seconds) => format!("{:.0} ms", value * 1e3),
            (Some(value), Kind::Bytes) => format!("{:.0} MB", value / 1e6),
        };
        let (our, their, ratio) = (median(mine.clone()), median(peers.clone()), median(ratios.clone()));
        if !a.json {
            let ratio = ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
            println!("{:<16} {:>12} {:>12} {:>8}  {}", row.name, shown(our), shown(their), ratio, row.goals[larger]);
        }
        let all = json!({"cob": mine, "llama_cpp": peers, "ratios": ratios, "median_ratio": ratio, "goal": row.goals[larger]});
        results.insert(row.name.into(), all);
    }
    if wanted("tools") {
        let folder = tempfile::tempdir()?;
        let (cold, cold_start) = ours(&a, &path, "tools", Some(folder.path()))?;
        let mut starts = Vec::new();
        let mut warm = Value::Null;
        for _ in 0..a.rounds {
            let (figures, start) = ours(&a, &path, "tools", Some(folder.path()))?;
            warm = figures;
            starts.push(start);
        }
        let peer = match &python {
            Some(python) => {
                let file = folder.path().join("ids.json");
                std::fs::write(&file, cold["ids"].to_string())?;
                let answer = theirs(&a, python, &path, &["ids", &file.display().to_string()])?;
                answer["tokens_per_s"].as_f64().map(|rate| cold["prompt_tokens"].as_f64().unwrap_or(0.0) / rate)
            }
            None => None,
        };
        let start = median(starts.clone());
        if !a.json {
            let ms = |value: &Value| value.as_f64().map_or("–".to_owned(), |ms| format!("{ms:.0} ms"));
            println!(
                "\n{TOOLS} tools, {} tokens of prompt; llama.cpp reads them in {}",
                cold["prompt_tokens"],
                peer.map_or("–".to_owned(), |s| format!("{s:.1} s"))
            );
            println!("first process, start to first token     {cold_start:>8.2} s");
            println!("second process, from disk               {:>8.2} s   ≤ 1.2 s", start.unwrap_or_default());
            println!("in one process, all but one cached      {:>10}   ≤ 60 ms", ms(&warm["all_but_one_ms"]));
            println!("in one process, a new question          {:>10}   ≤ 250 ms", ms(&warm["new_question_ms"]));
        }
        warm.as_object_mut().and_then(|figures| figures.remove("ids"));
        results.insert("tools".into(), json!({"first_process_s": cold_start, "second_process_s": starts, "warm": warm, "llama_cpp_prompt_s": peer}));
    }
    // Pairs of ours: what an improvement does, and that it changes nothing.
    for (name, what, goal, with, without) in [
        ("drafts-copying", "copying", "≥ 1.5", "drafts", "plain"),
        ("drafts-free", "free", "≥ 0.97", "drafts", "plain"),
        ("batch-4", "batch 4", "≥ 2", "together", "single"),
        ("batch-8", "batch 8", "", "together", "single"),
    ] {
        if !wanted(name) {
            continue;
        }
        let runs = (0..a.rounds).map(|_| ours(&a, &path, what, None).map(|(figures, _)| figures));
        let runs: Vec<Value> = runs.collect::<Result<_, _>>()?;
        let rate = |run: &Value, of: &str| run[format!("{of}_tokens_per_s")].as_f64();
        let of = |of: &str| median(runs.iter().filter_map(|run| rate(run, of)).collect()).unwrap_or_default();
        let ratio = |run: &Value| Some(rate(run, with)? / rate(run, without)?);
        let ratio = median(runs.iter().filter_map(ratio).collect()).unwrap_or_default();
        if runs.iter().any(|run| run["same"] != true) {
            return Err(format!("{name}: the outputs differ").into());
        }
        if !a.json {
            println!(
                "{name:<16} {:>6.1} tok/s {with}, {:>6.1} {without}, ratio {ratio:.2}  {goal}",
                of(with),
                of(without)
            );
        }
        results.insert(name.into(), json!({"runs": runs, "median_ratio": ratio, "goal": goal}));
    }
    if a.json {
        println!("{}", Value::Object(results));
    }
    Ok(())
}
