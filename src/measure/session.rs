//! A session's log → the prompts that its replies were asked with.

use crate::chat::ModelInfo;
use crate::context;
use crate::message::Usage;
use crate::session::{Event, RunInfo};

use super::Layout;

/// One reply of a session, kept or thrown away, with what it was asked with.
#[derive(Clone, Debug)]
pub struct Turn {
    /// From 1.
    pub number: usize,
    /// The system message stands among the messages.
    pub layout: Layout,
    pub model: ModelInfo,
    /// As it was logged.
    pub usage: Usage,
    /// The reply only repeated what was there, and was thrown away.
    pub is_thrown_away: bool,
}

/// The replies of a log, in order. Replies that were broken off left no count and are not among them. Costs time in proportion to the
/// square of the log's length.
pub fn turns(events: &[&Event]) -> Vec<Turn> {
    let mut run: Option<&RunInfo> = None;
    let mut turns: Vec<Turn> = Vec::new();
    for (at, event) in events.iter().enumerate() {
        let (usage, is_thrown_away) = match event {
            Event::Init { run: now, .. } | Event::Resumed { run: now } => {
                run = Some(now);
                continue;
            }
            Event::Assistant { usage, .. } => (*usage, false),
            Event::RepeatGuarded { usage, .. } => (*usage, true),
            _ => continue,
        };
        let Some(run) = run else { continue };
        let messages = context::messages(events[..at].iter().copied());
        let layout = Layout { sections: Vec::new(), messages, tools: run.tools.clone() };
        turns.push(Turn { number: turns.len() + 1, layout, model: run.model.clone(), usage, is_thrown_away });
    }
    turns
}
