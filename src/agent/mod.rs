//! The loop: model → calls → results → model, until there is an answer or a named limit.
//!
//! `run.rs` is the main path. What it promises:
//! * All calls of one step stand in one assistant message; each gets exactly one result, in the order of the calls. Calls
//!   that only read run in parallel with their read-only neighbours; a call that may write waits for all before it, and all
//!   after it wait for it.
//! * A call that cannot run (an unknown tool, bad arguments, refused) and a tool that fails, panics or is too slow give an
//!   error result that tells the model what to do next; the loop goes on.
//! * Everything is in the log before it matters: that a tool is about to run, before it runs.
//! * Every end is a [`StopReason`]; only [`StopReason::Answer`] is success.
//! * **Repeats**: a step that consists of calls already answered in this task (same name, same arguments, and nothing ran in
//!   between that may change the answer) is thrown away and made again. Where those calls had led nowhere, their tools are
//!   withheld for that reply; otherwise, or if the model insists, the last result gets a reminder to answer and calls are
//!   masked out. Where only some calls of a step are such repeats, the others run and the repeats are answered with a
//!   pointer to the result above. A reply after a result that is the task over again, or begins as a call does in the examples of
//!   the system prompt, is thrown away once too. `Settings::guard` turns all of it off.

mod call;
mod guard;
mod prompt;
mod run;
mod stop;
mod task;
mod toolbox;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

pub use prompt::{instruct, shows_routing};
pub use run::NOTHING_LEFT;
pub use stop::Stop;
pub use toolbox::Toolbox;

use crate::chat::LanguageModel;
use crate::message::{FinishReason, Habits, Sampling, StopReason, ToolCall, ToolChoice, Usage};
use crate::permission::Permissions;
use crate::tools::FileViews;

/// Everything that runs a task, except the session it is logged in.
pub struct Agent {
    pub model: Arc<dyn LanguageModel>,
    pub toolbox: Toolbox,
    pub permissions: Permissions,
    /// The workspace of the tools.
    pub cwd: PathBuf,
    /// What the model last saw of each file; kept from task to task.
    pub files: Arc<FileViews>,
    pub settings: Settings,
}

/// The limits and habits of the loop.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settings {
    pub sampling: Sampling,
    /// `Required` and `Named` hold for the first step of a task (else it could never be answered), the others for all.
    pub tool_choice: ToolChoice,
    /// Steps of the model in one task.
    pub max_turns: usize,
    /// Of one reply; reserved in the context.
    pub max_output_tokens: usize,
    /// Wall clock of one task.
    pub timeout: Option<Duration>,
    /// Wall clock of one call.
    pub tool_timeout: Duration,
    /// The task ends when the same call was made so many times in a row.
    pub max_repeats: usize,
    /// The bound on one result, in tokens. What is cut is said in the result and in the log.
    pub result_tokens_max: usize,
    /// Whether a repeated call is thrown away and the answer asked for.
    pub guard: bool,
    pub habits: Habits,
    /// Whether a call in a foreign form is made a real one.
    pub rescue: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            sampling: Sampling::default(),
            tool_choice: ToolChoice::Auto,
            max_turns: 20,
            max_output_tokens: 1024,
            timeout: None,
            tool_timeout: Duration::from_secs(120),
            max_repeats: 3,
            result_tokens_max: 4000,
            guard: true,
            habits: Habits::default(),
            rescue: true,
        }
    }
}

/// How one task ended and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub stop_reason: StopReason,
    /// The answer; for `MaxOutputTokens` as far as it came; otherwise empty.
    pub answer: String,
    /// Steps of the model.
    pub turns: usize,
    pub calls: Vec<CallReport>,
    pub refusals: Vec<Refusal>,
    /// Of all completions, thrown away ones included.
    pub usage: Usage,
    /// Why there is no answer, and what to do; `None` with [`StopReason::Answer`].
    pub error: Option<String>,
}

/// What became of one call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallReport {
    pub id: String,
    pub name: String,
    pub arguments: Value,
    pub outcome: CallOutcome,
    pub rescued: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    Ok,
    /// The tool says that it failed.
    Failed,
    UnknownTool,
    BadArguments,
    /// Permission was not given.
    Refused,
    TimedOut,
    Panicked,
    /// Already answered above; it did not run again.
    Repeated,
    /// The task was stopped while it ran.
    Interrupted,
    /// The task ended before its turn came.
    NotRun,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Refusal {
    pub call_id: String,
    pub name: String,
    pub why: String,
    /// The rules that together would allow it; empty where none can.
    pub would_allow: Vec<String>,
}

/// What a front end sees of a running task, in order.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AgentEvent {
    /// Prompt tokens evaluated so far, of those that were not cached.
    Prefill {
        done: usize,
        total: usize,
    },
    /// A piece of the reply's text.
    Text {
        text: String,
    },
    /// A call begins in the reply; its arguments are not there yet.
    CallOpened {
        name: String,
        rescued: bool,
    },
    /// One step of the model is complete. `turn` counts from 1.
    Assistant {
        turn: usize,
        text: String,
        calls: Vec<ToolCall>,
        finish: FinishReason,
        usage: Usage,
    },
    /// The reply so far, its text included, is thrown away; another follows.
    RepeatGuarded {
        calls: Vec<ToolCall>,
        reminder: String,
        /// What the next reply may not call; without any, it may call nothing at all.
        withheld: Vec<String>,
    },
    Refused(Refusal),
    ToolStarted {
        id: String,
        name: String,
        arguments: Value,
    },
    ToolFinished {
        #[serde(flatten)]
        report: CallReport,
        is_error: bool,
        text: String,
        duration_ms: u64,
    },
    Note {
        text: String,
    },
}

/// Called on the task that runs the loop, in order. It must not block for long: the loop waits for it.
pub type Observer<'a> = dyn FnMut(&AgentEvent) + Send + 'a;
