//! One task: the main path of the loop.

use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::call::Repeats;
use super::task::catch_panic;
use super::{Agent, AgentEvent, Observer, Outcome, Stop, guard};
use crate::chat::{Completion, CompletionRequest, Delta, ModelError};
use crate::context;
use crate::message::{AssistantMessage, FinishReason, StopReason, ToolCall, ToolChoice, Usage};
use crate::permission::Access;
use crate::session::{Event, Session, SessionError};

/// How long a completion that was told to stop may take to end by itself.
const COMPLETION_GRACE: Duration = Duration::from_millis(500);

/// Why a session does not go on without a task.
pub const NOTHING_LEFT: &str = "the session has nothing left to do; give it a task";

/// Why a task ends without an answer.
pub(super) struct End {
    pub reason: StopReason,
    pub error: String,
    /// The text of the reply as far as it came.
    pub partial: String,
}

impl End {
    fn new(reason: StopReason, error: impl Into<String>) -> Self {
        End { reason, error: error.into(), partial: String::new() }
    }

    pub fn stopped(reason: StopReason, partial: String) -> Self {
        let error = match reason {
            StopReason::Timeout => "the task's time was up; raise --timeout or ask for less",
            StopReason::Terminated => "terminated; the session can be resumed",
            _ => "interrupted; the session can be resumed",
        };
        End { reason, error: error.into(), partial }
    }
}

impl From<SessionError> for End {
    fn from(error: SessionError) -> Self {
        End::new(StopReason::Failed, error.to_string())
    }
}

impl Agent {
    /// Runs one task to its end. `task` is the user's text; with `None` the session goes on where it stopped.
    /// Whatever happens is in the outcome, and in the session as far as it can still be written.
    pub async fn run(
        &self,
        session: &mut Session,
        task: Option<&str>,
        stop: &Stop,
        observer: &mut Observer<'_>,
    ) -> Outcome {
        let _deadline = self.settings.timeout.map(|timeout| stop.after(timeout));
        let mut run = Run::new(self, session, stop, observer);
        let end = match run.begin(task) {
            Ok(()) => run.steps().await,
            Err(end) => Err(end),
        };
        run.finish(end)
    }
}

/// The state of one task.
pub(super) struct Run<'a, 'o> {
    pub agent: &'a Agent,
    pub session: &'a mut Session,
    pub stop: &'a Stop,
    pub observer: &'a mut Observer<'o>,
    pub outcome: Outcome,
    pub repeats: Repeats,
    /// Notes of completions that were already passed on.
    said: HashSet<String>,
}

/// A reply that only repeats.
struct Repeat {
    /// The last result: the reminder goes there.
    call_id: String,
    /// None of the repeated calls had led anywhere.
    useless: bool,
}

impl<'a, 'o> Run<'a, 'o> {
    fn new(agent: &'a Agent, session: &'a mut Session, stop: &'a Stop, observer: &'a mut Observer<'o>) -> Self {
        let outcome = Outcome {
            stop_reason: StopReason::Failed,
            answer: String::new(),
            turns: 0,
            calls: Vec::new(),
            refusals: Vec::new(),
            usage: Usage::default(),
            error: None,
        };
        let repeats = Repeats::new(agent.settings.max_repeats);
        Run { agent, session, stop, observer, outcome, repeats, said: HashSet::new() }
    }

    fn begin(&mut self, task: Option<&str>) -> Result<(), End> {
        match task {
            Some(text) => self.log(Event::User { text: text.to_owned() }),
            None if self.session.is_unfinished() => Ok(()),
            None => Err(End::new(StopReason::Refused, NOTHING_LEFT)),
        }
    }

    async fn steps(&mut self) -> Result<String, End> {
        for _ in 0..self.agent.settings.max_turns {
            let message = self.step().await?;
            if message.calls.is_empty() {
                return Ok(message.text);
            }
            self.answer_calls(&message.calls).await?;
        }
        let turns = self.agent.settings.max_turns;
        Err(End::new(StopReason::MaxTurns, format!("no answer after {turns} turns; raise --max-turns or ask for less")))
    }

    /// One reply of the model, logged. A reply that only repeats is thrown away: where the repeated call led nowhere, its tool is
    /// withheld and another one asked for; where it was answered, or the model insists, calls are masked out. So
    /// they are after a reply that is no answer.
    async fn step(&mut self) -> Result<AssistantMessage, End> {
        let mut reply = self.complete(self.tool_choice(), Vec::new()).await?;
        if let Some(repeat) = self.repeated(&reply)
            && repeat.useless
        {
            let names: Vec<String> = reply.message.calls.iter().map(|call| call.name.clone()).collect();
            if self.agent.toolbox.specs().iter().any(|spec| !names.contains(&spec.name)) {
                self.discard(reply, repeat.call_id, guard::retry(&self.question(), true), names.clone())?;
                reply = self.complete(ToolChoice::Auto, names).await?;
            }
        }
        if let Some(repeat) = self.repeated(&reply) {
            self.discard(reply, repeat.call_id, guard::reminder(&self.question(), guard::Effect::Reads), Vec::new())?;
            reply = self.complete(ToolChoice::None, Vec::new()).await?;
        }
        if let Some((call_id, last)) = self.unanswered(&reply) {
            self.discard(reply, call_id, guard::own_words(last).into(), Vec::new())?;
            reply = self.complete(ToolChoice::None, Vec::new()).await?;
            if self.unanswered(&reply).is_some() {
                self.note("this is no answer of the model's own; the last result says what was done".into())?;
            }
        }
        self.record(reply)
    }

    fn tool_choice(&self) -> ToolChoice {
        let asked = &self.agent.settings.tool_choice;
        let first = self.outcome.turns == 0;
        if first || *asked == ToolChoice::None { asked.clone() } else { ToolChoice::Auto }
    }

    async fn complete(&mut self, tool_choice: ToolChoice, withheld: Vec<String>) -> Result<Completion, End> {
        if let Some(reason) = self.stop.reason() {
            return Err(End::stopped(reason, String::new()));
        }
        let request = self.request(tool_choice, withheld);
        let mut text = String::new();
        let mut sink = |delta: Delta| {
            let event = match delta {
                Delta::Prefill { done, total } => AgentEvent::Prefill { done, total },
                Delta::Text(piece) => {
                    text.push_str(&piece);
                    AgentEvent::Text { text: piece }
                }
                Delta::CallStarted { name, rescued } => AgentEvent::CallOpened { name, rescued },
            };
            (self.observer)(&event);
        };
        let result = tokio::select! {
            biased;
            result = catch_panic(self.agent.model.complete(request, &mut sink)) => result,
            reason = self.stop.requested(COMPLETION_GRACE) => return Err(End::stopped(reason, text)),
        };
        let completion = result
            .map_err(|panic| End::new(StopReason::Failed, format!("the model panicked: {panic}")))?
            .map_err(model_error)?;
        self.outcome.usage.add(&completion.usage);
        for note in &completion.notes {
            if self.said.insert(note.clone()) {
                (self.observer)(&AgentEvent::Note { text: note.clone() });
            }
        }
        if completion.finish == FinishReason::Cancelled {
            let partial = completion.message.text;
            return Err(match self.stop.reason() {
                Some(reason) => End::stopped(reason, partial),
                None => {
                    End { partial, ..End::new(StopReason::Failed, "the model ended the reply without being asked to") }
                }
            });
        }
        Ok(completion)
    }

    fn request(&self, tool_choice: ToolChoice, withheld: Vec<String>) -> CompletionRequest {
        let settings = &self.agent.settings;
        // Every reply of a session draws from its own stream, which the log determines.
        let replies =
            self.session.events().filter(|e| matches!(e, Event::Assistant { .. } | Event::RepeatGuarded { .. }));
        let mut sampling = settings.sampling;
        sampling.seed = sampling.seed.wrapping_add(replies.count() as u64);
        CompletionRequest {
            messages: context::messages(self.session.events()),
            tools: self.agent.toolbox.specs().to_vec(),
            prose: tool_choice == ToolChoice::None && settings.tool_choice != ToolChoice::None,
            tool_choice,
            withheld,
            routing: settings.habits.routing,
            optional_margin: settings.habits.optional_margin,
            sampling,
            max_output_tokens: settings.max_output_tokens,
            rescue: settings.rescue,
            cancel: self.stop.token().clone(),
        }
    }

    /// Whether the reply consists of calls that are already answered.
    fn repeated(&self, reply: &Completion) -> Option<Repeat> {
        let calls = &reply.message.calls;
        if !self.agent.settings.guard || calls.is_empty() || reply.finish == FinishReason::Length {
            return None;
        }
        let answered = self.answered();
        let answers: Option<Vec<_>> = calls.iter().map(|call| answered.get(&guard::key(call)).copied()).collect();
        let useless = answers?.into_iter().all(|answer| answer == guard::Answer::Useless);
        let (call_id, _) = guard::last_answer(self.session.events())?;
        Some(Repeat { call_id: call_id.to_owned(), useless })
    }

    /// Where a reply after a result is no answer: the result's call, and what it gave.
    fn unanswered(&self, reply: &Completion) -> Option<(String, guard::Answer)> {
        let message = &reply.message;
        if !self.agent.settings.guard
            || !message.calls.is_empty()
            || !guard::is_no_answer(&message.text, &self.question())
        {
            return None;
        }
        let (call_id, answer) = guard::last_answer(self.session.events())?;
        Some((call_id.to_owned(), answer))
    }

    pub fn answered(&self) -> BTreeMap<String, guard::Answer> {
        guard::answered(self.session.events(), |call| self.effect(call))
    }

    pub fn effect(&self, call: &ToolCall) -> guard::Effect {
        let Some(entry) = self.agent.toolbox.find(&call.name) else { return guard::Effect::Runs };
        if entry.tool.read_only() {
            return guard::Effect::Reads;
        }
        let context = self.tool_context();
        let access = catch_unwind(AssertUnwindSafe(|| entry.tool.access(&call.arguments, &context)));
        match access {
            Ok(Ok(access)) if !access.is_empty() && access.iter().all(|a| matches!(a, Access::Write(_))) => {
                guard::Effect::Writes
            }
            _ => guard::Effect::Runs,
        }
    }

    /// Throws a reply away. `withheld`: the tools that the next reply may not call; none of them where it may call none at all.
    fn discard(
        &mut self,
        reply: Completion,
        call_id: String,
        reminder: String,
        withheld: Vec<String>,
    ) -> Result<(), End> {
        let (calls, usage) = (reply.message.calls, reply.usage);
        let (shown, said, names) = (calls.clone(), reminder.clone(), withheld.clone());
        (self.observer)(&AgentEvent::RepeatGuarded { calls: shown, reminder: said, withheld: names });
        self.log(Event::RepeatGuarded { calls, call_id, reminder, withheld, usage })
    }

    /// What the user asked last.
    pub fn question(&self) -> String {
        let question = self.session.events().rev().find_map(|event| match event {
            Event::User { text } => Some(text.as_str()),
            _ => None,
        });
        question.unwrap_or_default().to_owned()
    }

    /// Numbers the calls of a reply and logs it. A reply that was cut by the output limit ends the task.
    fn record(&mut self, reply: Completion) -> Result<AssistantMessage, End> {
        let Completion { mut message, finish, usage, notes } = reply;
        let first = self.session.call_count();
        for (at, call) in message.calls.iter_mut().enumerate() {
            call.id = format!("call_{}", first + at);
        }
        self.outcome.turns += 1;
        self.log(Event::Assistant { message: message.clone(), finish, usage, notes })?;
        let (text, calls) = (message.text.clone(), message.calls.clone());
        (self.observer)(&AgentEvent::Assistant { turn: self.outcome.turns, text, calls, finish, usage });
        if finish != FinishReason::Length {
            return Ok(message);
        }
        self.leave_calls(&message.calls, "not run: the reply was cut by the limit on its length")?;
        let error = format!(
            "the reply was cut at {} tokens; raise --max-output-tokens or ask for less",
            self.agent.settings.max_output_tokens
        );
        Err(End { partial: message.text, ..End::new(StopReason::MaxOutputTokens, error) })
    }

    pub fn log(&mut self, event: Event) -> Result<(), End> {
        self.session.append(event)?;
        Ok(())
    }

    pub fn note(&mut self, text: String) -> Result<(), End> {
        (self.observer)(&AgentEvent::Note { text: text.clone() });
        self.log(Event::Note { text })
    }

    fn finish(mut self, end: Result<String, End>) -> Outcome {
        let (reason, error, partial) = match end {
            Ok(answer) => {
                self.outcome.answer = answer;
                (StopReason::Answer, None, String::new())
            }
            Err(end) if end.reason == StopReason::MaxOutputTokens => {
                // The text is in the log already, as the assistant's.
                self.outcome.answer = end.partial;
                (end.reason, Some(end.error), String::new())
            }
            Err(end) => (end.reason, Some(end.error), end.partial),
        };
        self.outcome.stop_reason = reason;
        self.outcome.error = error.clone();
        let stopped = self.session.append(Event::Stopped { reason, error, partial }).map(|_| ());
        if let Err(failed) = stopped.and_then(|()| self.session.sync()) {
            // Where the task failed already, that error is the cause, and this one perhaps only its echo.
            if reason != StopReason::Failed {
                self.outcome.error = Some(failed.to_string());
            }
            self.outcome.stop_reason = StopReason::Failed;
        }
        self.outcome
    }
}

fn model_error(error: ModelError) -> End {
    let reason = match error {
        ModelError::Overflow { .. } => StopReason::ContextOverflow,
        ModelError::Refused(_) => StopReason::Refused,
        ModelError::Failed(_) => StopReason::Failed,
    };
    End::new(reason, error.to_string())
}
