use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::path::Path;

use proptest::prelude::*;
use serde_json::json;

use super::event::{LineFault, TYPES, parse_line};
use super::*;
use crate::chat::ModelInfo;
use crate::context;
use crate::message::{
    AssistantMessage, FinishReason, Message, Sampling, StopReason, ToolCall, ToolResult, ToolSpec, Usage,
};

fn model(id: &str) -> ModelInfo {
    ModelInfo { id: id.into(), digest: "d1".into(), kernel_tier: "avx2".into(), context_tokens: 4096 }
}

fn run_info() -> RunInfo {
    RunInfo {
        cob_version: "0.1.0".into(),
        model: model("m"),
        sampling: Sampling { seed: u64::MAX, repetition_penalty: 1.1, ..Sampling::default() },
        cwd: "/w".into(),
        tools: vec![ToolSpec {
            name: "Read".into(), description: "đọc".into(), parameters: json!({"type": "object"})
        }],
        system: None,
        settings: json!({"max_turns": 20}),
    }
}

fn call(id: &str) -> ToolCall {
    ToolCall { id: id.into(), name: "Read".into(), arguments: json!({"z": "漢\n", "a": [1, 2.5]}), rescued: false }
}

fn user(text: &str) -> Event {
    Event::User { text: text.into() }
}

fn assistant(text: &str, calls: &[&str]) -> Event {
    let calls = calls.iter().map(|id| call(id)).collect();
    let message = AssistantMessage { text: text.into(), calls, ids: Some(vec![1, 2]) };
    Event::Assistant { message, finish: FinishReason::Stop, usage: Usage::default(), notes: vec!["a note".into()] }
}

fn started(id: &str) -> Event {
    Event::ToolStarted { call_id: id.into() }
}

fn result(id: &str, text: &str) -> Event {
    let result = ToolResult {
        call_id: id.into(),
        name: "Read".into(),
        text: text.into(),
        is_error: false,
        led_nowhere: false,
        reminder: None,
    };
    Event::ToolResult { result, duration_ms: 3 }
}

fn stopped() -> Event {
    Event::Stopped { reason: StopReason::Answer, error: None, partial: String::new() }
}

/// Every kind of event but the first, in an order that the loop could write.
fn every_kind() -> Vec<Event> {
    vec![
        user("Trời Hà Nội có mưa không?\n{\"v\":1}"),
        assistant("first", &["call_0", "call_1"]),
        Event::Refused {
            call_id: "call_0".into(),
            name: "Read".into(),
            why: "no".into(),
            would_allow: vec!["Read".into()],
        },
        started("call_1"),
        result("call_0", "refused"),
        result("call_1", "58 lines 🐴"),
        Event::RepeatGuarded {
            calls: vec![call("")],
            call_id: "call_1".into(),
            reminder: "answer the question now: x".into(),
            withheld: Vec::new(),
            usage: Usage::default(),
        },
        assistant("58", &[]),
        Event::Note { text: "n".into() },
        stopped(),
        Event::ModelChanged { from: model("m"), to: model("n") },
        Event::Resumed { run: RunInfo { system: Some("be brief".into()), ..run_info() } },
        user("again"),
        assistant("", &["call_2"]),
        started("call_2"),
    ]
}

/// Where the system has a folder in memory, syncing there costs nothing.
fn quick_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn write_session(dir: &Path, events: &[Event]) -> String {
    let mut session = Session::create(dir, run_info()).unwrap();
    for event in events {
        session.append(event.clone()).unwrap();
    }
    session.sync().unwrap();
    session.id().to_owned()
}

/// Every call has exactly one result, and they follow the message in the order of the calls.
fn assert_paired(events: &[Event]) {
    let messages = context::messages(events);
    let mut rest = messages.as_slice();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match first {
            Message::Assistant(message) => {
                for call in &message.calls {
                    let Some((Message::Tool(result), after)) = rest.split_first() else { panic!("{messages:?}") };
                    assert_eq!((&result.call_id, &result.name), (&call.id, &call.name));
                    rest = after;
                }
            }
            Message::Tool(result) => panic!("a result without a call: {result:?}"),
            _ => {}
        }
    }
    let results = events.iter().filter(|event| matches!(event, Event::ToolResult { .. })).count();
    let seen = messages.iter().filter(|message| matches!(message, Message::Tool(_))).count();
    assert_eq!(results, seen, "a call with two results, or a result that nobody sees");
}

fn events_of(session: &Session) -> Vec<Event> {
    session.events().cloned().collect()
}

#[test]
fn every_event_reads_back_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let id = write_session(dir.path(), &every_kind());
    let log = read(&path(dir.path(), &id).unwrap()).unwrap();
    let read_back: Vec<Event> = log.records.iter().map(|record| record.event.clone()).collect();
    assert_eq!(read_back[0], Event::Init { session_id: id, run: run_info() });
    assert_eq!(read_back[1..], every_kind());
    let kinds: HashSet<String> = log
        .records
        .iter()
        .map(|record| serde_json::to_value(record).unwrap()["type"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds, TYPES.iter().map(|kind| kind.to_string()).collect());
}

#[test]
fn history_is_derived_from_the_log() {
    let mut events = vec![Event::Init { session_id: "s".into(), run: run_info() }];
    events.extend(every_kind());
    events.push(result("call_2", "done"));
    let seen: Vec<String> = context::messages(&events)
        .iter()
        .map(|message| match message {
            Message::System { text } => format!("system {text}"),
            Message::User { text } => format!("user {}", text.lines().next().unwrap()),
            Message::Assistant(message) => format!("assistant {} {}", message.text, message.calls.len()),
            Message::Tool(r) => format!("tool {} {} {}", r.call_id, r.text, r.reminder.as_deref().unwrap_or("-")),
        })
        .collect();
    insta::assert_snapshot!(seen.join("\n"), @r"
    system be brief
    user Trời Hà Nội có mưa không?
    assistant first 2
    tool call_0 refused -
    tool call_1 58 lines 🐴 answer the question now: x
    assistant 58 0
    user again
    assistant  1
    tool call_2 done -
    ");
    assert_paired(&events);
}

/// What a crash can leave: the file cut at any byte. It opens with what was complete, every call has its result, and
/// nothing is lost or said twice when it is opened once more.
#[test]
fn a_log_cut_at_any_byte_resumes() {
    let dir = quick_dir();
    let id = write_session(dir.path(), &every_kind());
    let file = path(dir.path(), &id).unwrap();
    let whole = fs::read(&file).unwrap();
    let first_line = whole.iter().position(|&b| b == b'\n').unwrap() + 1;
    for cut in 0..=whole.len() {
        fs::write(&file, &whole[..cut]).unwrap();
        let complete = whole[..cut].iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let log = read(&file).unwrap();
        assert_eq!((log.good_bytes, log.torn_bytes), (complete as u64, (cut - complete) as u64));
        let opened = Session::open(dir.path(), &id);
        if cut < first_line {
            assert!(matches!(opened, Err(SessionError::Corrupt { line: 1, .. })), "{cut}: {opened:?}");
            assert_eq!(fs::read(&file).unwrap(), &whole[..cut], "a file that is refused is not touched");
            continue;
        }
        let (session, said) = opened.unwrap();
        let lines = whole[..complete].iter().filter(|&&b| b == b'\n').count();
        let events = events_of(&session);
        assert_eq!(events[1..lines], every_kind()[..lines - 1]);
        assert_eq!(said.iter().any(|text| text.contains("torn")), complete < cut, "{cut}: {said:?}");
        let is_note = |e: &Event| matches!(e, Event::Note { text } if text.contains("torn"));
        assert_eq!(events[lines..].iter().any(is_note), complete < cut, "{cut}");
        assert_paired(&events);
        drop(session);
        let (session, said) = Session::open(dir.path(), &id).unwrap();
        assert_eq!((events_of(&session), said), (events, vec![]), "{cut}");
    }
}

#[test]
fn an_interrupted_call_says_whether_it_may_have_run() {
    let dir = tempfile::tempdir().unwrap();
    let check = |events: &[Event], expected: &[&str]| {
        let id = write_session(dir.path(), events);
        let (session, said) = Session::open(dir.path(), &id).unwrap();
        let found: Vec<String> = session
            .events()
            .filter_map(|event| match event {
                Event::ToolResult { result, .. } => {
                    Some(format!("{} {}", result.call_id, result.text.split([':', '.']).next().unwrap()))
                }
                _ => None,
            })
            .collect();
        assert_eq!(found, expected);
        assert_eq!(said.len(), expected.iter().filter(|text| text.contains("interrupted")).count());
        assert!(session.is_unfinished());
    };
    let step = assistant("", &["call_0", "call_1"]);
    let both = ["call_0 interrupted before it ran", "call_1 interrupted before it ran"];
    check(&[user("x"), step.clone()], &both);
    let one = ["call_0 interrupted, may have run", "call_1 interrupted before it ran"];
    check(&[user("x"), step.clone(), started("call_0")], &one);
    let two = ["call_0 done", "call_1 interrupted, may have run"];
    check(&[user("x"), step, started("call_0"), result("call_0", "done"), started("call_1")], &two);
}

#[test]
fn unfinished_means_that_an_answer_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let check = |events: &[Event], expected| {
        let id = write_session(dir.path(), events);
        assert_eq!(Session::open(dir.path(), &id).unwrap().0.is_unfinished(), expected, "{events:?}");
    };
    let end = |reason| Event::Stopped { reason, error: None, partial: String::new() };
    check(&[], false);
    check(&[user("x")], true);
    check(&[user("x"), assistant("a", &[])], false);
    check(&[user("x"), assistant("a", &[]), stopped()], false);
    check(&[user("x"), assistant("a", &[]), end(StopReason::MaxOutputTokens)], false);
    check(&[user("x"), end(StopReason::Interrupted)], true);
    check(&[user("x"), assistant("a", &[]), stopped(), user("y")], true);
}

#[test]
fn another_model_is_said_and_logged() {
    let dir = tempfile::tempdir().unwrap();
    let id = write_session(dir.path(), &[]);
    let (mut session, _) = Session::open(dir.path(), &id).unwrap();
    assert_eq!(session.resumed(run_info()).unwrap(), Vec::<String>::new());
    let said = session.resumed(RunInfo { model: model("other"), ..run_info() }).unwrap();
    assert_eq!(said, ["the session was written with the model m, and goes on with other"]);
    assert_eq!(session.run().model.id, "other");
    let changed =
        |event: &&Event| matches!(event, Event::ModelChanged { from, to } if from.id == "m" && to.id == "other");
    assert_eq!(session.events().filter(changed).count(), 1);
}

#[test]
fn a_session_has_one_writer_and_any_number_of_readers() {
    let dir = tempfile::tempdir().unwrap();
    let session = Session::create(dir.path(), run_info()).unwrap();
    let id = session.id().to_owned();
    let error = Session::open(dir.path(), &id).unwrap_err();
    assert!(matches!(error, SessionError::Locked(_)), "{error}");
    assert!(matches!(remove(dir.path(), &id), Err(SessionError::Locked(_))));
    assert_eq!(read(session.path()).unwrap().records.len(), 1);
    assert!(list(dir.path()).unwrap()[0].live);
    drop(session);
    assert!(!list(dir.path()).unwrap()[0].live);
    remove(dir.path(), &id).unwrap();
    assert!(matches!(Session::open(dir.path(), &id), Err(SessionError::NotFound(_))));
}

#[test]
#[cfg(unix)]
fn a_session_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("state/sessions");
    let session = Session::create(&dir, run_info()).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(session.path()), mode(&dir)), (0o600, 0o700));
}

#[test]
fn lines_that_are_refused() {
    let check = |line: &str, seq, expected: &str| {
        let found = match parse_line(line.as_bytes(), seq) {
            Err(LineFault::Corrupt(why)) => format!("corrupt: {why}"),
            Err(LineFault::Newer(v)) => format!("newer: {v}"),
            Err(LineFault::UnknownEvent(kind)) => format!("unknown: {kind}"),
            Ok(record) => format!("{record:?}"),
        };
        assert!(found.contains(expected), "{line}: {found}");
    };
    check("", 1, "corrupt: it is not JSON");
    check("\0\0\0", 1, "corrupt: it is not JSON");
    check("[]", 1, "corrupt: it is not an object");
    check(r#"{"seq":1,"time_ms":1,"type":"note","text":""}"#, 1, "corrupt: it has no `v`");
    check(r#"{"v":2,"whatever":true}"#, 1, "newer: 2");
    check(r#"{"v":1,"seq":3,"time_ms":1,"type":"note","text":""}"#, 2, "corrupt: its number is 3, not 2");
    check(r#"{"v":1,"seq":1,"time_ms":1}"#, 1, "corrupt: it has no `type`");
    check(r#"{"v":1,"seq":1,"time_ms":1,"type":"note"}"#, 1, "corrupt: as `note` event: missing field `text`");
    check(r#"{"v":1,"seq":0,"time_ms":1,"type":"note","text":""}"#, 0, "corrupt: the first event");
    check(r#"{"v":1,"seq":1,"time_ms":1,"type":"compacted"}"#, 1, "unknown: compacted");
    check(r#"{"v":1,"seq":1,"time_ms":1,"type":"compacted","optional":false}"#, 1, "unknown: compacted");
    check(r#"{"v":1,"seq":1,"time_ms":1,"type":"hint","optional":true,"x":[]}"#, 1, "None");
    check(r#"{"v":1,"seq":1,"time_ms":1,"type":"note","text":"t","future_field":1}"#, 1, "Note");
}

#[test]
fn a_damaged_file_is_refused_with_its_line_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let check = |line: usize, with: &str, expected: &str| {
        let id = write_session(dir.path(), &every_kind());
        let file = path(dir.path(), &id).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        lines[line - 1] = with;
        let damaged = lines.join("\n") + "\n";
        fs::write(&file, &damaged).unwrap();
        let error = Session::open(dir.path(), &id).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), damaged);
        assert!(list(dir.path()).unwrap().iter().any(|s| s.problem.as_deref() == Some(&error)));
    };
    check(3, "{\"v\":1,", "is damaged in line 3: it is not JSON");
    check(5, "", "is damaged in line 5");
    check(4, r#"{"v":1,"seq":3,"time_ms":1,"type":"forked"}"#, "holds a `forked` event (line 4)");
    check(2, r#"{"v":7,"seq":1,"time_ms":1,"type":"note"}"#, "has format 7; this version of cob reads up to 1");
}

#[test]
fn an_optional_event_of_a_newer_version_is_skipped_and_numbered() {
    let dir = tempfile::tempdir().unwrap();
    let id = write_session(dir.path(), &[]);
    let file = path(dir.path(), &id).unwrap();
    let mut text = fs::read_to_string(&file).unwrap();
    text += "{\"v\":1,\"seq\":1,\"time_ms\":1,\"type\":\"hint\",\"optional\":true}\n";
    fs::write(&file, text).unwrap();
    let (mut session, said) = Session::open(dir.path(), &id).unwrap();
    assert_eq!(said, ["1 optional events of a newer version were skipped"]);
    assert_eq!(session.append(user("x")).unwrap().seq, 3);
    drop(session);
    Session::open(dir.path(), &id).unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_the_session_and_leaves_a_log_that_opens() {
    let dir = tempfile::tempdir().unwrap();
    let mut session = Session::create(dir.path(), run_info()).unwrap();
    session.append(user("x")).unwrap();
    let id = session.id().to_owned();
    let file = session.replace_file(OpenOptions::new().append(true).open("/dev/full").unwrap());
    let error = session.append(user("y")).unwrap_err().to_string();
    assert!(error.contains("cannot write the session") && error.contains("free some space"), "{error}");
    session.replace_file(file);
    assert!(session.append(user("z")).is_err(), "after a lost event nothing more may be logged");
    assert_eq!(session.events().count(), 2);
    drop(session);
    assert_eq!(Session::open(dir.path(), &id).unwrap().0.events().count(), 2);
}

#[test]
fn the_list_is_in_order_and_names_what_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    assert!(list(&dir.path().join("missing")).unwrap().is_empty());
    fs::write(dir.path().join("20200101-000000-aaaa.jsonl"), "").unwrap();
    File::create(dir.path().join("notes.txt")).unwrap();
    let id = write_session(dir.path(), &every_kind());
    let found = list(dir.path()).unwrap();
    assert_eq!(found.iter().map(|s| s.id.as_str()).collect::<Vec<_>>(), ["20200101-000000-aaaa", &id]);
    assert_eq!(found[0].problem.as_deref(), Some("it holds no complete event"));
    let summary = &found[1];
    assert_eq!((summary.turns, summary.calls, summary.stop_reason), (3, 3, None));
    assert!(summary.task.as_deref().unwrap().starts_with("Trời Hà Nội"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Tasks of steps of calls, as the loop writes them, cut after any event: what is opened is paired, and goes on.
    #[test]
    fn any_prefix_of_a_log_resumes_to_pairs(
        tasks in prop::collection::vec(prop::collection::vec((0usize..4, any::<bool>(), any::<bool>()), 0..4), 1..3),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut events = Vec::new();
        let mut number = 0;
        for steps in tasks {
            events.push(user("?"));
            for (calls, together, guarded) in steps {
                let ids: Vec<String> = (number..number + calls).map(|n| format!("call_{n}")).collect();
                number += calls;
                let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                events.push(assistant("", &ids));
                if together {
                    events.extend(ids.iter().map(|id| started(id)));
                    events.extend(ids.iter().map(|id| result(id, "r")));
                } else {
                    events.extend(ids.iter().flat_map(|id| [started(id), result(id, "r")]));
                }
                if let (true, Some(id)) = (guarded, ids.last()) {
                    events.push(Event::RepeatGuarded {
                        calls: vec![call("")],
                        call_id: id.to_string(),
                        reminder: "now".into(),
                        withheld: Vec::new(),
                        usage: Usage::default(),
                    });
                }
            }
            events.push(stopped());
        }
        let prefix = &events[..cut.index(events.len() + 1)];
        let dir = quick_dir();
        let id = write_session(dir.path(), prefix);
        let (mut session, _) = Session::open(dir.path(), &id).unwrap();
        prop_assert_eq!(&events_of(&session)[1..=prefix.len()], prefix);
        assert_paired(&events_of(&session));
        prop_assert!(unanswered(session.events()).is_empty());
        session.append(user("next")).unwrap();
        assert_paired(&events_of(&session));
    }
}
