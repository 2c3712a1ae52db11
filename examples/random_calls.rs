//! Makes calls that a hot sampler writes inside the grammar, and checks each as an outsider would: it parses, its name is offered, and
//! a JSON Schema validator accepts its arguments. `scripts/random_calls.sh` runs it.
//!
//! Ten random sets of tools (nested objects, arrays, enums, patterns, bounds, non-Latin names and values), calls required,
//! temperature 1.5 with no cut, another seed for each completion. A call that the output limit cut is none and is counted apart.

use clap::Parser;
use cob::chat::qwen::{Options, Qwen};
use cob::chat::{CompletionRequest, LanguageModel};
use cob::hub::{Hub, HubSettings};
use cob::message::{FinishReason, Message, Sampling, ToolChoice, ToolSpec};
use cob::model::{Backend, KvType};
use serde_json::{Map, Value, json};

#[derive(Parser)]
#[command(about = "Checks calls that are written at random inside the grammar")]
struct Arguments {
    /// An id (`cob model list`), or a GGUF file.
    #[arg(long, default_value = "qwen2.5-coder-0.5b-instruct-q4_k_m")]
    model: String,
    /// Complete calls to make.
    #[arg(long, default_value_t = 1000)]
    calls: usize,
    #[arg(long, default_value_t = 1.5)]
    temperature: f64,
    /// Of the first completion; the others count up.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// SplitMix64: the same sets on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }
}

const NAMES: &[&str] = &["query", "thành_phố", "count", "時刻", "tags", "owner", "giá", "note", "адрес", "unit"];
const VALUES: &[&str] = &["Hà Nội", "Đà Nẵng", "東京", "Санкт-Петербург", "Zürich", "🐎", "a\"b", "new\nline"];
const PATTERNS: &[&str] = &["^[A-Z]{2}-[0-9]{3}$", "^(mưa|nắng|gió)-[a-z]{1,6}$", "^#[0-9a-f]{6}$", "^[ă-ỹ]{1,4}$"];

fn schema(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 6 } else { 8 }) {
        0 => json!({"type": "string", "maxLength": 12}),
        1 => json!({"type": "string", "pattern": random.pick(PATTERNS)}),
        2 => json!({"enum": [random.pick(VALUES), random.pick(NAMES), random.below(100)]}),
        3 => json!({"type": "integer", "minimum": random.below(10), "maximum": 10 + random.below(1000)}),
        4 => json!({"type": "number"}),
        5 => json!({"type": ["boolean", "null"]}),
        6 => json!({"type": "array", "items": schema(random, depth - 1), "maxItems": 3}),
        _ => object(random, depth - 1),
    }
}

fn object(random: &mut Random, depth: usize) -> Value {
    let mut properties = Map::new();
    for _ in 0..1 + random.below(4) {
        properties.insert(random.pick(NAMES).to_owned(), schema(random, depth));
    }
    let required: Vec<String> = properties.keys().filter(|_| random.below(2) == 0).cloned().collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn tools(random: &mut Random) -> Vec<ToolSpec> {
    let tool = |(n, random): (usize, &mut Random)| ToolSpec {
        name: format!("{}_{n}", random.pick(&["find", "tìm", "set.value", "送信"])),
        description: format!("Handles {}.", random.pick(VALUES)),
        parameters: object(random, 2),
    };
    (0..1 + random.below(5)).map(|n| tool((n, random))).collect()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let a = Arguments::parse();
    let hub = Hub::new(HubSettings::from_env()?);
    let path = hub.installed(&a.model)?.path;
    let options = Options {
        backend: Backend::cpu(),
        kv_type: KvType::F16,
        context_tokens: 8192,
        cache_bytes: 256 << 20,
        store: None,
        drafts: true,
        id: a.model.clone(),
        digest: String::new(),
    };
    let model = Qwen::open(&path, options)?;
    let mut random = Random(7);
    let sets: Vec<Vec<ToolSpec>> = (0..10).map(|_| tools(&mut random)).collect();
    let (mut complete, mut cut, mut faults, mut distinct) = (0, 0, 0, std::collections::HashSet::new());
    let mut seed = a.seed;
    while complete < a.calls {
        let set = &sets[seed as usize % sets.len()];
        let request = CompletionRequest {
            messages: vec![Message::User { text: format!("Gọi một công cụ. Call any tool. ({})", seed % 7) }],
            tools: set.clone(),
            tool_choice: ToolChoice::Required,
            withheld: Vec::new(),
            prose: false,
            routing: false,
            optional_margin: 0.0,
            sampling: Sampling { temperature: a.temperature, seed, ..Sampling::default() },
            max_output_tokens: 400,
            rescue: true,
            cancel: Default::default(),
        };
        let done = model.complete(request, &mut |_| {}).await.map_err(|e| e.to_string())?;
        seed += 1;
        cut += usize::from(done.finish == FinishReason::Length);
        for call in &done.message.calls {
            complete += 1;
            distinct.insert(format!("{} {}", call.name, call.arguments));
            let fault = match set.iter().find(|tool| tool.name == call.name) {
                None => Some("its name is not offered".to_owned()),
                Some(tool) => {
                    let validator = jsonschema::validator_for(&tool.parameters)?;
                    validator.validate(&call.arguments).err().map(|error| error.to_string())
                }
            };
            if let Some(fault) = fault {
                faults += 1;
                eprintln!("seed {}: {} {}: {fault}", seed - 1, call.name, call.arguments);
            }
        }
        if done.message.calls.is_empty() && done.finish != FinishReason::Length {
            faults += 1;
            eprintln!("seed {}: no call, though one is required: {:?}", seed - 1, done.message.text);
        }
    }
    println!(
        "{complete} complete calls ({} distinct) in {} completions at temperature {}, {cut} cut by the limit, {faults} faults",
        distinct.len(),
        seed - a.seed,
        a.temperature
    );
    if faults > 0 { Err("a call was not what the grammar allows".into()) } else { Ok(()) }
}
