//! `cob session`: list, show, path, rm.

use std::fmt::Write;
use std::path::Path;

use clap::{Args, Subcommand};
use serde_json::json;

use super::output::{counted, describe_calls, printable, shortened};
use super::setup::Fault;
use super::{complain, pretty, print, show};
use crate::hub::Folders;
use crate::session::{self, Event, Log, Record, Summary, utc};

#[derive(Args)]
pub struct SessionArgs {
    #[command(subcommand)]
    command: SessionCommand,
    /// JSON on standard output
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum SessionCommand {
    /// The sessions, oldest first
    List,
    /// What happened in a session; with --json its events as they are. The beginning or the end of an id is enough where it
    /// fits just one
    Show { id: String },
    /// Where a session lies
    Path { id: String },
    /// Delete sessions that are not in use
    Rm {
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

pub fn run(args: SessionArgs) -> u8 {
    execute(args).unwrap_or_else(|fault| show(Err(fault)))
}

fn execute(args: SessionArgs) -> Result<u8, Fault> {
    let dir = Folders::from_env()?.sessions;
    let text = match args.command {
        SessionCommand::List => {
            let found = session::list(&dir)?;
            if args.json { pretty(&json!(found)) } else { list(&found) }
        }
        SessionCommand::Show { id } => {
            let log = session::read(&session::path(&dir, &session::find(&dir, &id)?)?)?;
            if args.json { lines(&log) } else { transcript(&log) }
        }
        SessionCommand::Path { id } => {
            let id = session::find(&dir, &id)?;
            let path = session::path(&dir, &id)?;
            let text = path.display().to_string();
            if args.json { pretty(&json!({"id": id, "path": text})) } else { text + "\n" }
        }
        SessionCommand::Rm { ids } => return Ok(remove(&dir, &ids, args.json)),
    };
    print(&text);
    Ok(0)
}

/// Removes what can be removed and names the rest; the worst exit code.
fn remove(dir: &Path, ids: &[String], json: bool) -> u8 {
    let mut removed = Vec::new();
    let mut code = 0;
    for id in ids {
        match session::find(dir, id).and_then(|id| session::remove(dir, &id).map(|_| id)) {
            Ok(id) => removed.push(id),
            Err(error) => {
                let fault = Fault::from(error);
                complain(&fault.text);
                code = code.max(fault.code);
            }
        }
    }
    print(&if json {
        pretty(&json!({"removed": removed}))
    } else {
        removed.iter().map(|id| format!("removed {id}\n")).collect()
    });
    code
}

/// Of a task in the list, in characters.
const TASK_CHARS_MAX: usize = 60;

fn list(found: &[Summary]) -> String {
    let mut text = String::new();
    for summary in found {
        let end = match (&summary.problem, summary.live, summary.stop_reason) {
            (Some(problem), ..) => format!("cannot be read: {problem}"),
            (None, true, _) => "in use".into(),
            (None, false, Some(reason)) => word(&reason),
            (None, false, None) => "unfinished".into(),
        };
        let task = summary.task.as_deref().unwrap_or("").lines().next().unwrap_or("");
        let task = shortened(&printable(task), TASK_CHARS_MAX);
        let _ = writeln!(
            text,
            "{}  {}, {}  {end}  {}  {task}",
            summary.id,
            counted(summary.turns, "turn"),
            counted(summary.calls, "call"),
            summary.model.as_deref().unwrap_or("-")
        );
    }
    text
}

/// The name that a value has in JSON.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn lines(log: &Log) -> String {
    log.records.iter().filter_map(|record| serde_json::to_string(record).ok()).map(|line| line + "\n").collect()
}

fn transcript(log: &Log) -> String {
    let mut text = String::new();
    for record in &log.records {
        entry(&mut text, record);
    }
    if log.skipped > 0 {
        let _ = writeln!(text, "({} optional events of a newer version are not shown)", log.skipped);
    }
    if log.torn_bytes > 0 {
        let _ = writeln!(text, "(the last line is not complete: {} bytes)", log.torn_bytes);
    }
    text
}

fn entry(text: &mut String, record: &Record) {
    let (_, time) = utc(record.time_ms);
    let (who, what) = match &record.event {
        Event::Init { session_id, run } => {
            ("begin", format!("session {session_id}, model {}, in {}", run.model.id, run.cwd))
        }
        Event::Resumed { run } => ("resumed", format!("with the model {}", run.model.id)),
        Event::ModelChanged { from, to } => ("model", format!("{} → {}", from.id, to.id)),
        Event::User { text } => ("user", text.clone()),
        Event::Assistant { message, finish, usage, notes } => {
            let mut what = message.text.clone();
            if !message.calls.is_empty() {
                let _ = write!(what, "{}→ {}", if what.is_empty() { "" } else { "\n" }, describe_calls(&message.calls));
            }
            let tokens = usage.forced_tokens + usage.sampled_tokens;
            let _ = write!(what, "\n({}, {} + {tokens} tokens)", word(finish), usage.prompt_tokens);
            for note in notes {
                let _ = write!(what, "\n({note})");
            }
            ("model", what)
        }
        Event::ToolStarted { call_id } => ("started", call_id.clone()),
        Event::ToolResult { result, duration_ms } => {
            let kind = if result.is_error { "error" } else { "result" };
            let reminder = result.reminder.as_ref().map(|text| format!("\n[{text}]")).unwrap_or_default();
            (kind, format!("{} {} ({duration_ms} ms)\n{}{reminder}", result.call_id, result.name, result.text))
        }
        Event::RepeatGuarded { calls, reminder, withheld, .. } => {
            let what = match calls.as_slice() {
                [] => "the reply was no answer".into(),
                calls => format!("{} was answered already", describe_calls(calls)),
            };
            let next = if withheld.is_empty() { String::new() } else { format!(", withheld: {}", withheld.join(", ")) };
            ("guarded", format!("{what}: [{reminder}]{next}"))
        }
        Event::Refused { call_id, name, why, would_allow } => {
            ("refused", format!("{call_id} {name}: {why} (would allow it: {})", would_allow.join(" ")))
        }
        Event::Note { text } => ("note", text.clone()),
        Event::Stopped { reason, error, partial } => {
            let error = error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
            let partial = if partial.is_empty() { String::new() } else { format!("\nunfinished: {partial}") };
            ("end", format!("{}{error}{partial}", word(reason)))
        }
    };
    let what = printable(&what).replace('\n', "\n                     ");
    let _ = writeln!(text, "{time}Z {who:>9}  {what}");
}
