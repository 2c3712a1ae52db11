//! The words every room shares: messages, tool specifications, calls, results, stop reasons, usage.
//! Imports nothing of ours.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One message of a conversation, as the harness sees it; `chat` turns a list of them into token ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Message {
    System { text: String },
    User { text: String },
    Assistant(AssistantMessage),
    Tool(ToolResult),
}

/// What the model wrote in one step. All calls of one step stand in one message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AssistantMessage {
    /// The text outside calls.
    pub text: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<ToolCall>,
    /// The sampled and forced token ids, without the final `<|im_end|>`. They, not a re-encoding of `text`, are
    /// what the next prompt holds. `None` when a model that has no ids of ours wrote it (scripted, remote).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
}

/// A tool as the model is told of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    pub name: String,
    pub description: String,
    /// The JSON Schema of the arguments: an object schema.
    pub parameters: Value,
}

/// One call that the model made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Unique within the session, e.g. `call_7`.
    pub id: String,
    pub name: String,
    /// An object. A scripted or remote model can send something else (a string that is not JSON stays a
    /// `Value::String`): the loop answers that with an error result.
    pub arguments: Value,
    /// The model wrote it in a foreign form and the KV cache was rolled back to make it a real call.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rescued: bool,
}

/// The one result of one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    pub call_id: String,
    pub name: String,
    pub text: String,
    pub is_error: bool,
    /// Another call may lead further than this one did.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub led_nowhere: bool,
    /// A line of the harness that stands after this result, inside the same user turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reminder: Option<String>,
}

/// Which calls a completion may contain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoice {
    /// Text, calls, or both.
    #[default]
    Auto,
    /// At least one call and no text.
    Required,
    /// Text only; the calls are masked out.
    None,
    /// Exactly one call of this tool.
    Named(String),
}

/// Why one completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn.
    Stop,
    /// The output-token limit. A call cut by it is not a call.
    Length,
    Cancelled,
}

/// Why a task ended. Only [`StopReason::Answer`] is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    Answer,
    MaxTurns,
    MaxOutputTokens,
    Timeout,
    MaxRepeats,
    /// Ctrl-C.
    Interrupted,
    /// SIGTERM.
    Terminated,
    /// The prompt and the reserved output do not fit the context; refused before any work.
    ContextOverflow,
    /// The run was refused before or instead of work.
    Refused,
    Failed,
}

/// What completions cost. Sums over steps with [`Usage::add`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    /// Of the prompt: found in the prefix cache.
    pub cached_tokens: usize,
    /// Of the cached ones: kept on disk by an earlier process.
    #[serde(default)]
    pub restored_tokens: usize,
    /// Of the prompt: evaluated now. `cached + prefilled = prompt`.
    pub prefilled_tokens: usize,
    /// Of the output: forced by the grammar and prefilled as a batch.
    pub forced_tokens: usize,
    /// Of the output: sampled one by one.
    pub sampled_tokens: usize,
    /// Guessed from what stood there before …
    #[serde(default)]
    pub drafted_tokens: usize,
    /// … and of these: what was then sampled indeed, without a pass of its own.
    #[serde(default)]
    pub accepted_tokens: usize,
    pub prefill_ms: f64,
    pub decode_ms: f64,
    pub total_ms: f64,
    /// The peak.
    pub kv_bytes: u64,
}

impl Usage {
    /// Counts and milliseconds add up; `kv_bytes` is a peak.
    pub fn add(&mut self, other: &Usage) {
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.restored_tokens += other.restored_tokens;
        self.prefilled_tokens += other.prefilled_tokens;
        self.forced_tokens += other.forced_tokens;
        self.sampled_tokens += other.sampled_tokens;
        self.drafted_tokens += other.drafted_tokens;
        self.accepted_tokens += other.accepted_tokens;
        self.prefill_ms += other.prefill_ms;
        self.decode_ms += other.decode_ms;
        self.total_ms += other.total_ms;
        self.kv_bytes = self.kv_bytes.max(other.kv_bytes);
    }
}

/// How tokens are drawn. Temperature 0 is greedy, and then the rest is not used.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    pub temperature: f64,
    /// 0 means off.
    pub top_k: usize,
    /// 1.0 means off.
    pub top_p: f64,
    /// 0.0 means off.
    pub min_p: f64,
    /// 1.0 means off. Not applied inside a call: it would punish repeated quotes and copied arguments.
    pub repetition_penalty: f32,
    /// The temperature inside a call, whose names, paths and numbers are copied rather than invented; `None`: as outside.
    #[serde(default)]
    pub call_temperature: Option<f64>,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            call_temperature: None,
            seed: 0,
        }
    }
}

impl Sampling {
    /// What a run begins with: greedy; with a temperature, the cuts that Qwen2.5's `generation_config.json` gives (top-p 0.8,
    /// top-k 20); calls are greedy at any temperature. Its repetition penalty is left out: it would punish the words of the
    /// question and of a tool's result, which an answer must repeat.
    pub fn qwen() -> Self {
        Sampling { top_k: 20, top_p: 0.8, call_temperature: Some(0.0), ..Sampling::default() }
    }
}

/// How the loop treats a model: measured, and set in its manifest (`docs/LOG.md` has the figures).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Habits {
    pub reminder: ReminderAt,
    /// Whether a reply begins with a line that names the tool it calls, or says that it answers.
    pub routing: bool,
    /// How much likelier than the end of a call an optional argument must be to be written, in nats.
    pub optional_margin: f32,
}

/// When the model is reminded of its task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ReminderAt {
    /// When it has repeated a call.
    #[default]
    OnRepeat,
    /// With the last result of every step; calls stay possible. A repeat is still guarded.
    AfterResult,
}

/// JSON with the keys of every object sorted: equal values give equal text. `serde_json` keeps keys in the order in
/// which they came here, so two calls with the same arguments need not print alike.
pub fn json_canonical(value: &Value) -> String {
    fn write(value: &Value, text: &mut String) {
        match value {
            Value::Object(object) => {
                let mut entries: Vec<_> = object.iter().collect();
                entries.sort_by_key(|(key, _)| *key);
                text.push('{');
                for (at, (key, value)) in entries.into_iter().enumerate() {
                    if at > 0 {
                        text.push(',');
                    }
                    text.push_str(&Value::from(key.as_str()).to_string());
                    text.push(':');
                    write(value, text);
                }
                text.push('}');
            }
            Value::Array(items) => {
                text.push('[');
                for (at, value) in items.iter().enumerate() {
                    if at > 0 {
                        text.push(',');
                    }
                    write(value, text);
                }
                text.push(']');
            }
            scalar => text.push_str(&scalar.to_string()),
        }
    }
    let mut text = String::new();
    write(value, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn canonical_json_forgets_the_order_of_keys_only() {
        let a = json!({"b": [1, {"y": null, "x": "ộ\n"}], "a": 1.5});
        let b: Value = serde_json::from_str(r#"{"a":1.5,"b":[1,{"x":"ộ\n","y":null}]}"#).unwrap();
        assert_eq!(json_canonical(&a), json_canonical(&b));
        assert_eq!(serde_json::from_str::<Value>(&json_canonical(&a)).unwrap(), a);
        assert_ne!(json_canonical(&json!([1, 2])), json_canonical(&json!([2, 1])));
        assert_ne!(json_canonical(&json!({"a": 1})), json_canonical(&json!({"a": "1"})));
    }
}
