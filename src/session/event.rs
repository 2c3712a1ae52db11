//! What the log consists of.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::chat::ModelInfo;
use crate::message::{AssistantMessage, FinishReason, Sampling, StopReason, ToolCall, ToolResult, ToolSpec, Usage};

/// The version of the log's format, the `v` of every line. A reader refuses a higher one.
pub const FORMAT: u64 = 1;

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    pub v: u64,
    /// The number of the line, from 0, without gaps.
    pub seq: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    #[serde(flatten)]
    pub event: Event,
}

/// With which model and settings a session goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    pub cob_version: String,
    pub model: ModelInfo,
    /// With the seed that was used, also when it was drawn.
    pub sampling: Sampling,
    pub cwd: String,
    /// As they are offered to the model.
    pub tools: Vec<ToolSpec>,
    /// The system prompt; `None` leaves the template's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// The settings of the loop, for whoever wants to repeat the run; no reader depends on them.
    #[serde(default)]
    pub settings: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// The first event, and only the first.
    Init {
        session_id: String,
        #[serde(flatten)]
        run: RunInfo,
    },
    /// Another process takes the session up.
    Resumed {
        #[serde(flatten)]
        run: RunInfo,
    },
    /// The session goes on with another model than before.
    ModelChanged { from: ModelInfo, to: ModelInfo },
    /// A task begins.
    User { text: String },
    /// One step of the model.
    Assistant {
        message: AssistantMessage,
        finish: FinishReason,
        usage: Usage,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        notes: Vec<String>,
    },
    /// On the disk before the tool runs: a call that has it and no result may have run.
    ToolStarted { call_id: String },
    ToolResult {
        #[serde(flatten)]
        result: ToolResult,
        duration_ms: u64,
    },
    /// A reply was thrown away because it only repeated calls that had been answered or, with no calls, was no answer. The result of `call_id`, the last one,
    /// gets `reminder`. `withheld`: the tools that the next reply may not call; without any, it may call none at all.
    RepeatGuarded {
        calls: Vec<ToolCall>,
        call_id: String,
        reminder: String,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        withheld: Vec<String>,
        usage: Usage,
    },
    /// Permission refused a call; its result follows.
    Refused { call_id: String, name: String, why: String, would_allow: Vec<String> },
    /// Something that must not pass in silence.
    Note { text: String },
    /// A task ended.
    Stopped {
        reason: StopReason,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// What the model had written of a reply that was cut off. It is no part of the history.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        partial: String,
    },
}

/// The `type` of every [`Event`]: a line of another type is not an event of this version.
pub(super) const TYPES: [&str; 11] = [
    "init",
    "resumed",
    "model_changed",
    "user",
    "assistant",
    "tool_started",
    "tool_result",
    "repeat_guarded",
    "refused",
    "note",
    "stopped",
];

/// Why one line is not a record.
#[derive(Debug, PartialEq)]
pub(super) enum LineFault {
    Newer(u64),
    UnknownEvent(String),
    Corrupt(String),
}

/// One line without its line end → its record; `None` for an event that is unknown here and marked `"optional":true`.
/// `seq` is what the line's number must be.
pub(super) fn parse_line(line: &[u8], seq: u64) -> Result<Option<Record>, LineFault> {
    let corrupt = |why: String| LineFault::Corrupt(why);
    let mut value: Value = serde_json::from_slice(line).map_err(|e| corrupt(format!("it is not JSON ({e})")))?;
    let object = value.as_object_mut().ok_or_else(|| corrupt("it is not an object".into()))?;
    let number =
        |key: &str| object.get(key).and_then(Value::as_u64).ok_or_else(|| corrupt(format!("it has no `{key}`")));
    let v = number("v")?;
    if v > FORMAT {
        return Err(LineFault::Newer(v));
    }
    let (found, time_ms) = (number("seq")?, number("time_ms")?);
    if found != seq {
        return Err(corrupt(format!("its number is {found}, not {seq}: lines are missing or doubled")));
    }
    let kind = object.get("type").and_then(Value::as_str).ok_or_else(|| corrupt("it has no `type`".into()))?.to_owned();
    if !TYPES.contains(&kind.as_str()) {
        let optional = object.get("optional").and_then(Value::as_bool).unwrap_or(false);
        return if optional { Ok(None) } else { Err(LineFault::UnknownEvent(kind)) };
    }
    let event: Event = serde_json::from_value(value).map_err(|e| corrupt(format!("as `{kind}` event: {e}")))?;
    if matches!(event, Event::Init { .. }) != (seq == 0) {
        return Err(corrupt("the first event, and only the first, is `init`".into()));
    }
    Ok(Some(Record { v, seq, time_ms, event }))
}
