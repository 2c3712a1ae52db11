//! `Bash`: a shell command.

use std::time::Duration;

use async_trait::async_trait;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::{Gap, Stop, Tool, ToolContext, ToolOutput, schema};
use crate::message::ToolSpec;
use crate::permission::Access;
use crate::process::{self, Ended, Status};

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// The command line.
    command: String,
    /// Milliseconds until it is stopped; 120000 if omitted.
    timeout: Option<i64>,
    /// What it does, in a few words.
    #[serde(rename = "description")]
    _description: Option<String>,
}

pub(super) struct Bash {
    spec: ToolSpec,
}

impl Bash {
    pub(super) fn new() -> Self {
        let description = "Runs a command in the shell, in the workspace, and shows its output and exit code. To read, write, \
                           edit or search files use the other tools.";
        Bash { spec: schema::spec_of::<Arguments>("Bash", description) }
    }
}

const TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);
/// Kept for the notes after the output.
const NOTES_BYTES: usize = 400;

#[async_trait]
impl Tool for Bash {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn access(&self, arguments: &Value, _: &ToolContext) -> Result<Vec<Access>, String> {
        let arguments: Arguments = schema::arguments(arguments.clone())?;
        if arguments.command.trim().is_empty() {
            return Err("The command is empty.".into());
        }
        if arguments.command.contains('\0') {
            return Err("The command contains a NUL character.".into());
        }
        if arguments.timeout.is_some_and(|timeout_ms| timeout_ms < 1) {
            return Err("timeout must be 1 or more milliseconds.".into());
        }
        Ok(vec![Access::Run(arguments.command)])
    }

    fn read_only(&self) -> bool {
        false
    }

    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput {
        let result = bash(arguments, context).await;
        result.unwrap_or_else(|why| ToolOutput::error(super::text::bounded(why, context.output_bytes_max)))
    }
}

async fn bash(arguments: Value, context: &ToolContext) -> Result<ToolOutput, String> {
    let arguments: Arguments = schema::arguments(arguments)?;
    let asked = arguments.timeout.and_then(|timeout_ms| u64::try_from(timeout_ms).ok()).map(Duration::from_millis);
    // A part of the call's own time is left for ending the group and reporting what it wrote until then.
    let timeout = asked.unwrap_or(TIMEOUT_DEFAULT).min(context.timeout - context.timeout / 20);
    let command = process::Command {
        timeout,
        output_bytes_max: context.output_bytes_max.saturating_sub(NOTES_BYTES),
        ..process::Command::shell(arguments.command, &context.cwd)
    };
    let finished =
        process::run(command, &context.cancel).await.map_err(|error| format!("The command did not run: {error}."))?;
    let mut notes = Vec::new();
    if finished.stdout.lossy {
        notes.push("not all of the output was UTF-8".to_string());
    }
    if finished.background_killed {
        notes.push("processes left in the background were killed: they may not outlive the call".to_string());
    }
    match finished.ended {
        Ended::Cancelled => notes.push(Stop::TEXT.to_string()),
        Ended::TimedOut => {
            let shorter = asked.is_some_and(|asked| asked > timeout);
            let limit = if shorter { ", the most a call may take" } else { "" };
            notes.push(format!(
                "timed out after {} ms{limit}; the command and all of its processes that could be found were killed",
                timeout.as_millis()
            ));
        }
        Ended::Itself => match finished.status {
            Status::Code(0) if finished.stdout.text.is_empty() => notes.push("no output; exit code 0".to_string()),
            Status::Code(0) => {}
            Status::Code(code) => notes.push(format!("exit code {code}")),
            Status::Signal(signal) => notes.push(format!("killed by signal {signal}")),
            Status::Unknown => notes.push("it could not be killed and may still run".to_string()),
        },
    }
    let is_error = !finished.success();
    // A command that ended by itself has said something, whatever its exit code: a test that fails is an answer.
    let led_nowhere = matches!(finished.ended, Ended::TimedOut);
    let mut text = finished.stdout.text;
    for note in notes {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&format!("[{note}]\n"));
    }
    let gap = finished.stdout.gap.filter(|_| text.len() <= context.output_bytes_max);
    let gap = gap.map(|at| Gap { at, bytes: finished.stdout.bytes_cut });
    let bounded = super::text::bounded(text, context.output_bytes_max);
    Ok(ToolOutput { text: bounded, is_error, led_nowhere, gap })
}
