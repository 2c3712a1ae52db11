//! What tools and skills cost in prefill: tokens and milliseconds; nothing known, the prefix in memory, the prefix on disk; schemas
//! spaced as the template writes them, and compact. Through the engine that `cob run` uses. `cargo bench --bench prefill_cost -- --quick`.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use cob::chat::qwen::ChatFormat;
use cob::chat::template::Prompt;
use cob::engine::store::{self, StoreSettings};
use cob::engine::{Engine, Request, Settings};
use cob::message::{Message, Usage};
use cob::model::{Backend, KvType, Model};
use criterion::{BenchmarkId, Criterion};

/// What is in a prompt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    tools: usize,
    skills: usize,
    /// No spaces behind `,` and `:` of the schemas. The models were not trained on it; here only its speed counts.
    compact: bool,
}

const fn case(tools: usize, skills: usize, compact: bool) -> Case {
    Case { tools, skills, compact }
}

const CASES: [Case; 14] = [
    case(0, 0, false),
    case(1, 0, false),
    case(1, 0, true),
    case(2, 0, false),
    case(5, 0, false),
    case(10, 0, false),
    case(10, 0, true),
    case(20, 0, false),
    case(50, 0, false),
    case(50, 0, true),
    case(0, 1, false),
    case(0, 2, false),
    case(0, 5, false),
    case(0, 10, false),
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let schemas = if self.compact { ", compact" } else { "" };
        write!(f, "{} tools, {} skills{schemas}", self.tools, self.skills)
    }
}

/// What is known of a prompt before it is read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Known {
    Nothing,
    InMemory,
    OnDisk,
}

impl Known {
    const fn name(self) -> &'static str {
        match self {
            Known::Nothing => "cold",
            Known::InMemory => "memory",
            Known::OnDisk => "disk",
        }
    }
}

/// Ids of a prompt, and how many of them make its system turn. For the random model, whose words are made up, ids of the number that the
/// real one has.
fn prompt(format: Option<&ChatFormat>, case: Case, question: &str) -> (Vec<u32>, usize) {
    let lines: String = (0..case.skills).map(common::skill_line).collect();
    let skills = if lines.is_empty() { lines } else { format!("\n\nSkills:\n{lines}") };
    let system = format!("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.{skills}");
    match format {
        Some(format) => {
            let messages = [Message::System { text: system }, Message::User { text: question.into() }];
            let prompt = format.prompt(&messages, &common::tools(case.tools)).expect("the prompt renders");
            if case.compact { compacted(format, &prompt) } else { (prompt.ids, prompt.pinned) }
        }
        None => {
            let tool = if case.compact { 137 } else { 186 };
            let pinned = 22 + if case.tools > 0 { 77 + tool * case.tools } else { 0 } + 45 * case.skills;
            let seed = question.bytes().map(u32::from).sum::<u32>();
            let id = |i: usize| if i < pinned { (i * 7919 + 13) as u32 } else { i as u32 * 101 + seed };
            ((0..pinned + 20).map(|i| id(i) % 150_000).collect(), pinned)
        }
    }
}

/// The same prompt with its schemas compact.
fn compacted(format: &ChatFormat, prompt: &Prompt) -> (Vec<u32>, usize) {
    let tokenizer = format.template.tokenizer();
    let (mut ids, mut pinned) = (Vec::new(), prompt.pinned);
    for (name, range) in &prompt.segments {
        let of = &prompt.ids[range.clone()];
        if !name.starts_with("tool:") {
            ids.extend(of);
            continue;
        }
        let text = String::from_utf8(tokenizer.decode(of)).expect("a tool is text");
        let start = text.find('{').expect("a tool is an object");
        let end = text.rfind('}').expect("a tool is an object") + 1;
        let schema: serde_json::Value = serde_json::from_str(&text[start..end]).expect("a tool is JSON");
        let compact = tokenizer.encode_text(&format!("{}{schema}{}", &text[..start], &text[end..]));
        pinned = pinned + compact.len() - of.len();
        ids.extend(compact);
    }
    (ids, pinned)
}

fn prefill(engine: &Engine, (prompt, pinned): (Vec<u32>, usize)) -> Usage {
    engine.run(Request { pinned, ..Request::greedy(prompt, 0) }).expect("the prompt is read").usage
}

/// Until the prefix of so many tokens is on disk.
fn wait_for(folder: &Path, tokens: usize) {
    for _ in 0..2000 {
        let (entries, _) = store::list(folder).expect("the folder can be read");
        if entries.iter().any(|entry| entry.tokens == tokens) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("a prefix of {tokens} tokens was not written to {}", folder.display());
}

/// Tokens, tokens prefilled, milliseconds of each run.
type Seen = BTreeMap<(Case, Known), (usize, usize, Vec<f64>)>;

/// A shorter prefix is not kept on disk.
const STORED_TOKENS_MIN: usize = 64;

fn main() {
    let (path, random) = common::model();
    let format = random.is_none().then(|| ChatFormat::open(&path, None).expect("the tokenizer loads"));
    let model = Model::open(&path, Backend::cpu(), KvType::F16).expect("the model loads");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    let kept = StoreSettings {
        dir: folder.to_owned(),
        fingerprint: [0; 32],
        bytes_max: 4 << 30,
        tokens_min: STORED_TOKENS_MIN,
    };
    let settings = Settings { context_tokens: 32_768, cache_bytes: 1 << 30, store: Some(kept), drafts: true };
    let engine = Engine::start(model, settings).unwrap();
    let seen: RefCell<Seen> = RefCell::default();
    let mut criterion =
        Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(1)).configure_from_args();
    let mut group = criterion.benchmark_group("prefill");
    let mut run = 0;
    for case in CASES {
        let (_, pinned) = prompt(format.as_ref(), case, "");
        let is_kept = pinned >= STORED_TOKENS_MIN;
        // The cold runs leave the prefix in memory and on disk for the others.
        for known in [Known::Nothing, Known::InMemory, Known::OnDisk] {
            if known == Known::OnDisk && !is_kept {
                continue;
            }
            group.bench_function(BenchmarkId::new(known.name(), case), |b| {
                b.iter_custom(|n| {
                    let mut total = Duration::ZERO;
                    for _ in 0..n {
                        run += 1;
                        if known == Known::Nothing {
                            engine.clear_cache();
                            engine.cache_stats();
                            store::clear(folder).expect("the folder can be emptied");
                        } else {
                            prefill(&engine, prompt(format.as_ref(), case, "Which tickets mention a cache?"));
                        }
                        if known == Known::OnDisk {
                            wait_for(folder, pinned);
                            engine.clear_cache();
                        }
                        // The question is new each time.
                        let question = format!("Question {run}: which open tickets are about the login page?");
                        let usage = prefill(&engine, prompt(format.as_ref(), case, &question));
                        if is_kept {
                            wait_for(folder, pinned);
                        }
                        match known {
                            Known::Nothing => assert_eq!(usage.prefilled_tokens, usage.prompt_tokens),
                            Known::InMemory => assert!(usage.cached_tokens >= pinned && usage.restored_tokens == 0),
                            Known::OnDisk => assert_eq!(usage.restored_tokens, pinned),
                        }
                        total += Duration::from_secs_f64(usage.prefill_ms / 1e3);
                        let mut seen = seen.borrow_mut();
                        let entry = seen.entry((case, known)).or_default();
                        (entry.0, entry.1) = (usage.prompt_tokens, usage.prefilled_tokens);
                        entry.2.push(usage.prefill_ms);
                    }
                    total
                })
            });
        }
    }
    group.finish();
    print_table(&seen.into_inner());
    criterion.final_summary();
}

fn print_table(seen: &Seen) {
    let median = |case: Case, known: Known| {
        let (tokens, prefilled, ms) = seen.get(&(case, known))?;
        let mut ms = ms.clone();
        ms.sort_by(f64::total_cmp);
        Some((*tokens, *prefilled, ms[ms.len() / 2]))
    };
    println!(
        "\n{:>5} {:>6} {:>7} {:>7} {:>10} {:>10} {:>10} {:>9}",
        "tools", "skills", "schemas", "tokens", "cold ms", "memory ms", "disk ms", "evaluated"
    );
    for case in CASES {
        let Some((tokens, _, cold_ms)) = median(case, Known::Nothing) else { continue };
        let ms = |known: Known| median(case, known).map_or("-".to_owned(), |(_, _, ms)| format!("{ms:.1}"));
        let evaluated = median(case, Known::InMemory).map_or(0, |(_, prefilled, _)| prefilled);
        let (in_memory, on_disk) = (ms(Known::InMemory), ms(Known::OnDisk));
        let schemas = if case.compact { "compact" } else { "spaced" };
        println!(
            "{:>5} {:>6} {schemas:>7} {tokens:>7} {cold_ms:>10.1} {in_memory:>10} {on_disk:>10} {evaluated:>9}",
            case.tools, case.skills
        );
    }
    for (what, from, to, n) in [
        ("one more tool", case(1, 0, false), case(2, 0, false), 1),
        ("one of 50 tools", case(1, 0, false), case(50, 0, false), 49),
        ("one of 50 tools, compact", case(1, 0, true), case(50, 0, true), 49),
        ("one more skill", case(0, 1, false), case(0, 10, false), 9),
    ] {
        if let (Some(a), Some(b)) = (median(from, Known::Nothing), median(to, Known::Nothing)) {
            println!("{what}: {:.0} tokens, {:.1} ms", (b.0 - a.0) as f64 / n as f64, (b.2 - a.2) / n as f64);
        }
    }
}
