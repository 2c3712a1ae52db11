//! Events → what the model sees.

use std::collections::HashMap;

use crate::message::{Message, ToolResult};
use crate::session::Event;

/// The conversation that a log tells. Each call's result follows the message that made the call, in the order of the
/// calls. Notes, refusals and ends are not part of it (a refused call has a result like any other).
pub fn messages<'a>(events: impl IntoIterator<Item = &'a Event>) -> Vec<Message> {
    let mut system = None;
    let mut messages: Vec<Message> = Vec::new();
    // call id → where its result belongs. A slot whose result never came (the step is still running) is dropped below.
    let mut slots: HashMap<String, usize> = HashMap::new();
    let mut results: HashMap<usize, ToolResult> = HashMap::new();
    for event in events {
        match event {
            Event::Init { run, .. } | Event::Resumed { run } => system = run.system.clone(),
            Event::User { text } => messages.push(Message::User { text: text.clone() }),
            Event::Assistant { message, .. } => {
                let calls = message.calls.iter();
                messages.push(Message::Assistant(message.clone()));
                for call in calls {
                    slots.insert(call.id.clone(), messages.len());
                    messages.push(Message::Tool(ToolResult {
                        call_id: call.id.clone(),
                        name: call.name.clone(),
                        text: String::new(),
                        is_error: true,
                        led_nowhere: false,
                        reminder: None,
                    }));
                }
            }
            Event::ToolResult { result, .. } => {
                if let Some(&slot) = slots.get(&result.call_id) {
                    results.insert(slot, result.clone());
                }
            }
            Event::RepeatGuarded { call_id, reminder, .. } => {
                if let Some(result) = slots.get(call_id).and_then(|slot| results.get_mut(slot)) {
                    result.reminder = Some(reminder.clone());
                }
            }
            Event::ModelChanged { .. }
            | Event::ToolStarted { .. }
            | Event::Refused { .. }
            | Event::Note { .. }
            | Event::Stopped { .. } => {}
        }
    }
    let conversation = messages.into_iter().enumerate().filter_map(|(at, message)| match message {
        Message::Tool(_) => results.remove(&at).map(Message::Tool),
        other => Some(other),
    });
    system.map(|text| Message::System { text }).into_iter().chain(conversation).collect()
}
