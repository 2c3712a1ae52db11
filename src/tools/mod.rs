//! What the model can do: the trait, the registry, one file a tool.
//!
//! The built-in tools carry Claude Code's names and argument names, so that rules, hooks and skills written for it fit.
//! Each has few arguments and a short description: every token of them is prefilled in every session.

mod bash;
mod edit;
mod files;
mod glob;
mod grep;
mod ls;
mod read;
mod schema;
mod text;
mod walk;
mod write;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::message::ToolSpec;
use crate::permission::Access;

pub use files::{FileViews, Fingerprint, Seen};
pub use schema::{spec_of, validate};

/// Something that the model can call. Expected failures are data (`ToolOutput::error`), never `Err`: the model can
/// act on them.
#[async_trait]
pub trait Tool: Send + Sync {
    fn spec(&self) -> &ToolSpec;

    /// What a call with these arguments touches; judged before [`Tool::run`]. `arguments` obeyed the schema.
    /// `Err` is an argument fault that the schema cannot express.
    fn access(&self, arguments: &Value, context: &ToolContext) -> Result<Vec<Access>, String>;

    /// Calls of one step that only read run in parallel.
    fn read_only(&self) -> bool;

    /// Runs the call. Dropping the future or cancelling `context.cancel` ends it and its children.
    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput;
}

/// Where and under which bounds a call runs.
#[derive(Clone)]
pub struct ToolContext {
    /// The workspace; relative paths start here.
    pub cwd: PathBuf,
    pub cancel: CancellationToken,
    pub timeout: Duration,
    /// What the files looked like when the model last read or wrote them: `Edit` and `Write` refuse stale ones.
    pub files: Arc<FileViews>,
    /// The bound on a result, in bytes of text; what is cut is said in the text.
    pub output_bytes_max: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolOutput {
    pub text: String,
    pub is_error: bool,
    /// It led nowhere, and another call may lead further: the loop asks for one. Not where the result is an answer in itself (a test
    /// that fails) or where nothing else is to be tried (a refusal).
    pub led_nowhere: bool,
    /// Where the tool left out a middle that was too long to keep.
    pub gap: Option<Gap>,
}

/// A middle that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The words that stand for it, in bytes of the text.
    pub at: std::ops::Range<usize>,
    pub bytes: u64,
}

impl ToolOutput {
    pub fn ok(text: impl Into<String>) -> Self {
        ToolOutput { text: text.into(), is_error: false, led_nowhere: false, gap: None }
    }

    pub fn error(text: impl Into<String>) -> Self {
        ToolOutput { text: text.into(), is_error: true, led_nowhere: true, gap: None }
    }

    /// An error after which the same end is not to be tried another way.
    pub fn final_error(text: impl Into<String>) -> Self {
        ToolOutput { text: text.into(), is_error: true, led_nowhere: false, gap: None }
    }

    /// A search that worked and found nothing.
    pub fn nothing(text: impl Into<String>) -> Self {
        ToolOutput { text: text.into(), is_error: false, led_nowhere: true, gap: None }
    }
}

impl From<String> for ToolOutput {
    fn from(text: String) -> Self {
        ToolOutput::ok(text)
    }
}

/// The tools of a run, in the order in which the model is told of them. Names are unique.
#[derive(Clone, Default)]
pub struct Tools {
    tools: Vec<Arc<dyn Tool>>,
}

impl Tools {
    pub fn new() -> Self {
        Tools::default()
    }

    /// The built-in tools, or those of them that are named. Their order is always the same, so that a prompt does not
    /// change with the order of the names. `Err` names the unknown ones and lists the known.
    pub fn builtin(names: Option<&[String]>) -> Result<Self, String> {
        let all: [Arc<dyn Tool>; 7] = [
            Arc::new(read::Read::new()),
            Arc::new(write::Write::new()),
            Arc::new(edit::Edit::new()),
            Arc::new(ls::Ls::new()),
            Arc::new(glob::Glob::new()),
            Arc::new(grep::Grep::new()),
            Arc::new(bash::Bash::new()),
        ];
        let Some(names) = names else { return Ok(Tools { tools: all.to_vec() }) };
        let known: Vec<&str> = all.iter().map(|tool| tool.spec().name.as_str()).collect();
        let unknown: Vec<&str> = names.iter().map(String::as_str).filter(|name| !known.contains(name)).collect();
        if !unknown.is_empty() {
            return Err(format!("there is no built-in tool {}; there are {}", unknown.join(", "), known.join(", ")));
        }
        let named = |tool: &Arc<dyn Tool>| names.contains(&tool.spec().name);
        Ok(Tools { tools: all.iter().filter(|tool| named(tool)).cloned().collect() })
    }

    /// Adds a tool at the end. `Err` when its name is taken.
    pub fn add(&mut self, tool: Arc<dyn Tool>) -> Result<(), String> {
        let name = &tool.spec().name;
        if self.get(name).is_some() {
            return Err(format!("there are two tools of the name {name}"));
        }
        self.tools.push(tool);
        Ok(())
    }

    pub fn get(&self, name: &str) -> Option<&Arc<dyn Tool>> {
        self.tools.iter().find(|tool| tool.spec().name == name)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Tool>> {
        self.tools.iter()
    }

    pub fn names(&self) -> Vec<&str> {
        self.tools.iter().map(|tool| tool.spec().name.as_str()).collect()
    }

    pub fn specs(&self) -> Vec<ToolSpec> {
        self.tools.iter().map(|tool| tool.spec().clone()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }
}

/// Tells blocking work to end: the call was cancelled or its future dropped.
#[derive(Clone)]
struct Stop(CancellationToken);

impl Stop {
    const TEXT: &str = "Interrupted before it was finished.";

    fn check(&self) -> Result<(), String> {
        if self.0.is_cancelled() { Err(Stop::TEXT.into()) } else { Ok(()) }
    }
}

/// Runs file work on a thread where it may block.
async fn blocking<T: Into<ToolOutput> + Send + 'static>(
    context: &ToolContext,
    work: impl FnOnce(&ToolContext, &Stop) -> Result<T, String> + Send + 'static,
) -> ToolOutput {
    let token = context.cancel.child_token();
    let _ends_with_the_future = token.clone().drop_guard();
    let context = context.clone();
    let bytes_max = context.output_bytes_max;
    let result = tokio::task::spawn_blocking(move || work(&context, &Stop(token))).await;
    let result = result.unwrap_or_else(|error| Err(format!("The tool itself failed: {error}.")));
    let output = result.map_or_else(ToolOutput::error, Into::into);
    if output.text.len() <= bytes_max {
        return output;
    }
    ToolOutput { text: text::bounded(output.text, bytes_max), gap: None, ..output }
}

#[cfg(test)]
mod tests;
