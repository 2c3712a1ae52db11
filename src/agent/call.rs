//! The calls of one step: each is checked, permitted, run, and gets its one result.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::run::{End, Run};
use super::task::{Aborting, panic_text};
use super::{AgentEvent, CallOutcome, CallReport, Refusal, Stop, guard};
use crate::chat::LanguageModel;
use crate::message::{ReminderAt, StopReason, ToolCall, ToolResult};
use crate::permission::Settled;
use crate::session::Event;
use crate::tools::{Gap, Tool, ToolContext, ToolOutput};

/// How long a tool that was told to stop may take to end by itself, before it is dropped.
/// `Bash` needs this much to end its children politely, then otherwise, and to collect what they wrote.
const TOOL_GRACE: Duration = Duration::from_millis(700);
/// A tool keeps its own timeout, and can say what came until then; the loop's comes this much later.
const BACKSTOP: Duration = Duration::from_millis(500);

/// Counts how often the same call was made in a row.
pub(super) struct Repeats {
    max: usize,
    last: String,
    count: usize,
    reached: bool,
}

impl Repeats {
    pub fn new(max: usize) -> Self {
        Repeats { max, last: String::new(), count: 0, reached: false }
    }

    fn count(&mut self, key: String) {
        self.count = if key == self.last { self.count + 1 } else { 1 };
        self.last = key;
        self.reached |= self.count >= self.max;
    }
}

/// What is to be done for one call.
enum Prepared {
    Run { tool: Arc<dyn Tool>, arguments: Value },
    Answer { outcome: CallOutcome, output: ToolOutput },
}

impl Prepared {
    fn error(outcome: CallOutcome, text: impl Into<String>) -> Self {
        let output = match outcome {
            CallOutcome::Refused | CallOutcome::NotRun => ToolOutput::final_error(text),
            _ => ToolOutput::error(text),
        };
        Prepared::Answer { outcome, output }
    }
}

/// What came of one call.
struct Done {
    outcome: CallOutcome,
    output: ToolOutput,
    duration: Duration,
}

impl Run<'_, '_> {
    /// Gives every call its result, in order. `Err` is the end of the task; the results are there all the same.
    pub async fn answer_calls(&mut self, calls: &[ToolCall]) -> Result<(), End> {
        let mut rest = calls;
        while let Some(first) = rest.first() {
            let parallel = |call: &ToolCall| self.agent.toolbox.read_only(&call.name);
            let length = if parallel(first) { rest.iter().take_while(|call| parallel(call)).count() } else { 1 };
            let (group, after) = rest.split_at(length);
            self.answer_group(group, after.is_empty()).await?;
            rest = after;
        }
        if let Some(reason) = self.stop.reason() {
            return Err(End::stopped(reason, String::new()));
        }
        if self.repeats.reached {
            let error = format!(
                "the same call was made {} times in a row ({}); ask in other words, or raise --max-repeats",
                self.repeats.count, self.repeats.last
            );
            return Err(End { reason: StopReason::MaxRepeats, error, partial: String::new() });
        }
        Ok(())
    }

    /// Runs calls that do not get in each other's way: one, or several that only read.
    async fn answer_group(&mut self, calls: &[ToolCall], last_of_step: bool) -> Result<(), End> {
        let mut prepared = Vec::with_capacity(calls.len());
        for call in calls {
            prepared.push(self.prepare(call).await?);
        }
        self.log_starts(calls, &prepared)?;
        let running: Vec<_> = prepared.into_iter().map(|prepared| self.start(prepared)).collect();
        for (at, (call, running)) in calls.iter().zip(running).enumerate() {
            // They run already; here they are only collected, in the order of the calls.
            let done = running.await.unwrap_or_else(|error| Done {
                outcome: CallOutcome::Panicked,
                output: ToolOutput::error(format!("error: {error}")),
                duration: Duration::ZERO,
            });
            let reminded =
                last_of_step && at + 1 == calls.len() && self.agent.settings.habits.reminder == ReminderAt::AfterResult;
            let reminder = reminded.then(|| match (done.outcome, done.output.led_nowhere) {
                (CallOutcome::Refused, _) => guard::own_words(guard::Answer::Refused).to_owned(),
                (_, true) => guard::retry(&self.question(), done.output.is_error),
                (_, false) => guard::reminder(&self.question(), self.effect(call)),
            });
            self.log_result(call, done, reminder)?;
        }
        Ok(())
    }

    /// Results for calls that will not run at all.
    pub fn leave_calls(&mut self, calls: &[ToolCall], why: &str) -> Result<(), End> {
        for call in calls {
            let output = ToolOutput::error(why);
            self.log_result(call, Done { outcome: CallOutcome::NotRun, output, duration: Duration::ZERO }, None)?;
        }
        Ok(())
    }

    async fn prepare(&mut self, call: &ToolCall) -> Result<Prepared, End> {
        if self.stop.reason().is_some() {
            return Ok(Prepared::error(CallOutcome::NotRun, "interrupted before it ran"));
        }
        if self.repeats.reached {
            return Ok(Prepared::error(CallOutcome::NotRun, "not run: the same call was made too often in a row"));
        }
        let key = guard::key(call);
        let answered = self.agent.settings.guard && self.answered().contains_key(&key);
        self.repeats.count(key);
        let toolbox = &self.agent.toolbox;
        let Some(entry) = toolbox.find(&call.name) else {
            return Ok(Prepared::error(CallOutcome::UnknownTool, toolbox.unknown(&call.name)));
        };
        if let Err(text) = entry.check(&call.arguments) {
            return Ok(Prepared::error(CallOutcome::BadArguments, text));
        }
        if answered {
            let text = format!(
                "already answered above: {} was called with these arguments before, and nothing has changed since. Use \
                 that result.",
                call.name
            );
            return Ok(Prepared::Answer { outcome: CallOutcome::Repeated, output: ToolOutput::ok(text) });
        }
        let tool = entry.tool.clone();
        let context = self.tool_context();
        let access = match catch_unwind(AssertUnwindSafe(|| tool.access(&call.arguments, &context))) {
            Ok(Ok(access)) => access,
            Ok(Err(why)) => return Ok(Prepared::error(CallOutcome::BadArguments, format!("error: {why}"))),
            Err(panic) => {
                return Ok(Prepared::error(CallOutcome::Panicked, panicked(&call.name, &panic_text(&*panic))));
            }
        };
        let settled = tokio::select! {
            biased;
            settled = self.agent.permissions.settle(&call.name, &call.arguments, &access) => settled,
            _ = self.stop.requested(Duration::ZERO) => {
                return Ok(Prepared::error(CallOutcome::NotRun, "interrupted before it ran"));
            }
        };
        match settled {
            Settled::Allowed { .. } => Ok(Prepared::Run { tool, arguments: call.arguments.clone() }),
            Settled::Refused { why, would_allow, text } => {
                let (call_id, name) = (call.id.clone(), call.name.clone());
                self.refuse(Refusal { call_id, name, why, would_allow })?;
                Ok(Prepared::error(CallOutcome::Refused, text))
            }
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> Result<(), End> {
        (self.observer)(&AgentEvent::Refused(refusal.clone()));
        let Refusal { call_id, name, why, would_allow } = refusal.clone();
        self.outcome.refusals.push(refusal);
        self.log(Event::Refused { call_id, name, why, would_allow })
    }

    /// On the disk before any of them runs.
    fn log_starts(&mut self, calls: &[ToolCall], prepared: &[Prepared]) -> Result<(), End> {
        let starting =
            || calls.iter().zip(prepared).filter(|(_, p)| matches!(p, Prepared::Run { .. })).map(|(call, _)| call);
        for call in starting() {
            self.log(Event::ToolStarted { call_id: call.id.clone() })?;
        }
        if starting().next().is_some() {
            self.session.sync()?;
        }
        for call in starting() {
            let ToolCall { id, name, arguments, .. } = call.clone();
            (self.observer)(&AgentEvent::ToolStarted { id, name, arguments });
        }
        Ok(())
    }

    fn start(&self, prepared: Prepared) -> Aborting<Done> {
        match prepared {
            Prepared::Answer { outcome, output } => {
                Aborting::spawn(async move { Done { outcome, output, duration: Duration::ZERO } })
            }
            Prepared::Run { tool, arguments } => {
                let (model, tokens_max) = (self.agent.model.clone(), self.agent.settings.result_tokens_max);
                let fitting = Fitting { tool, model, tokens_max };
                Aborting::spawn(run_tool(fitting, arguments, self.tool_context(), self.stop.clone()))
            }
        }
    }

    pub fn tool_context(&self) -> ToolContext {
        ToolContext {
            cwd: self.agent.cwd.clone(),
            cancel: self.stop.token().child_token(),
            timeout: self.agent.settings.tool_timeout,
            files: self.agent.files.clone(),
            // No token is shorter than a byte, and few texts have more than eight bytes a token.
            output_bytes_max: self.agent.settings.result_tokens_max.saturating_mul(8),
        }
    }

    fn log_result(&mut self, call: &ToolCall, done: Done, reminder: Option<String>) -> Result<(), End> {
        let Done { outcome, output, duration } = done;
        let (tokens_max, gap) = (self.agent.settings.result_tokens_max, output.gap.as_ref());
        let (text, cut) = bound(&output.text, gap, tokens_max, |text| self.agent.model.count_tokens(text));
        if let Some(tokens) = cut {
            let more = if gap.is_some() { "more than " } else { "" };
            self.note(format!(
                "the result of {} ({}) had {more}{tokens} tokens; its middle was cut to keep {}",
                call.name, call.id, self.agent.settings.result_tokens_max
            ))?;
        }
        let duration_ms = duration.as_millis() as u64;
        let ToolCall { id, name, arguments, rescued } = call.clone();
        let is_error = output.is_error;
        let led_nowhere = output.led_nowhere;
        let result =
            ToolResult { call_id: id.clone(), name: name.clone(), text: text.clone(), is_error, led_nowhere, reminder };
        let logged = self.log(Event::ToolResult { result, duration_ms });
        // It ran, whether or not that could be written down.
        let report = CallReport { id, name, arguments, outcome, rescued };
        self.outcome.calls.push(report.clone());
        (self.observer)(&AgentEvent::ToolFinished { report, is_error, text, duration_ms });
        logged
    }
}

/// A tool, and how long its result may be.
struct Fitting {
    tool: Arc<dyn Tool>,
    model: Arc<dyn LanguageModel>,
    tokens_max: usize,
}

impl Fitting {
    /// Where the result of a tool that only reads has too many tokens, it runs again with less room: it alone knows how to say what
    /// it leaves out, and where to go on.
    async fn run(&self, arguments: Value, mut context: ToolContext) -> ToolOutput {
        let output = self.tool.run(arguments.clone(), &context).await;
        if output.text.len() <= self.tokens_max || !self.tool.read_only() || output.is_error {
            return output;
        }
        let tokens = self.model.count_tokens(&output.text);
        if tokens <= self.tokens_max {
            return output;
        }
        // A little less than its share, since tokens are not spread evenly.
        context.output_bytes_max = output.text.len() * self.tokens_max / tokens * 9 / 10;
        self.tool.run(arguments, &context).await
    }
}

/// Runs one tool on a task of its own, so that a panic or a loop without awaits stays its own.
async fn run_tool(fitting: Fitting, arguments: Value, context: ToolContext, stop: Stop) -> Done {
    let begin = Instant::now();
    let name = fitting.tool.spec().name.clone();
    let (cancel, timeout) = (context.cancel.clone(), context.timeout);
    let mut task = Aborting::spawn(async move { fitting.run(arguments, context).await });
    let finished = |outcome, output| Done { outcome, output, duration: begin.elapsed() };
    let ran_to_end = |joined: Result<ToolOutput, tokio::task::JoinError>| match joined {
        Ok(output) => {
            let outcome = match (output.is_error, stop.reason()) {
                (false, _) => CallOutcome::Ok,
                (true, None) => CallOutcome::Failed,
                // It ended because it was told to.
                (true, Some(_)) => CallOutcome::Interrupted,
            };
            finished(outcome, output)
        }
        Err(error) if error.is_panic() => {
            let text = panicked(&name, &panic_text(&*error.into_panic()));
            finished(CallOutcome::Panicked, ToolOutput::error(text))
        }
        Err(_) => finished(CallOutcome::Interrupted, ToolOutput::error("interrupted, may have run")),
    };
    let (outcome, text) = tokio::select! {
        biased;
        joined = &mut task => return ran_to_end(joined),
        _ = stop.requested(Duration::ZERO) => (CallOutcome::Interrupted, "interrupted, may have run".to_owned()),
        () = tokio::time::sleep(timeout.saturating_add(BACKSTOP)) => (
            CallOutcome::TimedOut,
            format!(
                "error: {name} did not end within {} s and was stopped; it may have had effects. Try something smaller or faster.",
                timeout.as_secs_f64()
            ),
        ),
    };
    cancel.cancel();
    // What the tool still says when it is told to stop is worth more than our own words alone.
    let text = match tokio::time::timeout(TOOL_GRACE, &mut task).await {
        Ok(Ok(output)) => format!("{text}\n{}", output.text),
        _ => text,
    };
    finished(outcome, ToolOutput::error(text))
}

fn panicked(name: &str, text: &str) -> String {
    format!("error: {name} has a fault and broke off ({text}). Try other arguments, or go on without it.")
}

/// Keeps the head and the tail of a text with more than `tokens_max` tokens, and says in between what was cut, the `gap`
/// that was there before included. The number is that of the whole text, where it was cut.
fn bound(text: &str, gap: Option<&Gap>, tokens_max: usize, count: impl Fn(&str) -> usize) -> (String, Option<usize>) {
    // A token has at least one byte.
    if text.len() <= tokens_max {
        return (text.to_owned(), None);
    }
    let tokens = count(text);
    if tokens <= tokens_max {
        return (text.to_owned(), None);
    }
    let keep = |share: usize| tokens_max.saturating_mul(share) / 3;
    let (before, after, gone) = match gap {
        Some(Gap { at, bytes }) => (&text[..at.start], &text[at.end..], *bytes),
        None => (text, text, 0),
    };
    let head = &before[..longest(before, |end| count(&before[..end]) <= keep(2))];
    let start = longest_tail(after, |start| count(&after[start..]) <= keep(1));
    let tail = &after[if gap.is_some() { start } else { start.max(head.len()) }..];
    let there = gap.map_or(text.len(), |gap| text.len() - gap.at.len());
    let cut = gone + (there - head.len() - tail.len()) as u64;
    (format!("{head}\n[… {cut} bytes of the middle are cut here: {tokens_max} tokens fit …]\n{tail}"), Some(tokens))
}

/// The largest character boundary for which `fits` holds, where it holds for all smaller ones.
fn longest(text: &str, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, text.len());
    while low < high {
        let middle = text.ceil_char_boundary(low + (high - low).div_ceil(2));
        if fits(middle) {
            low = middle;
        } else {
            high = text.floor_char_boundary(middle - 1);
        }
    }
    low
}

/// The smallest character boundary for which `fits` holds, where it holds for all larger ones.
fn longest_tail(text: &str, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, text.len());
    while low < high {
        let middle = text.floor_char_boundary(low + (high - low) / 2);
        if fits(middle) {
            high = middle;
        } else {
            low = text.ceil_char_boundary(middle + 1);
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_bounded_at_characters() {
        // Three tokens a character, as in text that a tokenizer knows badly.
        let count = |text: &str| text.chars().count() * 3;
        for text in [
            "abcdefghijklmnopqrstuvwxyz",
            "Trời Hà Nội có mưa không? Có.",
            "🐴🐴🐴🐴🐴🐴🐴🐴🐴🐴🐴",
            "漢字漢字漢字漢字漢字漢字",
        ] {
            for tokens_max in 0..40 {
                let (bounded, cut) = bound(text, None, tokens_max, count);
                let Some(tokens) = cut else {
                    assert_eq!(bounded, text);
                    assert!(count(text) <= tokens_max || text.len() <= tokens_max, "{text} {tokens_max}");
                    continue;
                };
                assert_eq!(tokens, count(text));
                let (head, tail) = bounded.split_once("\n[… ").unwrap();
                let tail = tail.split_once("…]\n").unwrap().1;
                assert!(text.starts_with(head) && text.ends_with(tail), "{bounded}");
                assert!(count(head) + count(tail) <= tokens_max, "{bounded}");
                assert!(count(head) + count(tail) + 6 > tokens_max.saturating_sub(3), "{tokens_max}: {bounded}");
            }
        }
    }

    /// What a tool had left out before is counted with what is left out now.
    #[test]
    fn a_gap_grows() {
        let text = "aaaaaaaaaa[gap]bbbbbbbbbb";
        let gap = Gap { at: 10..15, bytes: 1000 };
        let count = |text: &str| text.len();
        assert_eq!(bound(text, Some(&gap), 25, count), (text.to_owned(), None));
        let cut = "aaaaaaaa\n[… 1008 bytes of the middle are cut here: 12 tokens fit …]\nbbbb";
        assert_eq!(bound(text, Some(&gap), 12, count), (cut.to_owned(), Some(25)));
    }
}
