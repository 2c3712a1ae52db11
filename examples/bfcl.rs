//! Measures tool calling on files in the form of the Berkeley Function Calling Leaderboard; `scripts/bfcl.sh` runs it.
//!
//! Each case is one completion with the case's own tools, by the path that `cob run` takes; no tool is run. The schemas
//! are mapped to JSON Schema (`dict` → `object`, `float` → `number`, `tuple` → `array`, `any` → `{}`), and objects with
//! properties take no others.

use std::io::Write;
use std::path::PathBuf;

use clap::Parser;
use cob::agent::instruct;
use cob::chat::qwen::{Options, Qwen};
use cob::chat::{Completion, CompletionRequest, LanguageModel};
use cob::hub::{Hub, HubSettings};
use cob::message::{AssistantMessage, FinishReason, Habits, Message, Sampling, ToolCall, ToolChoice, ToolSpec, Usage};
use cob::model::{Backend, KvType};
use serde_json::{Map, Value, json};

#[derive(Parser)]
#[command(about = "Tool calling on a folder of BFCL files")]
struct Arguments {
    /// Folder of `*.jsonl`: `{id, question, function, ground_truth?}` a line.
    dir: PathBuf,
    /// An id (`cob model list`), a GGUF file, or a folder of safetensors.
    #[arg(long)]
    model: String,
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
    /// Leave calls in a foreign form as text.
    #[arg(long)]
    no_rescue: bool,
    /// Measure each case with the rescue and without it; the prompt is prefilled once.
    #[arg(long, conflicts_with = "no_rescue")]
    both: bool,
    /// Whether a reply begins with a routing line [default: what suits the model]
    #[arg(long)]
    routing: Option<bool>,
    /// In nats [default: what suits the model]
    #[arg(long)]
    optional_margin: Option<f32>,
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
    in_text: usize,
}

/// Whether a text holds a call as an object somewhere: what a reader without a grammar would make of it.
fn calls_in_text(text: &str, tools: &[ToolSpec]) -> bool {
    let objects = text.match_indices('{').filter_map(|(at, _)| {
        serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>().next().and_then(Result::ok)
    });
    objects.into_iter().any(|object| {
        let filled = object.get("arguments").or(object.get("parameters")).is_some_and(Value::is_object);
        filled && tools.iter().any(|tool| object["name"] == tool.name.as_str())
    })
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

impl Rates {
    fn add(&mut self, done: &Completion, tools: &[ToolSpec], truth: Option<&[Value]>) {
        let calls = &done.message.calls;
        self.cases += 1;
        self.called += !calls.is_empty() as usize;
        self.cut += (done.finish == FinishReason::Length) as usize;
        self.rescued += calls.iter().any(|c| c.rescued) as usize;
        self.in_text += (calls.is_empty() && calls_in_text(&done.message.text, tools)) as usize;
        for call in calls {
            self.emitted += 1;
            let valid = tools
                .iter()
                .find(|t| t.name == call.name)
                .is_some_and(|t| jsonschema::validator_for(&t.parameters).is_ok_and(|v| v.is_valid(&call.arguments)));
            self.valid += valid as usize;
        }
        if let Some(truth) = truth {
            let (tool, right) = grade(calls, truth);
            self.right_tool += tool as usize;
            self.right += right as usize;
        }
    }

    fn row(&self, graded: bool) -> Value {
        let rate = |n: usize, of: usize| if of == 0 { Value::Null } else { json!(n as f64 / of as f64) };
        let graded = |n: usize| if graded { rate(n, self.cases) } else { Value::Null };
        json!({
            "cases": self.cases, "calls": self.emitted, "schema_valid": rate(self.valid, self.emitted),
            "call_rate": rate(self.called, self.cases), "right_tool": graded(self.right_tool),
            "right": graded(self.right), "rescued": rate(self.rescued, self.cases),
            "no_call": rate(self.cases - self.called, self.cases), "in_text": rate(self.in_text, self.cases),
            "cut": self.cut,
        })
    }
}

fn print_row(name: &str, row: &Value) {
    let percent = |key: &str| row[key].as_f64().map_or("–".into(), |x| format!("{:.1}%", 100.0 * x));
    println!(
        "{name:<28} {:>5} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8}",
        row["cases"],
        percent("schema_valid"),
        percent("call_rate"),
        percent("right_tool"),
        percent("right"),
        percent("rescued"),
        percent("no_call"),
        percent("in_text"),
    );
}

fn tools(case: &Value) -> Vec<ToolSpec> {
    let functions = case["function"].as_array().into_iter().flatten();
    functions
        .map(|f| ToolSpec {
            name: f["name"].as_str().unwrap_or_default().into(),
            description: f["description"].as_str().unwrap_or_default().into(),
            parameters: schema(&f["parameters"]),
        })
        .collect()
}

/// The case's messages and the habits that go with them, as in `cob run`; a system prompt of the case's own is `--system`.
fn messages(case: &Value, tools: &[ToolSpec], habits: Habits) -> Option<(Vec<Message>, Habits)> {
    let text = |m: &Value| m["content"].as_str().unwrap_or_default().to_owned();
    let (system, users): (Vec<&Value>, Vec<&Value>) =
        case["question"][0].as_array()?.iter().partition(|m| m["role"] == "system");
    let given = system.into_iter().map(text).reduce(|all, next| all + "\n\n" + &next);
    let (system, habits) = instruct(given, tools, habits);
    let system = system.map(|text| Message::System { text });
    Some((system.into_iter().chain(users.into_iter().map(|m| Message::User { text: text(m) })).collect(), habits))
}

/// What `--out` gets for a case; with `--both` the line says which of the two it is.
fn out_line(id: &Value, done: &Completion, rescue: Option<bool>) -> Value {
    let calls: Vec<Value> =
        done.message.calls.iter().map(|c| json!({"name": c.name, "arguments": c.arguments})).collect();
    let rescued = done.message.calls.iter().any(|c| c.rescued);
    let mut line =
        json!({"id": id, "calls": calls, "text": done.message.text, "rescued": rescued, "ids": done.message.ids});
    if let Some(rescue) = rescue {
        line["rescue"] = json!(rescue);
    }
    line
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let a = Arguments::parse();
    let mut backend = Backend::cpu();
    if let (Backend::Cpu { threads, .. }, 1..) = (&mut backend, a.threads) {
        *threads = a.threads;
    }
    let hub = Hub::new(HubSettings::from_env()?);
    let found = hub.installed(&a.model)?;
    let of_model = found.habits();
    let habits = Habits {
        routing: a.routing.unwrap_or(of_model.routing),
        optional_margin: a.optional_margin.unwrap_or(of_model.optional_margin),
        ..of_model
    };
    let model = Qwen::open(
        &found.path,
        Options {
            backend,
            kv_type: KvType::F16,
            context_tokens: 32_768,
            cache_bytes: 64 << 20,
            store: None,
            drafts: true,
            id: found.id,
            digest: found.digest,
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
    let variants: &[bool] = match (a.both, a.no_rescue) {
        (true, _) => &[true, false],
        (false, no_rescue) => &[!no_rescue],
    };
    if !a.json {
        println!(
            "{:<28} {:>5} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8}",
            "file", "cases", "valid", "called", "tool", "right", "rescued", "no call", "in text"
        );
    }
    for path in files {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !a.only.is_empty() && !a.only.contains(&stem) {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let mut graded = true;
        let mut rates: Vec<Rates> = variants.iter().map(|_| Rates::default()).collect();
        for (n, line) in text.lines().enumerate().take(a.limit.unwrap_or(usize::MAX)) {
            if line.trim().is_empty() {
                continue;
            }
            let case: Value = serde_json::from_str(line).map_err(|e| format!("{}:{}: {e}", path.display(), n + 1))?;
            let tools = tools(&case);
            let (messages, habits) =
                messages(&case, &tools, habits).ok_or_else(|| format!("{}:{}: no question", path.display(), n + 1))?;
            let truth = case["ground_truth"].as_array();
            graded &= truth.is_some();
            for (rates, &rescue) in rates.iter_mut().zip(variants) {
                let request = CompletionRequest {
                    messages: messages.clone(),
                    tools: tools.clone(),
                    tool_choice: ToolChoice::Auto,
                    withheld: Vec::new(),
                    prose: false,
                    routing: habits.routing,
                    optional_margin: habits.optional_margin,
                    sampling: Sampling::default(),
                    max_output_tokens: a.max_output_tokens,
                    rescue,
                    cancel: Default::default(),
                };
                // A case that the model refuses (too long, no tool that can be called) is one without a call.
                let done = model.complete(request, &mut |_| {}).await.unwrap_or_else(|error| {
                    eprintln!("{}: no completion: {error}", case["id"]);
                    Completion {
                        message: AssistantMessage::default(),
                        finish: FinishReason::Stop,
                        usage: Usage::default(),
                        notes: Vec::new(),
                    }
                });
                for note in &done.notes {
                    eprintln!("{}: {note}", case["id"]);
                }
                rates.add(&done, &tools, truth.map(Vec::as_slice));
                if let Some(out) = &mut out {
                    writeln!(out, "{}", out_line(&case["id"], &done, a.both.then_some(rescue)))?;
                }
            }
        }
        for (rates, &rescue) in rates.iter().zip(variants) {
            let name = if a.both && !rescue { format!("{stem} no-rescue") } else { stem.clone() };
            let row = rates.row(graded);
            if !a.json {
                print_row(&name, &row);
            }
            summary.insert(name, row);
        }
    }
    if let Some(out) = &mut out {
        out.flush()?;
    }
    if a.json {
        println!("{}", Value::Object(summary));
    }
    Ok(())
}
