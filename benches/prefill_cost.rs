//! What tools and skills cost in prefill: tokens and milliseconds, cold and with the prefix cached, through the engine
//! that `cob run` uses. `cargo bench --bench prefill_cost -- --quick`.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use cob::chat::qwen::ChatFormat;
use cob::engine::{Engine, Request, Settings};
use cob::message::{Message, Usage};
use cob::model::{Backend, KvType, Model};
use criterion::{BenchmarkId, Criterion};

/// A prompt by what is in it. For the random model, whose words are made up, ids of the number that the real one has.
fn prompt(format: Option<&ChatFormat>, tools: usize, skills: usize, question: &str) -> (Vec<u32>, usize) {
    let system = match skills {
        0 => "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.".to_owned(),
        n => {
            let lines: String = (0..n).map(common::skill_line).collect();
            format!("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\nSkills:\n{lines}")
        }
    };
    match format {
        Some(format) => {
            let messages = [Message::System { text: system }, Message::User { text: question.into() }];
            let prompt = format.prompt(&messages, &common::tools(tools)).expect("the prompt renders");
            (prompt.ids, prompt.pinned)
        }
        None => {
            let pinned = 22 + if tools > 0 { 77 + 186 * tools } else { 0 } + 45 * skills;
            let seed = question.bytes().map(u32::from).sum::<u32>();
            let id = |i: usize| if i < pinned { (i * 7919 + 13) as u32 } else { i as u32 * 101 + seed };
            ((0..pinned + 20).map(|i| id(i) % 150_000).collect(), pinned)
        }
    }
}

fn prefill(engine: &Engine, (prompt, pinned): (Vec<u32>, usize)) -> Usage {
    engine.run(Request { pinned, ..Request::greedy(prompt, 0) }).expect("the prompt is read").usage
}

/// (tools, skills) → (tokens, prefilled, milliseconds of each run), cold and cached.
type Seen = BTreeMap<(usize, usize, bool), (usize, usize, Vec<f64>)>;

fn main() {
    let (path, random) = common::model();
    let format = random.is_none().then(|| ChatFormat::open(&path, None).expect("the tokenizer loads"));
    let model = Model::open(&path, Backend::cpu(), KvType::F16).expect("the model loads");
    let engine =
        Engine::start(model, Settings { context_tokens: 32_768, cache_bytes: 1 << 30, store: None, drafts: true })
            .unwrap();
    let seen: RefCell<Seen> = RefCell::default();
    let mut criterion =
        Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(1)).configure_from_args();
    let cases = [0, 1, 2, 5, 10, 20, 50].map(|tools| (tools, 0)).into_iter().chain([(0, 1), (0, 10)]);
    let mut group = criterion.benchmark_group("prefill");
    let mut run = 0;
    for (tools, skills) in cases {
        for cached in [false, true] {
            let name = format!("{tools} tools, {skills} skills");
            let id = BenchmarkId::new(if cached { "cached" } else { "cold" }, name);
            group.bench_function(id, |b| {
                b.iter_custom(|n| {
                    let mut total = Duration::ZERO;
                    for _ in 0..n {
                        run += 1;
                        if cached {
                            // The prefix is there; the question is new each time.
                            prefill(&engine, prompt(format.as_ref(), tools, skills, "Which tickets mention a cache?"));
                        } else {
                            engine.clear_cache();
                        }
                        let question = format!("Question {run}: which open tickets are about the login page?");
                        let usage = prefill(&engine, prompt(format.as_ref(), tools, skills, &question));
                        total += Duration::from_secs_f64(usage.prefill_ms / 1e3);
                        let mut seen = seen.borrow_mut();
                        let entry = seen.entry((tools, skills, cached)).or_default();
                        (entry.0, entry.1) = (usage.prompt_tokens, usage.prefilled_tokens);
                        entry.2.push(usage.prefill_ms);
                    }
                    total
                })
            });
        }
    }
    group.finish();
    print_table(&mut seen.into_inner());
    criterion.final_summary();
}

fn print_table(seen: &mut Seen) {
    let median = |xs: &mut Vec<f64>| {
        xs.sort_by(f64::total_cmp);
        xs.get(xs.len() / 2).copied().unwrap_or(f64::NAN)
    };
    println!(
        "\n{:>5} {:>6} {:>7} {:>10} {:>10} {:>10}",
        "tools", "skills", "tokens", "cold ms", "cached ms", "evaluated"
    );
    let keys: Vec<(usize, usize)> = seen.keys().filter(|k| !k.2).map(|k| (k.0, k.1)).collect();
    let mut cold = BTreeMap::new();
    for &(tools, skills) in &keys {
        let Some((tokens, _, mut ms)) = seen.get(&(tools, skills, false)).cloned() else { continue };
        let cold_ms = median(&mut ms);
        cold.insert((tools, skills), (tokens, cold_ms));
        let cached = seen.get_mut(&(tools, skills, true)).map(|c| (median(&mut c.2), c.1));
        let (cached_ms, evaluated) = cached.unwrap_or((f64::NAN, 0));
        println!("{tools:>5} {skills:>6} {tokens:>7} {cold_ms:>10.1} {cached_ms:>10.1} {evaluated:>10}");
    }
    for (what, from, to, n) in [
        ("one more tool", (1, 0), (2, 0), 1),
        ("one of 50 tools", (1, 0), (50, 0), 49),
        ("one more skill", (0, 1), (0, 10), 9),
    ] {
        if let (Some(a), Some(b)) = (cold.get(&from), cold.get(&to)) {
            println!("{what}: {:.0} tokens, {:.1} ms", (b.0 - a.0) as f64 / n as f64, (b.1 - a.1) / n as f64);
        }
    }
}
