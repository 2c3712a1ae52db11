//! What the model can do: the trait, the registry, one file a tool.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::message::ToolSpec;
use crate::permission::Access;

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
    pub files: std::sync::Arc<FileViews>,
    /// The bound on a result, in bytes of text; what is cut is said in the text.
    pub output_bytes_max: usize,
}

/// Path → what the model last saw of it.
#[derive(Default)]
pub struct FileViews {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolOutput {
    pub text: String,
    pub is_error: bool,
}

impl ToolOutput {
    pub fn ok(text: impl Into<String>) -> Self {
        ToolOutput { text: text.into(), is_error: false }
    }
    pub fn error(text: impl Into<String>) -> Self {
        ToolOutput { text: text.into(), is_error: true }
    }
}
