//! The one table of truth: whose token is each token of a prompt.

use crate::chat::template::{Prompt, Section, Template, TemplateError, unique};
use crate::message::{Message, ToolSpec};

/// Tokens that [`Layout::table`] renders at most to find what each thing costs: a few seconds.
const RENDERED_TOKENS_MAX: usize = 8_000_000;

/// What a prompt is made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// The system message, in parts; none where `messages` has it, or where the template's own is meant.
    pub sections: Vec<Section>,
    pub messages: Vec<Message>,
    pub tools: Vec<ToolSpec>,
}

/// A thing that can be left out; numbers are places in the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    Section(usize),
    Tool(usize),
    Message(usize),
    /// What the harness added to the result that is this message.
    Reminder(usize),
}

/// One segment of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// As in [`Prompt::segments`].
    pub name: String,
    /// The tokens whose first byte it owns.
    pub tokens: usize,
    /// By how much the prompt is shorter without it. `None` for what cannot be left out alone: the template's frame, the last message.
    pub marginal_tokens: Option<i64>,
}

/// The segments of one prompt.
#[derive(Clone, Debug)]
pub struct Table {
    /// In order of first appearance. Their tokens sum to those of the prompt.
    pub rows: Vec<Row>,
    pub prompt: Prompt,
    /// Whether [`Row::marginal_tokens`] was left out because it would have taken too long.
    pub is_too_long: bool,
}

impl Layout {
    /// The prompt, ready for a reply.
    pub fn render(&self, template: &Template) -> Result<Prompt, TemplateError> {
        template.render_sections(&self.sections, &self.messages, &self.tools, true)
    }

    /// How many tokens the prompt has.
    pub fn tokens(&self, template: &Template) -> Result<usize, TemplateError> {
        Ok(self.render(template)?.ids.len())
    }

    /// The segments without their marginal costs. One rendering.
    pub fn segments(&self, template: &Template) -> Result<Table, TemplateError> {
        let prompt = self.render(template)?;
        let sizes = prompt.sizes().into_iter();
        let rows = sizes.map(|(name, tokens)| Row { name, tokens, marginal_tokens: None }).collect();
        Ok(Table { rows, prompt, is_too_long: false })
    }

    /// The segments and their marginal costs. Renders the prompt once for each thing in it.
    pub fn table(&self, template: &Template) -> Result<Table, TemplateError> {
        let mut table = self.segments(template)?;
        let items = self.items();
        let total = table.prompt.ids.len();
        if total.saturating_mul(items.len()) > RENDERED_TOKENS_MAX {
            table.is_too_long = true;
            return Ok(table);
        }
        for (item, name) in items {
            // A conversation of nothing cannot be rendered, so its last message has no marginal cost.
            let marginal_tokens = self.without(item).tokens(template).ok().map(|without| total as i64 - without as i64);
            match table.rows.iter_mut().find(|row| row.name == name) {
                Some(row) => row.marginal_tokens = marginal_tokens,
                None => table.rows.push(Row { name, tokens: 0, marginal_tokens }),
            }
        }
        Ok(table)
    }

    /// All that can be left out, with the names of the segments.
    pub fn items(&self) -> Vec<(Item, String)> {
        let sections = self.sections.iter().enumerate().map(|(at, section)| (Item::Section(at), section.name.clone()));
        let mut names: Vec<String> = Vec::new();
        for tool in &self.tools {
            names.push(unique(format!("tool:{}", tool.name), &names));
        }
        let tools = names.into_iter().enumerate().map(|(at, name)| (Item::Tool(at), name));
        // The sections make one message, which is the first.
        let first = usize::from(self.sections.iter().any(|section| !section.text.is_empty()));
        let messages = self.messages.iter().enumerate().flat_map(|(at, message)| {
            let number = at + first;
            let (name, reminder) = match message {
                Message::System { .. } if number == 0 => ("system".to_owned(), None),
                Message::System { .. } => (format!("message:{number}:system"), None),
                Message::User { .. } => (format!("message:{number}:user"), None),
                Message::Assistant(_) => (format!("message:{number}:assistant"), None),
                Message::Tool(result) => {
                    let reminder = result.reminder.as_ref().map(|_| format!("reminder:{number}"));
                    (format!("tool_result:{number}:{}", result.name), reminder)
                }
            };
            let reminder = reminder.map(|name| (Item::Reminder(at), name));
            std::iter::once((Item::Message(at), name)).chain(reminder)
        });
        sections.chain(tools).chain(messages).collect()
    }

    /// The same without one thing. A tool's result is left out without the call that it answers.
    pub fn without(&self, item: Item) -> Layout {
        let mut rest = self.clone();
        match item {
            Item::Section(at) => drop(rest.sections.remove(at)),
            Item::Tool(at) => drop(rest.tools.remove(at)),
            Item::Message(at) => drop(rest.messages.remove(at)),
            Item::Reminder(at) => {
                if let Message::Tool(result) = &mut rest.messages[at] {
                    result.reminder = None;
                }
            }
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::OnceLock;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::chat::bundled;
    use crate::message::{AssistantMessage, ToolCall, ToolResult};

    fn template() -> &'static Template {
        static TEMPLATE: OnceLock<Template> = OnceLock::new();
        TEMPLATE.get_or_init(|| bundled::template().unwrap())
    }

    /// Short words that tokens span, in composed form, as the tokenizer takes text.
    fn text() -> impl Strategy<Value = String> {
        "[a-dA-D0-3 .,{}\"\n<|>ạấđệọữ中🌾]{0,10}"
    }

    fn tool() -> impl Strategy<Value = ToolSpec> {
        ("[a-c]{1,2}", text(), text()).prop_map(|(name, description, of)| ToolSpec {
            name,
            description,
            parameters: json!({"type": "object", "properties": {"q": {"type": "string", "description": of}}}),
        })
    }

    /// Turns: what the user says, then calls with their results, then an answer.
    fn turn() -> impl Strategy<Value = Vec<Message>> {
        let call = (text(), text(), prop::option::of(text()));
        (text(), prop::collection::vec(call, 0..3), text()).prop_map(|(task, calls, answer)| {
            let mut messages = vec![Message::User { text: task }];
            for (argument, result, reminder) in calls {
                let call = ToolCall {
                    id: "call_1".into(),
                    name: "a".into(),
                    arguments: json!({"q": argument}),
                    rescued: false,
                };
                messages.push(Message::Assistant(AssistantMessage { calls: vec![call], ..Default::default() }));
                messages.push(Message::Tool(ToolResult {
                    call_id: "call_1".into(),
                    name: "a".into(),
                    text: result,
                    is_error: false,
                    led_nowhere: false,
                    reminder,
                }));
            }
            messages.push(Message::Assistant(AssistantMessage { text: answer, ..Default::default() }));
            messages
        })
    }

    fn layouts() -> impl Strategy<Value = Layout> {
        let sections = prop::collection::vec(text(), 0..4);
        let tools = prop::collection::vec(tool(), 0..4);
        (sections, tools, prop::collection::vec(turn(), 0..3), text()).prop_map(|(texts, tools, turns, task)| {
            let named = texts.into_iter().enumerate();
            let sections = named.map(|(at, text)| Section { name: format!("section:{at}"), text }).collect();
            let messages = turns.into_iter().flatten().chain([Message::User { text: task }]).collect();
            Layout { sections, messages, tools }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// Each token is some segment's, and of the sections each owns the tokens whose first byte is its own.
        #[test]
        fn every_token_has_one_owner(layout in layouts()) {
            let table = layout.segments(template()).unwrap();
            let prompt = &table.prompt;
            let mut end = 0;
            for (name, range) in &prompt.segments {
                prop_assert!(range.start == end && range.end > end && !name.is_empty(), "{:?}", prompt.segments);
                end = range.end;
            }
            prop_assert_eq!(end, prompt.ids.len());
            prop_assert_eq!(table.rows.iter().map(|row| row.tokens).sum::<usize>(), prompt.ids.len());

            let system: String = layout.sections.iter().map(|section| section.text.as_str()).collect();
            let start = "<|im_start|>system\n".len();
            if !system.is_empty() {
                prop_assert!(prompt.text[start..].starts_with(&system), "{}", prompt.text);
            }
            let (mut from, mut byte) = (start, 0);
            let owners: Vec<(&str, Range<usize>)> = layout.sections.iter().map(|section| {
                let range = from..from + section.text.len();
                from = range.end;
                (section.name.as_str(), range)
            }).collect();
            for (at, id) in prompt.ids.iter().enumerate() {
                let owner = owners.iter().find(|(_, bytes)| bytes.contains(&byte)).map(|(name, _)| *name);
                let (found, _) = prompt.segments.iter().find(|(_, range)| range.contains(&at)).unwrap();
                prop_assert_eq!(owner.is_some(), found.starts_with("section:"), "{} in {:?}", at, prompt.segments);
                prop_assert!(owner.is_none_or(|owner| owner == found), "{} in {:?}", at, prompt.segments);
                byte += template().tokenizer().token_bytes(*id).len();
            }
        }

        /// Without a thing the prompt is shorter by what the table says of it, however it is left out.
        #[test]
        fn what_is_left_out_saves_its_marginal_cost(layout in layouts(), which in any::<prop::sample::Index>()) {
            let table = layout.table(template()).unwrap();
            let marginal = |name: &str| table.rows.iter().find(|row| row.name == name).unwrap().marginal_tokens.unwrap();
            let count = |layout: &Layout| layout.render(template()).unwrap().ids.len() as i64;
            let total = table.prompt.ids.len() as i64;
            if !layout.tools.is_empty() {
                let at = which.index(layout.tools.len());
                let of_name = layout.tools[..at].iter().filter(|tool| tool.name == layout.tools[at].name).count();
                let name = match of_name {
                    0 => format!("tool:{}", layout.tools[at].name),
                    n => format!("tool:{}#{}", layout.tools[at].name, n + 1),
                };
                let tools = layout.tools.iter().enumerate().filter(|(n, _)| *n != at).map(|(_, tool)| tool.clone());
                let rest = Layout { tools: tools.collect(), ..layout.clone() };
                prop_assert_eq!(total - count(&rest), marginal(&name));
            }
            if !layout.sections.is_empty() {
                let at = which.index(layout.sections.len());
                let mut rest = layout.clone();
                rest.sections[at].text.clear();
                prop_assert_eq!(total - count(&rest), marginal(&format!("section:{at}")));
            }
            let results = layout.messages.iter().filter(|message| matches!(message, Message::Tool(_))).count();
            let reported = table.rows.iter().filter(|row| row.name.starts_with("tool_result:"));
            prop_assert_eq!(reported.filter(|row| row.marginal_tokens.is_some()).count(), results);
        }
    }
}
