//! The loop with a scripted model: what the model is given, what runs, what the log says, how it ends.

use std::collections::HashMap;
use std::fs;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use cob::agent::{Agent, AgentEvent, CallOutcome, Outcome, Settings, Stop, Toolbox};
use cob::chat::scripted::{Reply, Scripted};
use cob::chat::{CompletionRequest, LanguageModel};
use cob::context;
use cob::message::{Message, ReminderAt, Sampling, StopReason, ToolCall, ToolChoice, ToolResult, ToolSpec};
use cob::permission::{Access, Headless, Mode, Permissions, Rules};
use cob::session::{Event, RunInfo, Session};
use cob::tools::{Tool, ToolContext, ToolOutput};
use proptest::prelude::*;
use serde_json::{Value, json};

type Running = Pin<Box<dyn Future<Output = ToolOutput> + Send>>;

/// A tool whose work is a closure. What it is called with is counted.
struct Double {
    spec: ToolSpec,
    read_only: bool,
    access: fn(&Value) -> Result<Vec<Access>, String>,
    run: Box<dyn Fn(Value, ToolContext) -> Running + Send + Sync>,
    runs: Arc<AtomicUsize>,
}

#[async_trait]
impl Tool for Double {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }
    fn access(&self, arguments: &Value, _: &ToolContext) -> Result<Vec<Access>, String> {
        (self.access)(arguments)
    }
    fn read_only(&self) -> bool {
        self.read_only
    }
    async fn run(&self, arguments: Value, context: &ToolContext) -> ToolOutput {
        self.runs.fetch_add(1, Ordering::SeqCst);
        (self.run)(arguments, context.clone()).await
    }
}

fn double<F>(name: &str, read_only: bool, run: impl Fn(Value, ToolContext) -> F + Send + Sync + 'static) -> Double
where
    F: Future<Output = ToolOutput> + Send + 'static,
{
    let parameters = json!({
        "type": "object",
        "properties": {"of": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["of"],
        "additionalProperties": false,
    });
    let spec = ToolSpec { name: name.into(), description: String::new(), parameters };
    let run = Box::new(move |arguments, context| Box::pin(run(arguments, context)) as Running);
    Double { spec, read_only, access: |_| Ok(vec![]), run, runs: Arc::default() }
}

/// A tool that answers `NAME of OF`.
fn echo(name: &'static str, read_only: bool) -> Double {
    double(name, read_only, move |arguments, _| async move {
        ToolOutput::ok(format!("{name} of {}", arguments["of"].as_str().unwrap_or("?")))
    })
}

fn failing() -> Double {
    double("Fail", true, |_, _| async { ToolOutput::error("error: it never works. Try something else.") })
}

fn call(name: &str, of: &str) -> Reply {
    Reply::call(name, json!({"of": of}))
}

/// A reply with several calls.
fn calls(calls: &[(&str, Value)]) -> Reply {
    calls.iter().fold(Reply::default(), |reply, (name, arguments)| reply.and_call(*name, arguments.clone()))
}

/// A task under test: a model, tools, settings, and a session of its own.
struct Task {
    agent: Agent,
    session: Session,
    dir: tempfile::TempDir,
    /// What the model was asked, in order.
    requests: Arc<Mutex<Vec<CompletionRequest>>>,
    events: Vec<AgentEvent>,
    stop: Stop,
}

fn run_info() -> RunInfo {
    RunInfo {
        cob_version: "test".into(),
        model: Scripted::new([]).info(),
        sampling: Sampling::default(),
        cwd: "/".into(),
        tools: vec![],
        system: None,
        settings: Value::Null,
    }
}

impl Task {
    fn new(replies: impl IntoIterator<Item = Reply>, tools: impl IntoIterator<Item = Double>) -> Task {
        let mut replies = replies.into_iter().collect::<Vec<_>>().into_iter();
        Task::from_fn(move |_| replies.next(), tools)
    }

    fn from_fn(
        mut script: impl FnMut(&CompletionRequest) -> Option<Reply> + Send + 'static,
        tools: impl IntoIterator<Item = Double>,
    ) -> Task {
        let dir = tempfile::tempdir().unwrap();
        let requests: Arc<Mutex<Vec<CompletionRequest>>> = Arc::default();
        let asked = requests.clone();
        let model = Scripted::from_fn(move |request| {
            asked.lock().unwrap().push(request.clone());
            script(request)
        });
        let tools = tools.into_iter().map(|tool| Arc::new(tool) as Arc<dyn Tool>).collect();
        let (toolbox, left_out) = Toolbox::new(tools);
        assert!(left_out.is_empty(), "{left_out:?}");
        let rules = Rules::new(dir.path(), Mode::Default).unwrap();
        let agent = Agent {
            model: Arc::new(model),
            toolbox,
            permissions: Permissions::new(rules, Arc::new(Headless)),
            cwd: dir.path().to_owned(),
            files: Arc::default(),
            settings: Settings::default(),
        };
        let session = Session::create(&dir.path().join("sessions"), run_info()).unwrap();
        Task { agent, session, dir, requests, events: vec![], stop: Stop::new() }
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Task {
        change(&mut self.agent.settings);
        self
    }

    async fn run(&mut self, text: &str) -> Outcome {
        let events = &mut self.events;
        self.agent.run(&mut self.session, Some(text), &self.stop, &mut |event| events.push(event.clone())).await
    }

    fn messages(&self) -> Vec<Message> {
        context::messages(self.session.events())
    }

    fn results(&self) -> Vec<ToolResult> {
        let results = self.messages().into_iter().filter_map(|message| match message {
            Message::Tool(result) => Some(result),
            _ => None,
        });
        results.collect()
    }

    /// `OK text` or `ERR text` of each result, in order.
    fn result_lines(&self) -> Vec<String> {
        let line = |r: ToolResult| format!("{} {}", if r.is_error { "ERR" } else { "OK" }, r.text);
        self.results().into_iter().map(line).collect()
    }

    fn kinds(&self) -> Vec<String> {
        let kind = |record| serde_json::to_value(record).unwrap()["type"].as_str().unwrap().to_owned();
        self.session.records().iter().map(kind).collect()
    }

    fn choices(&self) -> Vec<ToolChoice> {
        self.requests.lock().unwrap().iter().map(|request| request.tool_choice.clone()).collect()
    }
}

fn outcomes(outcome: &Outcome) -> Vec<CallOutcome> {
    outcome.calls.iter().map(|call| call.outcome).collect()
}

/// Every call has exactly one result, right after its message, in order.
fn assert_paired(session: &Session) {
    let messages = context::messages(session.events());
    let mut pending: Vec<String> = Vec::new();
    for message in &messages {
        match message {
            Message::Tool(result) => assert_eq!(Some(&result.call_id), pending.first(), "{messages:#?}"),
            _ => assert!(pending.is_empty(), "{messages:#?}"),
        }
        match message {
            Message::Tool(_) => drop(pending.remove(0)),
            Message::Assistant(message) => pending = message.calls.iter().map(|call| call.id.clone()).collect(),
            _ => {}
        }
    }
    assert!(pending.is_empty(), "{messages:#?}");
    let results = session.events().filter(|event| matches!(event, Event::ToolResult { .. })).count();
    assert_eq!(results, messages.iter().filter(|message| matches!(message, Message::Tool(_))).count());
}

#[tokio::test]
async fn three_calls_in_one_step_give_three_results_in_order() {
    let reply = calls(&[("Read", json!({"of": "a"})), ("Read", json!("{\"of\": ")), ("Raed", json!({"of": "c"}))]);
    let mut task = Task::new([reply, Reply::text("done")], [echo("Write", false), echo("Read", true)]);
    let outcome = task.run("go").await;
    assert_eq!((outcome.stop_reason, outcome.answer.as_str(), outcome.turns), (StopReason::Answer, "done", 2));
    use CallOutcome::*;
    assert_eq!(outcomes(&outcome), [Ok, BadArguments, UnknownTool]);
    let messages = task.messages();
    let [Message::User { .. }, Message::Assistant(step), rest @ ..] = messages.as_slice() else {
        panic!("{messages:?}")
    };
    assert_eq!(step.calls.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), ["call_0", "call_1", "call_2"]);
    assert!(matches!(rest, [Message::Tool(_), Message::Tool(_), Message::Tool(_), Message::Assistant(_)]));
    insta::assert_snapshot!(task.result_lines().join("\n"), @r"
    OK Read of a
    ERR error: the arguments of Read are not a JSON object. It takes of (string, required), n (integer). Make the call again with correct arguments.
    ERR error: there is no tool `Raed`. The tools are: Read, Write. Call one of them, or answer without a tool.
    ");
    assert_eq!(task.requests.lock().unwrap()[1].messages, messages[..5]);
    assert_paired(&task.session);
}

#[tokio::test]
async fn wrong_arguments_are_named_and_the_tool_does_not_run() {
    let read = echo("Read", true);
    let runs = read.runs.clone();
    let reply = calls(&[
        ("Read", json!({"n": "x", "extra": 1})),
        ("Read", json!({"of": 5})),
        ("Read", json!([])),
        ("Read", json!({"of": "refuse"})),
    ]);
    let refuses = |arguments: &Value| match arguments["of"].as_str() {
        Some("refuse") => Err("`of` must be a file".to_owned()),
        _ => Ok(vec![]),
    };
    let mut task = Task::new([reply, Reply::text("ok")], [Double { access: refuses, ..read }]);
    assert_eq!(outcomes(&task.run("go").await), [CallOutcome::BadArguments; 4]);
    let results = task.result_lines();
    for part in ["\"of\" is a required property", "/n: \"x\" is not of type \"integer\"", "'extra' was unexpected"] {
        assert!(results[0].contains(part), "{part}: {}", results[0]);
    }
    assert!(results[1].contains("/of: 5 is not of type \"string\""), "{}", results[1]);
    assert_eq!(results[3], "ERR error: `of` must be a file");
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_tool_that_always_fails_ends_at_the_limit_of_turns() {
    let mut n = 0;
    let script = move |_: &CompletionRequest| {
        n += 1;
        Some(Reply::call("Fail", json!({"of": format!("try {n}")})))
    };
    let tool = failing();
    let runs = tool.runs.clone();
    let mut task = Task::from_fn(script, [tool]).with(|s| s.max_turns = 4);
    let outcome = task.run("go").await;
    assert_eq!((outcome.stop_reason, outcome.turns, outcome.answer.as_str()), (StopReason::MaxTurns, 4, ""));
    assert_eq!(outcome.error.as_deref(), Some("no answer after 4 turns; raise --max-turns or ask for less"));
    assert_eq!((task.requests.lock().unwrap().len(), runs.load(Ordering::SeqCst)), (4, 4));
    assert_paired(&task.session);
}

/// Each of the three waits until all three have begun: one after the other they would never end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_only_read_run_at_the_same_time() {
    let barrier = Arc::new(tokio::sync::Barrier::new(3));
    let read = double("Read", true, move |_, _| {
        let barrier = barrier.clone();
        async move {
            barrier.wait().await;
            ToolOutput::ok("met")
        }
    });
    let reply = calls(&[("Read", json!({"of": "a"})), ("Read", json!({"of": "b"})), ("Read", json!({"of": "c"}))]);
    let mut task = Task::new([reply, Reply::text("ok")], [read]);
    assert_eq!(outcomes(&task.run("go").await), [CallOutcome::Ok; 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_may_write_waits_for_those_before_it_and_holds_those_after_it() {
    let trace: Arc<Mutex<Vec<String>>> = Arc::default();
    let traced = |name: &'static str, read_only| {
        let trace = trace.clone();
        double(name, read_only, move |arguments, _| {
            let (trace, of) = (trace.clone(), arguments["of"].as_str().unwrap().to_owned());
            async move {
                trace.lock().unwrap().push(format!("+{of}"));
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                trace.lock().unwrap().push(format!("-{of}"));
                ToolOutput::ok(of)
            }
        })
    };
    let step = [("Read", "a"), ("Read", "b"), ("Write", "c"), ("Write", "d"), ("Read", "e")];
    let step: Vec<_> = step.map(|(name, of)| (name, json!({"of": of}))).into();
    let mut task = Task::new([calls(&step), Reply::text("ok")], [traced("Read", true), traced("Write", false)]);
    task.run("go").await;
    assert_eq!(task.result_lines(), ["OK a", "OK b", "OK c", "OK d", "OK e"]);
    let trace = trace.lock().unwrap();
    let mut reads = trace[..4].to_vec();
    reads.sort();
    assert_eq!(reads, ["+a", "+b", "-a", "-b"]);
    assert_eq!(trace[4..], ["+c", "-c", "+d", "-d", "+e", "-e"]);
}

#[tokio::test]
async fn a_panic_in_a_tool_is_a_result() {
    let run = double("Break", true, |_, _| async { panic!("index out of bounds") });
    let access = Double { access: |_| panic!("no path"), ..echo("Check", true) };
    let step = calls(&[("Break", json!({"of": "a"})), ("Check", json!({"of": "b"})), ("Read", json!({"of": "c"}))]);
    let mut task = Task::new([step, Reply::text("went on")], [run, access, echo("Read", true)]);
    let outcome = task.run("go").await;
    use CallOutcome::*;
    assert_eq!((outcome.stop_reason, outcomes(&outcome)), (StopReason::Answer, vec![Panicked, Panicked, Ok]));
    let results = task.result_lines();
    assert!(results[0].contains("Break has a fault and broke off (index out of bounds)"), "{results:?}");
    assert!(results[1].contains("Check has a fault and broke off (no path)"), "{results:?}");
}

#[tokio::test]
async fn a_panic_in_the_model_is_a_failure_and_the_log_says_so() {
    let mut task = Task::from_fn(|_| panic!("shape mismatch"), []);
    let outcome = task.run("go").await;
    assert_eq!(outcome.stop_reason, StopReason::Failed);
    assert_eq!(outcome.error.as_deref(), Some("the model panicked: shape mismatch"));
    assert_eq!(task.kinds(), ["init", "user", "stopped"]);
}

#[tokio::test]
async fn a_tool_that_is_too_slow_is_stopped_and_the_loop_goes_on() {
    let deaf = double("Deaf", false, |_, _| std::future::pending());
    let hears = double("Hears", false, |_, context| async move {
        context.cancel.cancelled().await;
        ToolOutput::ok("three lines until then")
    });
    let step = calls(&[("Deaf", json!({"of": "a"})), ("Hears", json!({"of": "b"}))]);
    let mut task =
        Task::new([step, Reply::text("ok")], [deaf, hears]).with(|s| s.tool_timeout = Duration::from_millis(20));
    let outcome = task.run("go").await;
    assert_eq!((outcome.stop_reason, outcomes(&outcome)), (StopReason::Answer, vec![CallOutcome::TimedOut; 2]));
    let results = task.result_lines();
    assert!(results[0].starts_with("ERR error: Deaf did not end within 0.02 s and was stopped"), "{results:?}");
    assert!(results[1].ends_with("\nthree lines until then"), "{results:?}");
}

#[tokio::test]
async fn every_end_of_a_reply_has_its_reason() {
    let check = async |reply: Reply, change: fn(&mut Settings), expected: StopReason, error: &str| {
        let mut task = Task::new([reply], [echo("Read", true)]).with(change);
        let outcome = task.run("go").await;
        assert_eq!(outcome.stop_reason, expected);
        assert!(outcome.error.as_deref().unwrap_or("").contains(error), "{outcome:?}");
        let last = task.session.events().last().cloned();
        assert!(matches!(last, Some(Event::Stopped { reason, .. }) if reason == expected), "{last:?}");
        assert_paired(&task.session);
        outcome
    };
    let none = |_: &mut Settings| {};
    check(Reply::text("a"), none, StopReason::Answer, "").await;
    check(Reply::failure("out of memory"), none, StopReason::Failed, "out of memory").await;
    check(Reply::text("a"), |s| s.max_output_tokens = 40_000, StopReason::ContextOverflow, "reserved output").await;
    let cut = Reply { cut: true, ..Reply::text("half an ans") };
    let outcome = check(cut, none, StopReason::MaxOutputTokens, "raise --max-output-tokens").await;
    assert_eq!(outcome.answer, "half an ans");
    let cut = Reply { cut: true, ..call("Read", "a") };
    let outcome = check(cut, none, StopReason::MaxOutputTokens, "cut at 1024 tokens").await;
    assert_eq!(outcomes(&outcome), [CallOutcome::NotRun]);
    // The script has one reply, and the loop asks for another.
    check(call("Read", "a"), none, StopReason::Failed, "no reply left").await;
}

#[tokio::test]
async fn a_write_that_is_not_allowed_is_refused_and_says_what_would_allow_it() {
    let write = Double { access: |_| Ok(vec![Access::Write("out.txt".into())]), ..echo("Write", false) };
    let runs = write.runs.clone();
    let mut task = Task::new([call("Write", "a"), Reply::text("I may not")], [write]);
    let outcome = task.run("go").await;
    assert_eq!((outcome.stop_reason, outcomes(&outcome)), (StopReason::Answer, vec![CallOutcome::Refused]));
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    let refusal = &outcome.refusals[0];
    assert_eq!((refusal.call_id.as_str(), refusal.name.as_str()), ("call_0", "Write"));
    assert!(!refusal.would_allow.is_empty());
    assert!(task.results()[0].text.contains("--allow"), "{:?}", task.results());
    assert_eq!(task.kinds(), ["init", "user", "assistant", "refused", "tool_result", "assistant", "stopped"]);
}

#[tokio::test]
async fn a_repeated_call_is_thrown_away_and_the_answer_asked_for() {
    // The same arguments in another order of keys.
    let again = Reply::call("Read", json!({"n": 1, "of": "a"}));
    let replies = [Reply::call("Read", json!({"of": "a", "n": 1})), again, Reply::text("58"), Reply::text("hello")];
    let read = echo("Read", true);
    let runs = read.runs.clone();
    let mut task = Task::new(replies, [read]);
    let outcome = task.run("How many lines?").await;
    assert_eq!((outcome.answer.as_str(), outcome.turns, outcome.calls.len()), ("58", 2, 1));
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert_eq!(task.choices(), [ToolChoice::Auto, ToolChoice::Auto, ToolChoice::None]);
    let expected =
        ["init", "user", "assistant", "tool_started", "tool_result", "repeat_guarded", "assistant", "stopped"];
    assert_eq!(task.kinds(), expected);
    let last_result = |n: usize| match task.requests.lock().unwrap()[n].messages.last().cloned() {
        Some(Message::Tool(result)) => result.reminder,
        other => panic!("{other:?}"),
    };
    assert_eq!(last_result(1), None);
    assert_eq!(last_result(2).as_deref(), Some("answer the question now: How many lines?"));
    // The reminder stays where it was, so that the next prompt begins as this one did.
    task.run("Hello!").await;
    let requests = task.requests.lock().unwrap();
    assert_eq!(requests[3].messages[..3], requests[2].messages[..3]);
    assert_eq!(requests[3].tool_choice, ToolChoice::Auto);
}

#[tokio::test]
async fn a_repeated_call_that_led_nowhere_makes_room_for_another() {
    let check = async |replies: &[Reply], expected: &str, withheld: &[&[&str]], guarded: usize| {
        let mut task = Task::new(replies.to_vec(), [echo("Read", true), failing()]);
        let outcome = task.run("go").await;
        assert_eq!(outcome.answer, expected);
        let requests = task.requests.lock().unwrap();
        assert_eq!(requests.iter().map(|request| request.withheld.clone()).collect::<Vec<_>>(), withheld);
        drop(requests);
        assert_eq!(task.kinds().iter().filter(|kind| *kind == "repeat_guarded").count(), guarded);
    };
    let (fail, read) = (call("Fail", "a"), call("Read", "a"));
    // Another tool is called, and its result answers.
    check(&[fail.clone(), fail.clone(), read.clone(), Reply::text("58")], "58", &[&[], &[], &["Fail"], &[]], 1).await;
    // The model insists: calls are masked out.
    check(&[fail.clone(), fail.clone(), fail.clone(), Reply::text("no")], "no", &[&[], &[], &["Fail"], &[]], 2).await;
    // What was answered is not tried otherwise.
    check(&[read.clone(), read.clone(), Reply::text("58")], "58", &[&[], &[], &[]], 1).await;
    // With no other tool there is nothing to make room for.
    let mut task = Task::new([fail.clone(), fail.clone(), Reply::text("no")], [failing()]);
    assert_eq!(task.run("go").await.answer, "no");
    assert_eq!(task.choices(), [ToolChoice::Auto, ToolChoice::Auto, ToolChoice::None]);
    // Nor is what was refused: only the user can change that.
    let write = Double { access: |_| Ok(vec![Access::Write("out.txt".into())]), ..echo("Write", false) };
    let mut task = Task::new([call("Write", "a"), call("Write", "a"), Reply::text("I may not")], [write]);
    assert_eq!((task.run("go").await.refusals.len(), task.choices().len()), (1, 3));
    assert!(task.requests.lock().unwrap().iter().all(|request| request.withheld.is_empty()));
}

/// `script`: one letter a step: `r` a read, `w` a write, `f` a read that fails, `u` an answer and the next task.
/// Whether the last step is thrown away.
#[tokio::test]
async fn what_counts_as_a_repeat() {
    let check = async |script: &str, expected: bool| {
        let reply = |letter| match letter {
            'r' => call("Read", "a"),
            'w' => call("Write", "a"),
            'f' => call("Fail", "a"),
            _ => Reply::text("ok"),
        };
        let replies = script.chars().map(reply).chain([Reply::text("ok")]);
        let mut task = Task::new(replies, [echo("Read", true), echo("Write", false), failing()]);
        for _ in script.split('u') {
            assert_eq!(task.run("go").await.stop_reason, StopReason::Answer, "{script}");
        }
        let guarded = task.kinds().iter().filter(|kind| *kind == "repeat_guarded").count();
        assert_eq!(guarded, usize::from(expected), "{script}: {:?}", task.kinds());
    };
    check("rr", true).await;
    check("rfr", true).await;
    check("rwr", false).await;
    check("ww", true).await;
    check("wrw", true).await;
    check("ff", true).await;
    check("rur", false).await;
    check("rurr", true).await;
}

#[tokio::test]
async fn a_step_with_a_new_call_runs_it_and_points_back_for_the_repeat() {
    let both = calls(&[("Read", json!({"of": "a"})), ("Read", json!({"of": "b"}))]);
    let read = echo("Read", true);
    let runs = read.runs.clone();
    let mut task = Task::new([call("Read", "a"), both, Reply::text("ok")], [read]);
    let outcome = task.run("go").await;
    use CallOutcome::*;
    assert_eq!(outcomes(&outcome), [Ok, Repeated, Ok]);
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    assert!(
        task.result_lines()[1].starts_with("OK already answered above: Read was called"),
        "{:?}",
        task.result_lines()
    );
}

#[tokio::test]
async fn a_read_after_a_write_in_the_same_step_is_no_repeat() {
    let step = calls(&[("Write", json!({"of": "a"})), ("Read", json!({"of": "a"}))]);
    let mut task = Task::new([call("Read", "a"), step, Reply::text("ok")], [echo("Read", true), echo("Write", false)]);
    assert_eq!(outcomes(&task.run("go").await), [CallOutcome::Ok; 3]);
}

#[tokio::test]
async fn the_same_call_too_often_in_a_row_ends_the_task() {
    let check = async |tool: Double, guard: bool| {
        let name = tool.spec.name.clone();
        let runs = tool.runs.clone();
        let mut task = Task::from_fn(move |_| Some(call(&name, "a")), [tool]).with(|s| s.guard = guard);
        let outcome = task.run("go").await;
        assert_eq!((outcome.stop_reason, runs.load(Ordering::SeqCst)), (StopReason::MaxRepeats, 3));
        assert!(outcome.error.unwrap().contains("3 times in a row"));
        assert_paired(&task.session);
    };
    check(echo("Read", true), false).await;
    check(failing(), false).await;
    let step: Vec<_> = ["a", "a", "a", "a", "b"].map(|of| ("Fail", json!({"of": of}))).into();
    let mut task = Task::new([calls(&step)], [failing()]);
    let outcome = task.run("go").await;
    use CallOutcome::*;
    assert_eq!(outcomes(&outcome), [Failed, Failed, Failed, NotRun, NotRun]);
    assert_eq!(outcome.stop_reason, StopReason::MaxRepeats);
}

#[tokio::test]
async fn a_model_that_calls_although_calls_are_masked_still_ends() {
    let mut task = Task::from_fn(|_| Some(call("Read", "a")), [echo("Read", true)]);
    let outcome = task.run("go").await;
    assert_eq!(outcome.stop_reason, StopReason::MaxRepeats);
    assert_paired(&task.session);
}

#[tokio::test]
async fn a_reminder_after_every_step_when_the_model_is_set_so() {
    let both = calls(&[("Read", json!({"of": "a"})), ("Read", json!({"of": "b"}))]);
    let mut task = Task::new([both, Reply::text("ok")], [echo("Read", true)]);
    task.agent.settings.habits.reminder = ReminderAt::AfterResult;
    task.run("Hỏi gì?").await;
    let reminders: Vec<Option<String>> = task.results().into_iter().map(|r| r.reminder).collect();
    assert_eq!(reminders, [None, Some("answer the question now: Hỏi gì?".into())]);
    assert_eq!(task.choices(), [ToolChoice::Auto, ToolChoice::Auto]);
}

#[tokio::test]
async fn a_reminder_says_what_the_result_calls_for() {
    let check = async |tool: Double, reply: Reply, expected: Option<&str>| {
        let mut task = Task::new([reply, Reply::text("ok")], [tool]);
        task.agent.settings.habits.reminder = ReminderAt::AfterResult;
        task.run("go").await;
        let reminder = task.results()[0].reminder.clone();
        assert_eq!(reminder.as_deref(), expected);
    };
    let answer = Some("answer the question now: go");
    let retry = Some("that call failed; make another call for the task: go");
    let search = Some("nothing was found; search otherwise, or answer that there is none: go");
    let ending = |output: ToolOutput| {
        double("T", true, move |_, _| {
            let output = output.clone();
            async move { output }
        })
    };
    check(ending(ToolOutput::ok("58")), call("T", "a"), answer).await;
    check(ending(ToolOutput::error("no such file")), call("T", "a"), retry).await;
    check(ending(ToolOutput::nothing("no match")), call("T", "a"), search).await;
    check(ending(ToolOutput::final_error("not here")), call("T", "a"), answer).await;
    check(ending(ToolOutput::ok("58")), call("Unknown", "a"), retry).await;
    let refused = Double { access: |_| Ok(vec![Access::Write("out.txt".into())]), ..echo("Write", false) };
    let not_allowed = Some("the last call was not allowed; say to the user in one short sentence what was not done");
    check(refused, call("Write", "a"), not_allowed).await;
    let writes = Double { access: |_| Ok(vec![Access::Read("out.txt".into())]), ..echo("Write", false) };
    check(writes, call("Write", "a"), answer).await;
}

#[tokio::test]
async fn an_answer_that_is_the_task_over_again_is_thrown_away_once() {
    let check = async |replies: &[Reply], tool: Double, answer: &str, asked: &[&str], notes: usize| {
        let mut task = Task::new(replies.to_vec(), [tool]);
        let outcome = task.run("Sửa tệp a.").await;
        assert_eq!((outcome.stop_reason, outcome.answer.as_str()), (StopReason::Answer, answer));
        let events: Vec<Event> = task.session.events().cloned().collect();
        let guarded = events.iter().filter_map(|event| match event {
            Event::RepeatGuarded { calls, reminder, .. } if calls.is_empty() => Some(reminder.as_str()),
            _ => None,
        });
        assert_eq!(guarded.collect::<Vec<_>>(), asked);
        assert_eq!(events.iter().filter(|event| matches!(event, Event::Note { .. })).count(), notes);
    };
    let (tool, echoed) = (|| call("T", "a"), || Reply::text("sửa  tệp A"));
    let done = "say to the user in one short sentence what was done or found";
    check(&[tool(), echoed(), Reply::text("Xong.")], echo("T", true), "Xong.", &[done], 0).await;
    check(&[tool(), echoed(), echoed()], echo("T", true), "sửa  tệp A", &[done], 1).await;
    let failed = "the last call failed; say to the user in one short sentence what could not be done, and why";
    let failing = double("T", true, |_, _| async { ToolOutput::error("no") });
    check(&[tool(), echoed(), Reply::text("Không được.")], failing, "Không được.", &[failed], 0).await;
    // Without a result it is an answer: to "Hi" one says "Hi".
    check(&[echoed()], echo("T", true), "sửa  tệp A", &[], 0).await;
}

#[tokio::test]
async fn a_forced_call_is_forced_in_the_first_step_only() {
    let check = async |choice: ToolChoice, expected: &[ToolChoice]| {
        let mut task = Task::new([call("Read", "a"), Reply::text("ok")], [echo("Read", true)]);
        task.agent.settings.tool_choice = choice;
        task.run("go").await;
        assert_eq!(task.choices(), expected);
    };
    check(ToolChoice::Required, &[ToolChoice::Required, ToolChoice::Auto]).await;
    check(ToolChoice::Named("Read".into()), &[ToolChoice::Named("Read".into()), ToolChoice::Auto]).await;
    check(ToolChoice::None, &[ToolChoice::None, ToolChoice::None]).await;
}

#[tokio::test]
async fn every_reply_draws_from_a_stream_of_its_own_that_the_log_determines() {
    let replies = || [call("Read", "a"), call("Read", "a"), Reply::text("ok")];
    let mut task = Task::new(replies(), [echo("Read", true)]);
    task.agent.settings.sampling.seed = u64::MAX;
    task.run("go").await;
    let seeds: Vec<u64> = task.requests.lock().unwrap().iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [u64::MAX, 0, 1]);
}

#[tokio::test]
async fn a_long_result_is_cut_and_that_is_said() {
    let long = double("Read", true, |_, _| async { ToolOutput::ok("dòng chữ 漢字 🐴\n".repeat(1000)) });
    let mut task = Task::new([call("Read", "a"), Reply::text("ok")], [long]).with(|s| s.result_tokens_max = 100);
    task.run("go").await;
    let text = &task.results()[0].text;
    assert!(text.contains(" bytes of the middle are cut here: 100 tokens fit …]"), "{text}");
    assert!(text.len() <= 4 * 100 + 90);
    let note = task.session.events().find_map(|event| match event {
        Event::Note { text } => Some(text.clone()),
        _ => None,
    });
    assert_eq!(note.as_deref(), Some("the result of Read (call_0) had 6000 tokens; its middle was cut to keep 100"));
    assert!(task.events.iter().any(|event| matches!(event, AgentEvent::Note { .. })));
}

#[tokio::test]
async fn a_tool_that_reads_cuts_its_own_result_to_the_tokens_that_fit() {
    let check = async |read_only: bool, runs: usize, note: bool| {
        let tool = double("Read", read_only, |_, context| async move {
            let all = "a b c d\n".repeat(1000);
            let fits = &all[..all.len().min(context.output_bytes_max)];
            ToolOutput::ok(format!("{fits}\n[{} more]", all.len() - fits.len()))
        });
        let counted = tool.runs.clone();
        let mut task = Task::new([call("Read", "a"), Reply::text("ok")], [tool]).with(|s| s.result_tokens_max = 200);
        task.run("go").await;
        let text = &task.results()[0].text;
        assert_eq!(counted.load(Ordering::SeqCst), runs);
        assert_eq!(text.contains("of the middle are cut"), note, "{text}");
        assert!(text.ends_with(" more]"), "{text}");
    };
    check(true, 2, false).await;
    check(false, 1, true).await;
}

/// Stops a task at the moment that `at` names and checks that it ends soon, that the log is paired, and that it resumes.
async fn check_stop(reply: Reply, at: &'static str, expected: &[CallOutcome]) {
    let waits = double("Wait", false, |_, _| std::future::pending());
    let task = Task::new([reply, Reply::text("late")], [waits, echo("Read", true)]);
    let Task { agent, mut session, dir, stop, .. } = task;
    let begin = Instant::now();
    let requested = stop.clone();
    let mut observer = |event: &AgentEvent| {
        if serde_json::to_value(event).unwrap()["type"] == at {
            requested.request(StopReason::Interrupted);
        }
    };
    if at == "model" {
        let stop = stop.clone();
        tokio::spawn(async move {
            tokio::task::yield_now().await;
            stop.request(StopReason::Terminated);
        });
    }
    let outcome = agent.run(&mut session, Some("go"), &stop, &mut observer).await;
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    let reason = if at == "model" { StopReason::Terminated } else { StopReason::Interrupted };
    assert_eq!((outcome.stop_reason, outcomes(&outcome)), (reason, expected.to_vec()));
    assert_paired(&session);
    let id = session.id().to_owned();
    drop(session);
    let (mut session, said) = Session::open(&dir.path().join("sessions"), &id).unwrap();
    assert_eq!(said, Vec::<String>::new(), "everything was answered before the end");
    let outcome = agent.run(&mut session, None, &Stop::new(), &mut |_| {}).await;
    assert_eq!((outcome.stop_reason, outcome.answer.as_str()), (StopReason::Answer, "late"));
}

#[tokio::test]
async fn a_stop_is_quick_wherever_it_comes_and_leaves_a_log_that_resumes() {
    use CallOutcome::*;
    let slow = Reply { delay: Duration::from_secs(600), ..Reply::text("never") };
    check_stop(slow, "model", &[]).await;
    let step = [("Read", json!({"of": "a"})), ("Wait", json!({"of": "b"})), ("Read", json!({"of": "c"}))];
    check_stop(calls(&step), "assistant", &[NotRun, NotRun, NotRun]).await;
    check_stop(calls(&step[1..]), "tool_started", &[Interrupted, NotRun]).await;
}

#[tokio::test]
async fn the_time_of_a_task_is_limited_in_the_model_and_in_a_tool() {
    let check = async |reply: Reply| {
        let waits = double("Wait", false, |_, _| std::future::pending());
        let mut task = Task::new([reply], [waits]).with(|s| s.timeout = Some(Duration::from_millis(30)));
        let outcome = task.run("go").await;
        assert_eq!(outcome.stop_reason, StopReason::Timeout);
        assert!(outcome.error.unwrap().contains("raise --timeout"));
        assert_paired(&task.session);
    };
    check(Reply { delay: Duration::from_secs(600), ..Reply::text("never") }).await;
    check(call("Wait", "a")).await;
}

#[tokio::test]
async fn a_session_that_is_finished_has_nothing_to_go_on_with() {
    let mut task = Task::new([Reply::text("a")], []);
    task.run("go").await;
    let outcome = task.agent.run(&mut task.session, None, &Stop::new(), &mut |_| {}).await;
    assert_eq!(outcome.stop_reason, StopReason::Refused);
}

/// The process dies after any event: the session resumes, what had begun is not begun again, and the loop goes on.
#[tokio::test]
async fn a_log_cut_after_any_event_goes_on_without_running_a_call_twice() {
    let append = || double("Append", false, |_, _| async { ToolOutput::ok("appended") });
    let step = calls(&[("Append", json!({"of": "a"})), ("Read", json!({"of": "a"})), ("Nope", json!({"of": "a"}))]);
    let replies = [step, call("Read", "a"), call("Read", "a"), Reply::text("done")];
    let mut whole = Task::new(replies, [append(), echo("Read", true)]);
    whole.run("go").await;
    let text = fs::read_to_string(whole.session.path()).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    assert!(lines.len() > 10);
    for cut in 2..lines.len() - 1 {
        let tool = append();
        let runs = tool.runs.clone();
        let task = Task::new([Reply::text("resumed")], [tool, echo("Read", true)]);
        let Task { agent, dir, session, .. } = task;
        drop(session);
        let sessions = dir.path().join("sessions");
        fs::write(sessions.join("s.jsonl"), lines[..cut].concat()).unwrap();
        let (mut session, _) = Session::open(&sessions, "s").unwrap();
        let finished = !session.is_unfinished();
        let outcome = agent.run(&mut session, finished.then_some("more"), &Stop::new(), &mut |_| {}).await;
        assert_eq!((outcome.stop_reason, outcome.answer.as_str()), (StopReason::Answer, "resumed"), "{cut}");
        assert_eq!(runs.load(Ordering::SeqCst), 0, "{cut}");
        assert_paired(&session);
    }
}

#[tokio::test]
async fn tools_that_cannot_be_offered_are_named() {
    let broken = |name: &str, parameters: Value| {
        let mut tool = echo("x", true);
        tool.spec = ToolSpec { name: name.into(), description: String::new(), parameters };
        Arc::new(tool) as Arc<dyn Tool>
    };
    let fine = json!({"type": "object"});
    let (toolbox, left_out) = Toolbox::new(vec![
        broken("A", fine.clone()),
        broken("A", fine),
        broken("B", json!({"type": "object", "properties": {"x": {"$ref": "https://example.org/s.json"}}})),
        broken("C", json!({"type": "nonsense"})),
    ]);
    assert_eq!(toolbox.specs().len(), 1);
    let begins = |n: usize, text: &str| assert!(left_out[n].starts_with(text), "{left_out:?}");
    begins(0, "the tool `A` is left out: there is another one");
    begins(1, "the tool `B` is left out: its schema has a `$ref` to `https://example.org/s.json`, outside of itself");
    begins(2, "the tool `C` is left out: its arguments must be an object");
}

/// One call of a random script, by number.
fn random_call(n: u8) -> (&'static str, Value) {
    let of = ["a", "b"][usize::from(n / 6 % 2)];
    match n % 6 {
        0 | 1 => ("Read", json!({"of": of})),
        2 => ("Write", json!({"of": of})),
        3 => ("Fail", json!({"of": of})),
        4 => ("Read", json!({"of": 1})),
        _ => ("Nope", json!({})),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever calls a model makes, with and without the guard: the log is paired, at its end and cut after any event.
    #[test]
    fn any_script_leaves_a_paired_log_wherever_it_is_cut(
        steps in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..4), 1..6),
        guard in any::<bool>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let reply = |step: &Vec<u8>| calls(&step.iter().map(|&n| random_call(n)).collect::<Vec<_>>());
            let tools = [echo("Read", true), echo("Write", false), failing()];
            let mut task = Task::new(steps.iter().map(reply), tools).with(|s| s.guard = guard);
            task.run("go").await;
            assert_paired(&task.session);
            let ids: Vec<ToolCall> = task.session.events().filter_map(|event| match event {
                Event::Assistant { message, .. } => Some(message.calls.clone()),
                _ => None,
            }).flatten().collect();
            let unique: HashMap<&str, ()> = ids.iter().map(|call| (call.id.as_str(), ())).collect();
            assert_eq!(unique.len(), ids.len());
            let text = fs::read_to_string(task.session.path()).unwrap();
            let lines: Vec<&str> = text.split_inclusive('\n').collect();
            let dir = task.dir.path().join("cut");
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("s.jsonl"), lines[..1 + cut.index(lines.len())].concat()).unwrap();
            assert_paired(&Session::open(&dir, "s").unwrap().0);
        });
    }
}
