//! What a run shows: text for people, one JSON object, or a line of JSON for each event.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::args::OutputFormat;
use crate::agent::{AgentEvent, CallOutcome, Outcome, Refusal};
use crate::message::{StopReason, ToolCall, Usage};
use crate::permission::Mode;
use crate::session::RunInfo;

/// How long something lasts before a terminal is told of it.
const SILENCE_MAX: Duration = Duration::from_secs(1);
/// The length of an argument or a result in a line, in characters.
const SUMMARY_CHARS_MAX: usize = 70;

/// Where a front writes, and whether that is a terminal.
pub struct Sink {
    writer: Box<dyn Write + Send>,
    terminal: bool,
    /// Why something could not be written, the first time.
    fault: Option<std::io::Error>,
}

impl Sink {
    pub fn new(writer: Box<dyn Write + Send>, terminal: bool) -> Sink {
        Sink { writer, terminal, fault: None }
    }

    /// What cannot be written is no reason to break off: the run may have effects that should be complete. A reader that went
    /// away is no fault at all.
    fn put(&mut self, text: &str) {
        if let Err(error) = self.writer.write_all(text.as_bytes()).and_then(|()| self.writer.flush())
            && error.kind() != std::io::ErrorKind::BrokenPipe
        {
            self.fault.get_or_insert(error);
        }
    }
}

/// Shows one run.
pub struct Front {
    format: OutputFormat,
    quiet: bool,
    colour: bool,
    out: Sink,
    err: Sink,
    /// Standard output is in the middle of a line.
    mid_line: bool,
    /// The text of the present reply is on standard output already.
    streamed: bool,
    /// Since when a prompt is being evaluated.
    prefill: Option<Instant>,
    /// A line of progress stands on the terminal; the next thing that is said takes its place.
    progress: bool,
    init_written: bool,
    result_written: bool,
}

/// The end of a run, whether or not there was a session.
pub struct Report {
    pub session_id: Option<String>,
    pub model: Option<String>,
    pub outcome: Outcome,
}

impl Report {
    /// A run that ended before an agent could begin.
    pub fn without_agent(
        session_id: Option<String>,
        model: Option<String>,
        stop_reason: StopReason,
        error: String,
    ) -> Report {
        let outcome = Outcome {
            stop_reason,
            answer: String::new(),
            turns: 0,
            calls: Vec::new(),
            refusals: Vec::new(),
            usage: Usage::default(),
            error: Some(error),
        };
        Report { session_id, model, outcome }
    }

    /// The `result` object.
    fn json(&self) -> Value {
        let outcome = &self.outcome;
        json!({
            "type": "result",
            "session_id": self.session_id,
            "model": self.model,
            "stop_reason": outcome.stop_reason,
            "answer": outcome.answer,
            "turns": outcome.turns,
            "tool_calls": outcome.calls,
            "refusals": outcome.refusals,
            "usage": outcome.usage,
            "error": outcome.error,
        })
    }
}

impl Front {
    pub fn new(format: OutputFormat, quiet: bool) -> Front {
        let out = Sink::new(Box::new(std::io::stdout()), std::io::stdout().is_terminal());
        let err = Sink::new(Box::new(std::io::stderr()), std::io::stderr().is_terminal());
        let colour = err.terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Front::with(format, quiet, colour, out, err)
    }

    pub fn with(format: OutputFormat, quiet: bool, colour: bool, out: Sink, err: Sink) -> Front {
        Front {
            format,
            quiet,
            colour,
            out,
            err,
            mid_line: false,
            streamed: false,
            prefill: None,
            progress: false,
            init_written: false,
            result_written: false,
        }
    }

    /// Whether a person reads along and can be shown more than lines.
    pub fn shows_progress(&self) -> bool {
        self.err.terminal && !self.quiet && self.format == OutputFormat::Text
    }

    /// The run begins. `session` is there unless the run failed before it had one.
    pub fn init(&mut self, session: Option<(&str, &RunInfo)>, resumed: bool, mode: Mode) {
        self.init_written = true;
        if self.format != OutputFormat::StreamJson {
            return;
        }
        let run = session.map(|(_, run)| run);
        self.line(&json!({
            "type": "init",
            "session_id": session.map(|(id, _)| id),
            "resumed": resumed,
            "cob_version": env!("CARGO_PKG_VERSION"),
            "model": run.map(|run| &run.model),
            "sampling": run.map(|run| run.sampling),
            "cwd": run.map(|run| &run.cwd),
            "tools": run.map(|run| run.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>()),
            "permission_mode": mode,
        }));
    }

    /// A word of the program's own.
    pub fn note(&mut self, text: &str) {
        self.event(&AgentEvent::Note { text: text.to_owned() });
    }

    pub fn event(&mut self, event: &AgentEvent) {
        match self.format {
            OutputFormat::Text => self.show(event),
            OutputFormat::StreamJson if matches!(event, AgentEvent::Prefill { .. }) => {}
            OutputFormat::StreamJson => match serde_json::to_value(event) {
                Ok(value) => self.line(&value),
                Err(error) => self.line(&json!({"type": "note", "text": format!("an event cannot be shown: {error}")})),
            },
            OutputFormat::Json => {
                if let (AgentEvent::Note { text }, false) = (event, self.quiet) {
                    self.err.put(&format!("cob: {text}\n"));
                }
            }
        }
    }

    /// The run is over. Only the first call counts.
    pub fn result(&mut self, report: &Report, mode: Mode) {
        if std::mem::replace(&mut self.result_written, true) {
            return;
        }
        match self.format {
            OutputFormat::Text => self.show_result(report),
            OutputFormat::Json => self.line(&report.json()),
            OutputFormat::StreamJson => {
                if !self.init_written {
                    self.init(None, false, mode);
                }
                self.line(&report.json());
            }
        }
        if let (false, Some(error)) = (self.format == OutputFormat::Text, &report.outcome.error) {
            self.err.put(&format!("cob: {error}\n"));
        }
    }

    /// The exit code of a run that would end with `code`: 1 where standard output could not be written, which is said.
    pub fn exit_code(&mut self, code: u8) -> u8 {
        match self.out.fault.take() {
            None => code,
            Some(error) => {
                self.err.put(&format!("cob: {}\n", super::unwritten(&error)));
                if code == 0 { 1 } else { code }
            }
        }
    }

    /// The next task of a chat begins.
    pub fn again(&mut self) {
        self.result_written = false;
    }

    fn line(&mut self, value: &Value) {
        self.out.put(&format!("{value}\n"));
    }

    fn show(&mut self, event: &AgentEvent) {
        if let AgentEvent::Prefill { done, total } = event {
            return self.show_prefill(*done, *total);
        }
        self.clear_progress();
        match event {
            AgentEvent::Text { text } if self.out.terminal => {
                let text = printable(text);
                self.mid_line = !text.ends_with('\n') && (self.mid_line || !text.is_empty());
                self.streamed = true;
                self.out.put(&text);
            }
            AgentEvent::Assistant { calls, .. } if !calls.is_empty() => {
                self.end_line();
                self.streamed = false;
            }
            AgentEvent::RepeatGuarded { calls, withheld, .. } => {
                self.streamed = false;
                let repeated = describe_calls(calls);
                self.say(
                    "2",
                    &match withheld.is_empty() {
                        true if calls.is_empty() => "↺ that was no answer; asking for one".into(),
                        true => format!("↺ {repeated} was answered already; asking for the answer"),
                        false => format!(
                            "↺ {repeated} led nowhere before; asking for a call of another tool than {}",
                            withheld.join(", ")
                        ),
                    },
                );
            }
            AgentEvent::ToolFinished { report, text, .. } => {
                let what = describe(&report.name, &report.arguments);
                let rescued = if report.rescued { " (rescued)" } else { "" };
                let colour = if report.outcome == CallOutcome::Ok { "32" } else { "31" };
                let dot = self.paint(colour, if report.outcome == CallOutcome::Ok { "●" } else { "✗" });
                self.say("", &format!("{dot} {what}{rescued} → {}", summary(report.outcome, text)));
            }
            AgentEvent::Refused(refusal) => {
                let hint = allow_hint(refusal);
                self.say("33", &format!("  refused: {}{hint}", printable(&refusal.why)));
            }
            AgentEvent::Note { text } => self.say("2", &format!("cob: {}", printable(text))),
            AgentEvent::Text { .. }
            | AgentEvent::Assistant { .. }
            | AgentEvent::CallOpened { .. }
            | AgentEvent::Prefill { .. } => {}
            AgentEvent::ToolStarted { name, arguments, .. } => {
                self.end_line();
                self.show_progress(&format!("○ {} is running", describe(name, arguments)));
            }
        }
    }

    fn show_prefill(&mut self, done: usize, total: usize) {
        if self.prefill.get_or_insert_with(Instant::now).elapsed() >= SILENCE_MAX {
            self.show_progress(&format!("reading the prompt: {done} of {total} tokens"));
        }
        if done >= total {
            self.clear_progress();
        }
    }

    fn show_progress(&mut self, text: &str) {
        if self.shows_progress() {
            self.progress = true;
            self.err.put(&format!("\r\x1b[K{text}"));
        }
    }

    fn clear_progress(&mut self) {
        self.prefill = None;
        if std::mem::take(&mut self.progress) {
            self.err.put("\r\x1b[K");
        }
    }

    fn show_result(&mut self, report: &Report) {
        self.clear_progress();
        let outcome = &report.outcome;
        if !self.streamed && !outcome.answer.is_empty() {
            let answer = if self.out.terminal { printable(&outcome.answer) } else { outcome.answer.clone() };
            self.mid_line = !answer.ends_with('\n');
            self.out.put(&answer);
        }
        self.streamed = false;
        self.end_line();
        if let Some(error) = &outcome.error {
            let text = self.paint("31", &format!("cob: {}", printable(error)));
            self.err.put(&format!("{text}\n"));
        }
        if outcome.turns > 0 {
            self.say("2", &figures(report));
        }
    }

    /// A line on standard error, unless the user wants quiet.
    fn say(&mut self, colour: &str, text: &str) {
        if self.quiet {
            return;
        }
        self.end_line();
        let text = if colour.is_empty() { text.to_owned() } else { self.paint(colour, text) };
        self.err.put(&format!("{text}\n"));
    }

    fn end_line(&mut self) {
        if std::mem::take(&mut self.mid_line) {
            self.out.put("\n");
        }
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// `2 turns · 512 cached + 35 prefilled · 20 forced + 31 sampled · 14.2 tok/s · 6.1 s · session …`
fn figures(report: &Report) -> String {
    let Outcome { turns, usage, .. } = &report.outcome;
    let mut parts = vec![
        counted(*turns, "turn"),
        format!("{} cached + {} prefilled", usage.cached_tokens, usage.prefilled_tokens),
        format!("{} forced + {} sampled tokens", usage.forced_tokens, usage.sampled_tokens),
    ];
    if usage.decode_ms > 0.0 {
        let tokens = (usage.forced_tokens + usage.sampled_tokens) as f64;
        parts.push(format!("{:.1} tok/s", tokens * 1e3 / usage.decode_ms));
    }
    parts.push(format!("{:.1} s", usage.total_ms / 1e3));
    parts.extend(report.session_id.as_ref().map(|id| format!("session {id}")));
    parts.join(" · ")
}

/// ` (allow it with --allow 'Edit')`.
fn allow_hint(refusal: &Refusal) -> String {
    let flags: Vec<String> =
        refusal.would_allow.iter().map(|rule| format!("--allow '{}'", rule.replace('\'', r"'\''"))).collect();
    if flags.is_empty() { String::new() } else { format!(" (allow it with {})", printable(&flags.join(" "))) }
}

/// `Read Cargo.toml`: the name and the argument that says most.
pub fn describe(name: &str, arguments: &Value) -> String {
    let argument = match arguments {
        Value::Object(object) if object.is_empty() => return name.to_owned(),
        Value::Object(object) => {
            let text = object.values().find_map(Value::as_str);
            text.map_or_else(|| arguments.to_string(), str::to_owned)
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    format!("{} {}", printable(name), one_line(&argument))
}

/// As [`describe`], for several.
pub fn describe_calls(calls: &[ToolCall]) -> String {
    calls.iter().map(|call| describe(&call.name, &call.arguments)).collect::<Vec<_>>().join(", ")
}

fn summary(outcome: CallOutcome, text: &str) -> String {
    match outcome {
        CallOutcome::Ok => one_line(text),
        CallOutcome::Repeated => "answered already".into(),
        CallOutcome::Refused => "refused".into(),
        _ => {
            let first = one_line(text.strip_prefix("error: ").unwrap_or(text));
            // A command's output ends with what became of it.
            let note = text.trim_end().rsplit('\n').next().and_then(|line| line.strip_prefix('[')?.strip_suffix(']'));
            match note {
                Some(note) if !first.starts_with('[') => format!("{}: {first}", one_line(note)),
                _ => first,
            }
        }
    }
}

/// The first line that is not empty, shortened.
fn one_line(text: &str) -> String {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = printable(lines.next().unwrap_or_default());
    let more = lines.next().is_some();
    let short = shortened(&line, SUMMARY_CHARS_MAX);
    if more && short == line { format!("{line} …") } else { short }
}

/// At most so many characters, and a sign where some were cut.
pub fn shortened(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// `1 turn`, `2 turns`.
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Without the control characters by which a file or a model could drive the terminal.
pub fn printable(text: &str) -> String {
    let kept = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().filter(|&c| kept(c)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::agent::CallReport;
    use crate::message::FinishReason;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Buffer {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    fn outcome() -> Outcome {
        let usage = Usage {
            cached_tokens: 512,
            prefilled_tokens: 35,
            forced_tokens: 20,
            sampled_tokens: 30,
            decode_ms: 2000.0,
            total_ms: 2540.0,
            ..Usage::default()
        };
        Outcome {
            stop_reason: StopReason::Answer,
            answer: "It has 58 lines.".into(),
            turns: 2,
            calls: vec![],
            refusals: vec![],
            usage,
            error: None,
        }
    }

    /// A run with every kind of event → standard output, and standard error.
    fn show(terminal: bool, colour: bool, quiet: bool) -> (String, String) {
        let (out, err) = (Buffer::default(), Buffer::default());
        let sink = |buffer: &Buffer| Sink::new(Box::new(buffer.clone()), terminal);
        let mut front = Front::with(OutputFormat::Text, quiet, colour, sink(&out), sink(&err));
        let call = |name: &str, arguments: Value, outcome, text: &str| {
            let report =
                CallReport { id: "call_0".into(), name: name.into(), arguments, outcome, rescued: name == "Read" };
            AgentEvent::ToolFinished { report, is_error: outcome != CallOutcome::Ok, text: text.into(), duration_ms: 1 }
        };
        let step =
            ToolCall { id: "call_0".into(), name: "Read".into(), arguments: json!({"file_path": "a"}), rescued: false };
        let assistant = |calls: Vec<ToolCall>| AgentEvent::Assistant {
            turn: 1,
            text: String::new(),
            calls,
            finish: FinishReason::Stop,
            usage: Usage::default(),
        };
        let refusal = Refusal {
            call_id: "call_1".into(),
            name: "Write".into(),
            why: "it writes".into(),
            would_allow: vec!["Edit(it's)".into()],
        };
        for event in [
            AgentEvent::Text { text: "Let me look.".into() },
            assistant(vec![step.clone()]),
            call("Read", json!({"file_path": "a\x1b[2J", "n": 1}), CallOutcome::Ok, "1\n2\n3"),
            AgentEvent::Refused(refusal),
            call("Write", json!({"file_path": "b"}), CallOutcome::Refused, "Not allowed"),
            call("LS", json!({}), CallOutcome::Failed, "error: no such folder\nmore"),
            AgentEvent::RepeatGuarded { calls: vec![step], reminder: String::new(), withheld: Vec::new() },
            AgentEvent::Note { text: "a note".into() },
            AgentEvent::Text { text: "It has 58 ".into() },
            AgentEvent::Text { text: "lines.".into() },
            assistant(vec![]),
        ] {
            front.event(&event);
        }
        front.result(&Report { session_id: Some("s".into()), model: None, outcome: outcome() }, Mode::Default);
        (out.text(), err.text())
    }

    #[test]
    fn text_for_people() {
        let (out, err) = show(false, false, false);
        assert_eq!(out, "It has 58 lines.\n");
        insta::assert_snapshot!(err, @r"
        ● Read a[2J (rescued) → 1 …
          refused: it writes (allow it with --allow 'Edit(it'\''s)')
        ✗ Write b → refused
        ✗ LS → no such folder …
        ↺ Read a was answered already; asking for the answer
        cob: a note
        2 turns · 512 cached + 35 prefilled · 20 forced + 30 sampled tokens · 25.0 tok/s · 2.5 s · session s
        ");
        let (out, _) = show(true, false, false);
        assert_eq!(out, "Let me look.\nIt has 58 lines.\n", "a terminal is streamed to, and the answer comes once");
        let (_, err) = show(true, true, false);
        assert!(err.contains("\x1b[32m●\x1b[0m Read"), "{err}");
        assert_eq!(show(false, false, true), ("It has 58 lines.\n".into(), String::new()));
    }

    #[test]
    fn a_result_is_written_once_and_after_an_init() {
        let out = Buffer::default();
        let sink = || Sink::new(Box::new(out.clone()), false);
        let mut front =
            Front::with(OutputFormat::StreamJson, false, false, sink(), Sink::new(Box::new(Vec::new()), false));
        let report = Report::without_agent(None, Some("m".into()), StopReason::Refused, "no".into());
        front.result(&report, Mode::Default);
        front.result(&report, Mode::Default);
        let kinds: Vec<Value> =
            out.text().lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["type"].clone()).collect();
        assert_eq!(kinds, ["init", "result"]);
    }

    #[test]
    fn the_result_has_exactly_these_fields() {
        let report = Report { session_id: Some("s".into()), model: Some("m".into()), outcome: outcome() };
        let json = report.json();
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(keys(&json), "type session_id model stop_reason answer turns tool_calls refusals usage error");
        assert_eq!(
            keys(&json["usage"]),
            "prompt_tokens cached_tokens restored_tokens prefilled_tokens forced_tokens sampled_tokens drafted_tokens accepted_tokens prefill_ms decode_ms total_ms kv_bytes"
        );
    }
}
