//! Small models, given a tool's result, often make the same call again instead of answering, or write the task down. This file
//! knows such repeats.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::chat::ROUTE_TOOL;
use crate::message::{ToolCall, ToolResult, json_canonical};
use crate::session::Event;

/// The length of the user's question in a reminder, in characters.
const QUESTION_CHARS_MAX: usize = 300;

/// Two calls with the same key ask for the same thing: the name, and the arguments whatever the order of their keys.
pub(super) fn key(call: &ToolCall) -> String {
    format!("{} {}", call.name, json_canonical(&call.arguments))
}

/// What an answer was worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Useful,
    /// It led nowhere; something else may lead further.
    Useless,
    Refused,
}

/// What a call does to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Reads,
    /// It writes files, and nothing else.
    Writes,
    /// Anything.
    Runs,
}

/// The keys of the calls that have an answer which still holds, an error or a refusal included: again it would end so.
/// They were made since the last user message, and no call that may change something ran after them: to read a file again
/// after an edit, or to run a test again, is no repeat. To write the same into the same file again is one whatever came between:
/// it would undo that. A write that failed may be made again once a file was read, which is what its error asks for.
pub(super) fn answered<'a>(
    events: impl IntoIterator<Item = &'a Event>,
    effect: impl Fn(&ToolCall) -> Effect,
) -> BTreeMap<String, Answer> {
    let mut calls: HashMap<&str, &ToolCall> = HashMap::new();
    let mut started: HashSet<&str> = HashSet::new();
    let mut refused: HashSet<&str> = HashSet::new();
    let mut answered: BTreeMap<String, (Answer, Effect)> = BTreeMap::new();
    for event in events {
        match event {
            Event::User { .. } => {
                calls.clear();
                answered.clear();
            }
            Event::Assistant { message, .. } => calls.extend(message.calls.iter().map(|call| (call.id.as_str(), call))),
            Event::ToolStarted { call_id } => {
                started.insert(call_id);
            }
            Event::Refused { call_id, .. } => {
                refused.insert(call_id.as_str());
            }
            Event::ToolResult { result, .. } => {
                let Some(call) = calls.get(result.call_id.as_str()) else { continue };
                let ran = started.contains(call.id.as_str());
                let effect = effect(call);
                if ran && effect != Effect::Reads {
                    answered.retain(|_, (_, effect)| *effect == Effect::Writes);
                }
                if effect == Effect::Reads && !result.led_nowhere {
                    answered.retain(|_, answer| *answer != (Answer::Useless, Effect::Writes));
                }
                let refused = refused.contains(call.id.as_str());
                if ran || refused {
                    let answer = match result.led_nowhere {
                        _ if refused => Answer::Refused,
                        true => Answer::Useless,
                        false => Answer::Useful,
                    };
                    answered.insert(key(call), (answer, effect));
                }
            }
            _ => {}
        }
    }
    answered.into_iter().map(|(key, (answer, _))| (key, answer)).collect()
}

/// The last call of the task that has a result, and what it gave.
pub(super) fn last_answer<'a>(events: impl DoubleEndedIterator<Item = &'a Event>) -> Option<(&'a str, Answer)> {
    let mut last: Option<&ToolResult> = None;
    for event in events.rev() {
        match (event, last) {
            (Event::User { .. }, _) => break,
            (Event::ToolResult { result, .. }, None) => last = Some(result),
            (Event::Refused { call_id, .. }, Some(result)) if *call_id == result.call_id => {
                return Some((call_id, Answer::Refused));
            }
            _ => {}
        }
    }
    let answer = |result: &ToolResult| if result.led_nowhere { Answer::Useless } else { Answer::Useful };
    last.map(|result| (result.call_id.as_str(), answer(result)))
}

/// Whether a reply is the task over again, whatever its case, spaces and punctuation, or begins as a call does in the examples of
/// the system prompt.
pub(super) fn is_no_answer(reply: &str, question: &str) -> bool {
    if reply.trim_start().starts_with(ROUTE_TOOL) {
        return true;
    }
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
    };
    let reply = words(reply);
    !reply.is_empty() && reply == words(question)
}

/// What stands after a result so that the model answers. `question` is the user's text.
pub(super) fn reminder(question: &str, effect: Effect) -> String {
    match effect {
        Effect::Writes => {
            format!("if all is done, say in one short sentence what was done; if not, go on: {}", bounded(question))
        }
        _ => format!("answer the question now: {}", bounded(question)),
    }
}

/// What stands after the last result once a reply was no answer.
pub(super) fn own_words(last: Answer) -> &'static str {
    match last {
        Answer::Useful => "say to the user in one short sentence what was done or found",
        Answer::Useless => {
            "the last call failed; say to the user in one short sentence what could not be done, and why"
        }
        Answer::Refused => "the last call was not allowed; say to the user in one short sentence what was not done",
    }
}

/// What stands after a call that led nowhere, so that the model tries something else.
pub(super) fn retry(question: &str, is_error: bool) -> String {
    match is_error {
        true => format!("that call failed; make another call for the task: {}", bounded(question)),
        false => format!("nothing was found; search otherwise, or answer that there is none: {}", bounded(question)),
    }
}

fn bounded(question: &str) -> String {
    let mut bounded: String = question.trim().chars().take(QUESTION_CHARS_MAX).collect();
    if bounded.len() < question.trim().len() {
        bounded.push('…');
    }
    bounded
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::message::{AssistantMessage, FinishReason, Usage};

    fn call(id: &str, name: &str, arguments: Value) -> ToolCall {
        ToolCall { id: id.into(), name: name.into(), arguments, rescued: false }
    }

    #[test]
    fn keys_ignore_the_order_of_keys_and_nothing_else() {
        let same = |a: Value, b: Value| key(&call("1", "T", a)) == key(&call("2", "T", b));
        assert!(same(json!({"a": 1, "b": {"c": [1, 2], "d": "ế"}}), json!({"b": {"d": "ế", "c": [1, 2]}, "a": 1})));
        assert!(!same(json!({"a": [1, 2]}), json!({"a": [2, 1]})));
        assert!(!same(json!({"a": "1"}), json!({"a": 1})));
        assert!(!same(json!({"a": "x\",\"b"}), json!({"a": "x", "b": ""})));
        assert_ne!(key(&call("1", "A", json!({}))), key(&call("1", "B", json!({}))));
    }

    /// `script`: one letter a call: `r`/`s` two different reads, `x` a command, `w` a write; upper case is an error, `!` after it a
    /// call that did not run; `u` a user message. → the letters whose answers still hold.
    fn check(script: &str, expected: &str) {
        let mut events = Vec::new();
        let letters: Vec<char> = script.chars().collect();
        for (at, &letter) in letters.iter().enumerate() {
            if letter == 'u' {
                events.push(Event::User { text: String::new() });
                continue;
            }
            if letter == '!' {
                continue;
            }
            let id = format!("call_{at}");
            let name = letter.to_ascii_lowercase().to_string();
            let message = AssistantMessage { calls: vec![call(&id, &name, json!({}))], ..Default::default() };
            let finish = FinishReason::Stop;
            events.push(Event::Assistant { message, finish, usage: Usage::default(), notes: vec![] });
            if letters.get(at + 1) != Some(&'!') {
                events.push(Event::ToolStarted { call_id: id.clone() });
            }
            let is_error = letter.is_uppercase();
            let result =
                ToolResult { call_id: id, name, text: String::new(), is_error, led_nowhere: is_error, reminder: None };
            events.push(Event::ToolResult { result, duration_ms: 0 });
        }
        let answered = answered(&events, |call| match call.name.as_str() {
            "w" => Effect::Writes,
            "x" => Effect::Runs,
            _ => Effect::Reads,
        });
        let mut found: Vec<char> = "rswx".chars().filter(|c| answered.contains_key(&format!("{c} {{}}"))).collect();
        found.sort_unstable();
        assert_eq!(found.into_iter().collect::<String>(), expected, "{script}");
    }

    #[test]
    fn which_answers_hold() {
        check("ur", "r");
        check("urs", "rs");
        check("uR", "r");
        check("urR", "r");
        check("urw", "w");
        check("uwr", "rw");
        check("urW", "w");
        check("urW!", "r");
        check("uw!", "");
        check("uru", "");
        check("urwr", "rw");
        check("ux", "x");
        check("urx", "x");
        check("uwx", "wx");
        check("uxw", "w");
        check("uWrw", "w");
        check("uWr", "r");
        check("uWR", "rw");
        check("uWxr", "rx");
    }

    #[test]
    fn what_is_no_answer() {
        let check = |reply: &str, task: &str, expected: bool| {
            assert_eq!(is_no_answer(reply, task), expected, "{reply:?} {task:?}")
        };
        check("Sửa tệp a.txt", " sửa  tệp A.txt. ", true);
        check("I changed a.txt.", "change a.txt", false);
        check("change a.txt: done", "change a.txt", false);
        check("", "?", false);
        check("\nTool: Bash\n[no output]", "?", true);
        check("Tool use is over.", "?", false);
    }

    #[test]
    fn the_reminder_is_bounded_in_characters() {
        assert_eq!(reminder(" How many? ", Effect::Reads), "answer the question now: How many?");
        let long = reminder(&"ế".repeat(301), Effect::Runs);
        assert_eq!(long.chars().filter(|&c| c == 'ế').count(), 300);
        assert!(long.ends_with('…'));
    }
}
