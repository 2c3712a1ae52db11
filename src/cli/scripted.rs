//! `--model scripted:FILE`: a model that plays replies from a file, for tests and demos without weights.
//!
//! The file is a JSON list, one object a reply: `{"text": "…", "calls": [{"name": "Read", "arguments": {…}}], "delay_ms": 0,
//! "cut": false, "failure": "…", "panic": "…"}`, every field optional. `cut` plays the limit on the output, `failure` and
//! `panic` a model that breaks. Grammar and tool choice do not bind it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::chat::LanguageModel;
use crate::chat::scripted::{Reply, Scripted};
use crate::message::ToolCall;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Line {
    text: String,
    calls: Vec<Call>,
    delay_ms: u64,
    cut: bool,
    failure: Option<String>,
    panic: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Call {
    name: String,
    arguments: Value,
    #[serde(default)]
    rescued: bool,
}

/// `Err` names the file and its fault.
pub fn load(path: &Path, context_tokens: Option<usize>) -> Result<Arc<dyn LanguageModel>, String> {
    let fault = |why: String| format!("the script {}: {why}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fault(format!("it cannot be read: {error}")))?;
    let lines: Vec<Line> = serde_json::from_str(&text).map_err(|error| fault(error.to_string()))?;
    let mut lines = lines.into_iter();
    let model = Scripted::from_fn(move |_| lines.next().map(reply));
    Ok(Arc::new(match context_tokens {
        Some(tokens) => model.with_context_tokens(tokens),
        None => model,
    }))
}

fn reply(line: Line) -> Reply {
    if let Some(text) = line.panic {
        panic!("{text}");
    }
    let call =
        |call: Call| ToolCall { id: String::new(), name: call.name, arguments: call.arguments, rescued: call.rescued };
    Reply {
        text: line.text,
        calls: line.calls.into_iter().map(call).collect(),
        delay: Duration::from_millis(line.delay_ms),
        cut: line.cut,
        failure: line.failure,
    }
}
