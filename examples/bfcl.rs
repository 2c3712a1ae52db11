//! Measures tool calling on files in the form of the Berkeley Function Calling Leaderboard; `scripts/bfcl.sh` runs it.
//!
//! Each case is one completion with the case's own tools, by the path that `cob run` takes; no tool is run. The schemas
//! are mapped to JSON Schema (`dict` → `object`, `float` → `number`, `tuple` → `array`, `any` → `{}`), and objects with
//! properties take no others.

use std::io::Write;
use std::path::PathBuf;

use clap::Parser;
use cob::chat::qwen::{Options, Qwen};
use cob::chat::{CompletionRequest, LanguageModel};
use cob::message::{FinishReason, Message, Sampling, ToolCall, ToolChoice, ToolSpec};
use cob::model::{Backend, KvType};
use serde_json::{Map, Value, json};

#[derive(Parser)]
#[command(about = "Tool calling on a folder of BFCL files")]
struct Arguments {
    /// Folder of `*.jsonl`: `{id, question, function, ground_truth?}` a line.
    dir: PathBuf,
    /// A GGUF file, or a folder of safetensors.
    #[arg(long)]
    model: PathBuf,
    /// One JSON object in place of the table.
    #[arg(long)]
    json: bool,
    /// Gets `{id, calls, text, rescued, ids}` a case.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only these files (stems), by default all.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only the first N cases of each file.
    #[arg(long)]
    limit: Option<usize>,
    #[arg(long)]
    no_rescue: bool,
    #[arg(long, default_value_t = 512)]
    max_output_tokens: usize,
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// BFCL's schema as JSON Schema.
fn schema(value: &Value) -> Value {
    let Value::Object(object) = value else { return value.clone() };
    let mut out = Map::new();
    for (key, value) in object {
        match (key.as_str(), value) {
            ("type", Value::String(kind)) => match kind.as_str() {
                "any" => {}
                kind => {
                    let mapped = match kind {
                        "dict" => "object",
                        "float" | "double" => "number",
                        "tuple" | "list" => "array",
                        "bool" => "boolean",
                        "int" | "long" => "integer",
                        other => other,
                    };
                    out.insert(key.clone(), json!(mapped));
                }
            },
            ("properties", Value::Object(properties)) => {
                let properties: Map<_, _> = properties.iter().map(|(k, v)| (k.clone(), schema(v))).collect();
                out.insert(key.clone(), Value::Object(properties));
            }
            ("items" | "additionalProperties", value) => {
                out.insert(key.clone(), schema(value));
            }
            _ => {
                out.insert(key.clone(), value.clone());
            }
        }
    }
    if out.contains_key("properties") && !out.contains_key("additionalProperties") {
        out.insert("additionalProperties".into(), json!(false));
    }
    Value::Object(out)
}

fn plain(s: &str) -> String {
    s.chars().filter(|c| !" ,./-_*^".contains(*c)).flat_map(char::to_lowercase).collect::<String>().replace('\'', "\"")
}

/// Whether `value` is what `accepted` says; strings without case, spaces and punctuation.
fn same(value: &Value, accepted: &Value) -> bool {
    match (value, accepted) {
        (Value::String(a), Value::String(b)) => plain(a) == plain(b),
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        // The values of an accepted object are lists of what is accepted.
        (Value::Object(a), Value::Object(b)) => arguments_right(a, b),
        _ => value == accepted,
    }
}

fn arguments_right(given: &Map<String, Value>, accepted: &Map<String, Value>) -> bool {
    given.iter().all(|(name, value)| match accepted.get(name) {
        Some(Value::Array(options)) => options.iter().any(|option| same(value, option)),
        Some(other) => same(value, other),
        None => false,
    }) && accepted.iter().all(|(name, options)| {
        given.contains_key(name) || options.as_array().is_some_and(|options| options.iter().any(|o| o == ""))
    })
}

#[derive(Default)]
struct Rates {
    cases: usize,
    emitted: usize,
    valid: usize,
    called: usize,
    right_tool: usize,
    right: usize,
    rescued: usize,
    cut: usize,
}

/// Calls against the expected set: (tools right, arguments right).
fn grade(calls: &[ToolCall], truth: &[Value]) -> (bool, bool) {
    let expected: Vec<(&String, &Map<String, Value>)> = truth
        .iter()
        .filter_map(Value::as_object)
        .flatten()
        .filter_map(|(name, a)| Some((name, a.as_object()?)))
        .collect();
    let mut names: Vec<&String> = calls.iter().map(|c| &c.name).collect();
    let mut wanted: Vec<&String> = expected.iter().map(|(name, _)| *name).collect();
    names.sort();
    wanted.sort();
    let tools = names == wanted;
    let mut left: Vec<&ToolCall> = calls.iter().collect();
    let right = tools
        && expected.iter().all(|(name, accepted)| {
            let found = left.iter().position(|call| {
                call.name == **name && call.arguments.as_object().is_some_and(|a| arguments_right(a, accepted))
            });
            found.map(|i| left.remove(i)).is_some()
        });
    (tools, right)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let a = Arguments::parse();
    let mut backend = Backend::cpu();
    if let (Backend::Cpu { threads, .. }, 1..) = (&mut backend, a.threads) {
        *threads = a.threads;
    }
    let id = a.model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let model = Qwen::open(
        &a.model,
        Options {
            backend,
            kv_type: KvType::F16,
            context_tokens: 32_768,
            cache_bytes: 64 << 20,
            id,
            digest: String::new(),
        },
    )?;
    let mut out = match &a.out {
        Some(path) => Some(std::io::BufWriter::new(std::fs::File::create(path)?)),
        None => None,
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(&a.dir)?.filter_map(|e| Some(e.ok()?.path())).collect();
    files.retain(|p| p.extension().is_some_and(|e| e == "jsonl"));
    files.sort();
    let mut summary = Map::new();
    if !a.json {
        println!(
            "{:<18} {:>5} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7}",
            "file", "cases", "valid", "called", "tool", "right", "rescued", "no call"
        );
    }
    for path in files {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !a.only.is_empty() && !a.only.contains(&stem) {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let mut rates = Rates::default();
        let mut graded = true;
        for (n, line) in text.lines().enumerate().take(a.limit.unwrap_or(usize::MAX)) {
            let case: Value = serde_json::from_str(line).map_err(|e| format!("{}:{}: {e}", path.display(), n + 1))?;
            let turn =
                case["question"][0].as_array().ok_or_else(|| format!("{}:{}: no question", path.display(), n + 1))?;
            let mut messages: Vec<Message> = turn
                .iter()
                .map(|m| {
                    let text = m["content"].as_str().unwrap_or_default().to_owned();
                    if m["role"] == "system" { Message::System { text } } else { Message::User { text } }
                })
                .collect();
            if !matches!(messages.first(), Some(Message::System { .. })) {
                messages.insert(0, Message::System { text: cob::agent::SYSTEM.into() });
            }
            let tools: Vec<ToolSpec> = case["function"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|f| ToolSpec {
                    name: f["name"].as_str().unwrap_or_default().into(),
                    description: f["description"].as_str().unwrap_or_default().into(),
                    parameters: schema(&f["parameters"]),
                })
                .collect();
            let request = CompletionRequest {
                messages,
                tools: tools.clone(),
                tool_choice: ToolChoice::Auto,
                prose: false,
                sampling: Sampling::default(),
                max_output_tokens: a.max_output_tokens,
                rescue: !a.no_rescue,
                cancel: Default::default(),
            };
            let done = model.complete(request, &mut |_| {}).await.map_err(|e| format!("{}: {e}", case["id"]))?;
            for note in &done.notes {
                eprintln!("{}: {note}", case["id"]);
            }
            let calls = &done.message.calls;
            rates.cases += 1;
            rates.called += !calls.is_empty() as usize;
            rates.cut += (done.finish == FinishReason::Length) as usize;
            rates.rescued += calls.iter().any(|c| c.rescued) as usize;
            for call in calls {
                rates.emitted += 1;
                let valid = tools.iter().find(|t| t.name == call.name).is_some_and(|t| {
                    jsonschema::validator_for(&t.parameters).is_ok_and(|v| v.is_valid(&call.arguments))
                });
                rates.valid += valid as usize;
            }
            match case["ground_truth"].as_array() {
                Some(truth) => {
                    let (tool, right) = grade(calls, truth);
                    rates.right_tool += tool as usize;
                    rates.right += right as usize;
                }
                None => graded = false,
            }
            if let Some(out) = &mut out {
                let calls: Vec<Value> =
                    calls.iter().map(|c| json!({"name": c.name, "arguments": c.arguments})).collect();
                let rescued = done.message.calls.iter().any(|c| c.rescued);
                let (text, ids) = (&done.message.text, &done.message.ids);
                let line = json!({"id": case["id"], "calls": calls, "text": text, "rescued": rescued, "ids": ids});
                writeln!(out, "{line}")?;
            }
        }
        let r = &rates;
        let rate = |n: usize, of: usize| if of == 0 { Value::Null } else { json!(n as f64 / of as f64) };
        let graded = |n: usize| if graded { rate(n, r.cases) } else { Value::Null };
        let row = json!({
            "cases": r.cases, "calls": r.emitted, "schema_valid": rate(r.valid, r.emitted),
            "call_rate": rate(r.called, r.cases), "right_tool": graded(r.right_tool), "right": graded(r.right),
            "rescued": rate(r.rescued, r.cases), "no_call": rate(r.cases - r.called, r.cases), "cut": r.cut,
        });
        if !a.json {
            let percent = |v: &Value| v.as_f64().map_or("–".into(), |x| format!("{:.1}%", 100.0 * x));
            println!(
                "{:<18} {:>5} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7}",
                stem,
                r.cases,
                percent(&row["schema_valid"]),
                percent(&row["call_rate"]),
                percent(&row["right_tool"]),
                percent(&row["right"]),
                percent(&row["rescued"]),
                percent(&row["no_call"])
            );
        }
        summary.insert(stem, row);
    }
    if let Some(out) = &mut out {
        out.flush()?;
    }
    if a.json {
        println!("{}", Value::Object(summary));
    }
    Ok(())
}
