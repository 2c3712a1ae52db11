//! Messages and tools → the prompt's token ids, through the model's own chat template.
//!
//! Only the template's literal text can hold control tokens. Everything that comes from elsewhere (contents, tools,
//! arguments) goes through the template as a *sentinel*, a private-use character with an index, and is put in place
//! afterwards as plain text. Plain text between two control tokens is encoded in one piece, so that the ids are those of
//! a tokenizer that sees the whole text.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value as JinjaValue};
use minijinja::{Environment, ErrorKind};
use serde_json::Value;

use super::tokenizer::Tokenizer;
use crate::message::{Message, ToolSpec};

/// Opens and closes a sentinel. A template that holds them is refused; a content may, for it never passes through.
const OPEN: char = '\u{F8FE}';
const CLOSE: char = '\u{F8FF}';

/// A prompt, ready for the engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    pub ids: Vec<u32>,
    /// Which part of the prompt each range of `ids` comes from, in order and without gaps. A token that spans two parts
    /// belongs to that of its first byte. Names: `system`, `tools.preamble`, `tool:NAME` (`tool:NAME#2` for the second of a
    /// name), `message:3:user`, `tool_result:4:NAME`, `reminder:4`, `template` (the frame around them), and those of
    /// [`Section`]s.
    pub segments: Vec<(String, Range<usize>)>,
    /// The same as text; spliced ids that are not valid UTF-8 are shown with U+FFFD.
    pub text: String,
    /// How many leading ids make the system turn, tools included.
    pub pinned: usize,
}

impl Prompt {
    /// Tokens by segment name, in order of first appearance.
    pub fn sizes(&self) -> Vec<(String, usize)> {
        let mut sizes: Vec<(String, usize)> = Vec::new();
        for (name, range) in &self.segments {
            match sizes.iter_mut().find(|(n, _)| n == name) {
                Some((_, n)) => *n += range.len(),
                None => sizes.push((name.clone(), range.len())),
            }
        }
        sizes
    }
}

/// A part of the system message that has a segment of its own: the base prompt, the line of a skill, a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Unlike that of every other segment.
    pub name: String,
    pub text: String,
}

/// Why a conversation cannot be rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateError(pub String);

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TemplateError {}

/// A chat template together with the tokenizer that encodes what it renders.
#[derive(Clone)]
pub struct Template {
    source: Arc<str>,
    tokenizer: Arc<Tokenizer>,
    /// What stands in the system turn when there is no system message; empty when the template has nothing.
    default_system: String,
    /// The source had a known fault, which was repaired.
    repaired: bool,
}

impl Template {
    /// The Jinja source, as it is used.
    pub fn source(&self) -> &str {
        &self.source
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Template({} bytes)", self.source.len())
    }
}

/// Some of Qwen's own files (the Coder 1.5B GGUF among them) show the model a call with doubled braces, a Python format string
/// that was never formatted. A model that is shown that writes it, and it is no JSON. Qwen's other files and the tokenizer
/// repositories have single braces.
fn repaired(source: &str) -> std::borrow::Cow<'_, str> {
    const WRONG: &str = r#"{{\"name\": <function-name>, \"arguments\": <args-json-object>}}"#;
    if !source.contains(WRONG) {
        return source.into();
    }
    tracing::info!(
        "the chat template of this file shows calls with doubled braces, a known fault; single ones are used"
    );
    source.replace(WRONG, &WRONG[1..WRONG.len() - 1]).into()
}

impl Template {
    /// From the Jinja text, e.g. a GGUF's `tokenizer.chat_template`. It is tried once on a small conversation, so that a
    /// template that cannot work is refused here.
    pub fn new(source: &str, tokenizer: Arc<Tokenizer>) -> Result<Template, TemplateError> {
        if source.contains([OPEN, CLOSE]) {
            return Err(TemplateError(format!(
                "the chat template contains U+{:04X} or U+{:04X}, which mark untrusted text here; it cannot be used",
                OPEN as u32, CLOSE as u32
            )));
        }
        let source = repaired(source);
        let repaired = matches!(source, std::borrow::Cow::Owned(_));
        let mut template =
            Template { source: source.as_ref().into(), tokenizer, default_system: String::new(), repaired };
        let bare = template.render(&[Message::User { text: String::new() }], &[], false)?;
        if let Some(rest) = bare.text.strip_prefix("<|im_start|>system\n")
            && let Some(end) = rest.find("<|im_end|>")
        {
            template.default_system = rest[..end].to_owned();
        }
        Ok(template)
    }

    /// From a `tokenizer_config.json`, whose `chat_template` is a string or a list of named ones (then `default`).
    pub fn from_config(path: &Path, tokenizer: Arc<Tokenizer>) -> Result<Template, TemplateError> {
        let fault = |why: String| TemplateError(format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| fault(format!("cannot be read: {e}")))?;
        let config: Value = serde_json::from_str(&text).map_err(|e| fault(format!("not JSON: {e}")))?;
        let source = match &config["chat_template"] {
            Value::String(source) => Some(source.as_str()),
            Value::Array(named) => named
                .iter()
                .find(|t| t["name"] == "default")
                .or(if named.len() == 1 { named.first() } else { None })
                .and_then(|t| t["template"].as_str()),
            _ => None,
        };
        let source = source.ok_or_else(|| {
            fault(
                "has no `chat_template` (a string, or a list with one named `default`); an instruct model has one"
                    .into(),
            )
        })?;
        Template::new(source, tokenizer)
    }

    /// What the template itself puts into the system turn where there is no system message; empty where it puts nothing.
    pub fn default_system(&self) -> &str {
        &self.default_system
    }

    /// Whether the file's template has the fault of doubled braces, and single ones are used in its place.
    pub fn is_repaired(&self) -> bool {
        self.repaired
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The prompt of a conversation. `add_generation_prompt` opens the assistant's turn at the end.
    ///
    /// An assistant message that has its ids is spliced as these ids. A reminder stands as plain text on a line of its
    /// own at the end of its result's turn.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<Prompt, TemplateError> {
        self.render_divided(&[], messages, tools, add_generation_prompt)
    }

    /// As [`Template::render`], with a system message before `messages` that consists of these sections, one right after the
    /// other. Where they hold no text there is none.
    pub fn render_sections(
        &self,
        sections: &[Section],
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<Prompt, TemplateError> {
        let text: String = sections.iter().map(|section| section.text.as_str()).collect();
        if text.is_empty() {
            return self.render_divided(&[], messages, tools, add_generation_prompt);
        }
        let system = std::iter::once(Message::System { text });
        let messages: Vec<Message> = system.chain(messages.iter().cloned()).collect();
        self.render_divided(sections, &messages, tools, add_generation_prompt)
    }

    /// `sections`: of the first message; none where it is of one piece.
    fn render_divided(
        &self,
        sections: &[Section],
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<Prompt, TemplateError> {
        if messages.is_empty() {
            return Err(TemplateError("a conversation needs at least one message".into()));
        }
        let table = Arc::new(Table::default());
        let rendered = self.run(messages, tools, add_generation_prompt, &table)?;
        let parts = table.0.lock().unwrap_or_else(|e| e.into_inner());
        let mut pieces = self.pieces(&rendered, &parts)?;
        for (i, message) in messages.iter().enumerate() {
            if let Message::Tool(result) = message
                && let Some(reminder) = &result.reminder
            {
                self.insert_reminder(&mut pieces, &parts, i, reminder)?;
            }
        }
        Ok(self.encode(&pieces, &parts, sections, !tools.is_empty()))
    }

    /// The tokens that this tool adds to a prompt that has tools already.
    pub fn tool_cost(&self, spec: &ToolSpec) -> Result<usize, TemplateError> {
        let one = self.probe(std::slice::from_ref(spec))?;
        Ok(self.probe(&[spec.clone(), spec.clone()])? - one)
    }

    /// The tokens that having tools at all adds to a prompt, besides the tools themselves.
    pub fn header_tokens(&self) -> Result<usize, TemplateError> {
        let spec = ToolSpec { name: "f".into(), description: String::new(), parameters: serde_json::json!({}) };
        let one = self.probe(std::slice::from_ref(&spec))?;
        Ok(one - self.probe(&[])? - self.tool_cost(&spec)?)
    }

    fn probe(&self, tools: &[ToolSpec]) -> Result<usize, TemplateError> {
        Ok(self.render(&[Message::User { text: "x".into() }], tools, true)?.ids.len())
    }

    /// The template's output, with sentinels where untrusted text belongs.
    fn run(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
        table: &Arc<Table>,
    ) -> Result<String, TemplateError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| TemplateError(format!("the chat template's syntax: {e}")))?);
        env.add_function("raise_exception", |why: String| -> Result<JinjaValue, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        let of_filter = table.clone();
        env.add_filter("tojson", move |value: JinjaValue| of_filter.tojson(&value));
        env.add_template("chat", &self.source).map_err(|e| TemplateError(format!("the chat template: {e}")))?;
        let template = env.get_template("chat").map_err(|e| TemplateError(format!("the chat template: {e}")))?;

        let messages: Vec<JinjaValue> = messages.iter().enumerate().map(|(i, m)| table.message(i, m)).collect();
        let mut names = Vec::new();
        let tools: Vec<JinjaValue> = tools
            .iter()
            .map(|tool| {
                let name = unique(format!("tool:{}", tool.name), &names);
                names.push(name.clone());
                let spec = serde_json::json!({
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                });
                table.json(spec, name)
            })
            .collect();
        let tools = if tools.is_empty() { JinjaValue::from(()) } else { JinjaValue::from(tools) };
        template
            .render(minijinja::context! { messages, tools, add_generation_prompt })
            .map_err(|e| TemplateError(format!("the chat template refuses this conversation: {e:#}")))
    }

    fn pieces<'a>(&self, rendered: &'a str, parts: &[Part]) -> Result<Vec<Piece<'a>>, TemplateError> {
        let mut pieces = Vec::new();
        let mut rest = rendered;
        while !rest.is_empty() {
            let Some(open) = rest.find(OPEN) else {
                self.literal(rest, &mut pieces);
                break;
            };
            self.literal(&rest[..open], &mut pieces);
            let after = &rest[open + OPEN.len_utf8()..];
            let sentinel = after.find(CLOSE).and_then(|end| Some((end, after[..end].parse::<usize>().ok()?)));
            let Some((end, index)) = sentinel.filter(|&(_, index)| index < parts.len()) else {
                return Err(TemplateError(
                    "the chat template changes the text of a message instead of placing it; it cannot be used".into(),
                ));
            };
            pieces.push(Piece::Part(index));
            rest = &after[end + CLOSE.len_utf8()..];
        }
        Ok(pieces)
    }

    /// Splits the template's own text at control tokens.
    fn literal<'a>(&self, mut text: &'a str, pieces: &mut Vec<Piece<'a>>) {
        while !text.is_empty() {
            let controls = self.tokenizer.controls().iter();
            let first = controls
                .filter_map(|(name, id)| text.find(name.as_str()).map(|at| (at, std::cmp::Reverse(name.len()), *id)))
                .min();
            match first {
                None => {
                    pieces.push(Piece::Literal(text));
                    return;
                }
                Some((at, len, id)) => {
                    if at > 0 {
                        pieces.push(Piece::Literal(&text[..at]));
                    }
                    pieces.push(Piece::Control(id));
                    text = &text[at + len.0..];
                }
            }
        }
    }

    fn insert_reminder(
        &self,
        pieces: &mut Vec<Piece<'_>>,
        parts: &[Part],
        message: usize,
        reminder: &str,
    ) -> Result<(), TemplateError> {
        let content = pieces.iter().position(|p| matches!(p, Piece::Part(i) if parts[*i].message == Some(message)));
        let end = self.tokenizer.control("<|im_end|>");
        let close = content.and_then(|c| {
            pieces[c..].iter().position(|p| matches!(p, Piece::Control(id) if Some(*id) == end)).map(|i| c + i)
        });
        let Some(close) = close else {
            return Err(TemplateError(format!(
                "the chat template does not show the tool result of message {message} in a turn that <|im_end|> closes, so \
                 its reminder has no place"
            )));
        };
        pieces.insert(close, Piece::Reminder(format!("\n{reminder}"), format!("reminder:{message}")));
        Ok(())
    }

    fn encode(&self, pieces: &[Piece<'_>], parts: &[Part], sections: &[Section], has_tools: bool) -> Prompt {
        let mut out =
            Encoder { tokenizer: &self.tokenizer, prompt: Prompt::default(), run: String::new(), marks: Vec::new() };
        let end = self.tokenizer.control("<|im_end|>");
        // The system turn ends with the first <|im_end|>; whatever control token comes next opens another turn.
        let (mut in_system, mut closed, mut seen_system) = (true, false, false);
        for piece in pieces {
            let frame = if in_system && has_tools && seen_system { "tools.preamble" } else { "template" };
            match piece {
                Piece::Literal(text) => {
                    let default = self.default_system.as_str();
                    let found =
                        if in_system && !seen_system && !default.is_empty() { text.find(default) } else { None };
                    let Some(at) = found else {
                        out.text(text, frame);
                        continue;
                    };
                    seen_system = true;
                    out.text(&text[..at], frame);
                    out.text(default, "system");
                    out.text(&text[at + default.len()..], if has_tools { "tools.preamble" } else { "template" });
                }
                Piece::Reminder(text, name) => out.text(text, name),
                Piece::Part(index) => {
                    let part = &parts[*index];
                    seen_system |= in_system;
                    match &part.ids {
                        Some(ids) => out.ids(ids, &part.name),
                        None if part.message == Some(0) && !sections.is_empty() => {
                            sections.iter().for_each(|section| out.text(&section.text, &section.name));
                        }
                        None => out.text(&part.text, &part.name),
                    }
                }
                Piece::Control(id) => {
                    if closed && in_system {
                        in_system = false;
                        out.flush();
                        out.prompt.pinned = out.prompt.ids.len();
                    }
                    out.ids(&[*id], if Some(*id) == end { "template" } else { frame });
                    closed |= Some(*id) == end;
                }
            }
        }
        out.flush();
        if in_system {
            out.prompt.pinned = out.prompt.ids.len();
        }
        out.prompt
    }
}

enum Piece<'a> {
    Literal(&'a str),
    Control(u32),
    /// An index into the table.
    Part(usize),
    /// Text and segment name.
    Reminder(String, String),
}

/// Collects plain text until a control token or spliced ids end it, then encodes it in one piece.
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    prompt: Prompt,
    run: String,
    /// Where in `run` each part begins.
    marks: Vec<(usize, String)>,
}

impl Encoder<'_> {
    fn text(&mut self, text: &str, name: &str) {
        if !text.is_empty() {
            self.marks.push((self.run.len(), name.to_owned()));
            self.run.push_str(text);
        }
    }

    fn ids(&mut self, ids: &[u32], name: &str) {
        self.flush();
        for &id in ids {
            self.push(id, name);
        }
        self.prompt.text.push_str(&String::from_utf8_lossy(&self.tokenizer.decode(ids)));
    }

    fn flush(&mut self) {
        let marks = std::mem::take(&mut self.marks);
        let run = std::mem::take(&mut self.run);
        let mut current = 0;
        for (id, offset) in self.tokenizer.encode_with_offsets(&run) {
            while marks.get(current + 1).is_some_and(|(start, _)| *start <= offset) {
                current += 1;
            }
            let name = marks.get(current).map_or("template", |(_, name)| name);
            self.push(id, name);
        }
        self.prompt.text.push_str(&run);
    }

    fn push(&mut self, id: u32, name: &str) {
        let at = self.prompt.ids.len();
        self.prompt.ids.push(id);
        match self.prompt.segments.last_mut() {
            Some((last, range)) if last == name => range.end = at + 1,
            _ => self.prompt.segments.push((name.to_owned(), at..at + 1)),
        }
    }
}

/// One untrusted text.
#[derive(Debug)]
struct Part {
    text: String,
    /// Stands for these ids instead of for `text`.
    ids: Option<Vec<u32>>,
    name: String,
    /// The message whose content this is.
    message: Option<usize>,
}

/// The untrusted texts of one rendering; a sentinel holds an index into it.
#[derive(Debug, Default)]
struct Table(Mutex<Vec<Part>>);

impl Table {
    fn add(&self, part: Part) -> JinjaValue {
        // Templates ask whether there is content at all, so nothing must stay nothing.
        if part.text.is_empty() && part.ids.is_none() { JinjaValue::from("") } else { self.place(part) }
    }

    fn place(&self, part: Part) -> JinjaValue {
        let mut parts = self.0.lock().unwrap_or_else(|e| e.into_inner());
        parts.push(part);
        JinjaValue::from(format!("{OPEN}{}{CLOSE}", parts.len() - 1))
    }

    fn json(self: &Arc<Self>, value: Value, name: String) -> JinjaValue {
        JinjaValue::from_object(Json { value: Arc::new(value), name: name.into(), table: self.clone() })
    }

    fn message(self: &Arc<Self>, index: usize, message: &Message) -> JinjaValue {
        let content = |text: &str, ids: Option<&Vec<u32>>, name: String| {
            self.add(Part { text: text.to_owned(), ids: ids.cloned(), name, message: Some(index) })
        };
        match message {
            Message::System { text } => {
                let name = if index == 0 { "system".to_owned() } else { format!("message:{index}:system") };
                minijinja::context! { role => "system", content => content(text, None, name) }
            }
            Message::User { text } => {
                minijinja::context! { role => "user", content => content(text, None, format!("message:{index}:user")) }
            }
            Message::Tool(result) => {
                let name = format!("tool_result:{index}:{}", result.name);
                // Placed even when it is empty: a reminder is found by it.
                let part = Part { text: result.text.clone(), ids: None, name, message: Some(index) };
                minijinja::context! { role => "tool", content => self.place(part) }
            }
            Message::Assistant(message) => {
                let name = format!("message:{index}:assistant");
                if message.ids.is_some() {
                    // The ids hold the calls too.
                    let content = content(&message.text, message.ids.as_ref(), name);
                    return minijinja::context! { role => "assistant", content };
                }
                let content = content(&message.text, None, name.clone());
                if message.calls.is_empty() {
                    return minijinja::context! { role => "assistant", content };
                }
                let calls = message.calls.iter().map(|call| {
                    let call = serde_json::json!({
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    });
                    self.json(call, name.clone())
                });
                minijinja::context! { role => "assistant", content, tool_calls => calls.collect::<Vec<_>>() }
            }
        }
    }

    /// The `tojson` filter: a sentinel that stands for the JSON text.
    fn tojson(&self, value: &JinjaValue) -> Result<JinjaValue, minijinja::Error> {
        let (value, name) = self.plain(value, 0)?;
        let (text, name) = (to_json(&value), name.unwrap_or_else(|| "template".to_owned()));
        Ok(self.add(Part { text, ids: None, name, message: None }))
    }

    /// A template's value as JSON, its sentinels replaced by what they stand for; and the segment of the first of them.
    fn plain(&self, value: &JinjaValue, depth: usize) -> Result<(Value, Option<String>), minijinja::Error> {
        let fault = |why: String| Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {why}")));
        if depth > 64 {
            return fault("the value is nested more than 64 deep".into());
        }
        if let Some(json) = value.downcast_object_ref::<Json>() {
            return Ok(((*json.value).clone(), Some(json.name.to_string())));
        }
        let mut name = None;
        let plain = match value.kind() {
            ValueKind::None | ValueKind::Undefined => Value::Null,
            ValueKind::Bool => Value::Bool(value.is_true()),
            ValueKind::Number => match (value.is_integer(), value.as_i64(), f64::try_from(value.clone())) {
                (true, Some(i), _) => Value::from(i),
                (_, _, Ok(x)) => Value::from(x),
                _ => return fault(format!("{value} is too large")),
            },
            ValueKind::String => match value.as_str().and_then(|s| self.original(s)) {
                Some((text, segment)) => {
                    name = Some(segment);
                    Value::String(text)
                }
                None => Value::String(value.to_string()),
            },
            ValueKind::Seq | ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()? {
                    let (item, segment) = self.plain(&item, depth + 1)?;
                    name = name.or(segment);
                    items.push(item);
                }
                Value::Array(items)
            }
            ValueKind::Map => {
                let mut map = serde_json::Map::new();
                for key in value.try_iter()? {
                    let (item, segment) = self.plain(&value.get_item(&key)?, depth + 1)?;
                    name = name.or(segment);
                    map.insert(key.to_string(), item);
                }
                Value::Object(map)
            }
            other => return fault(format!("a {other} is no JSON")),
        };
        Ok((plain, name))
    }

    /// The text and segment that a lone sentinel stands for.
    fn original(&self, sentinel: &str) -> Option<(String, String)> {
        let index: usize = sentinel.strip_prefix(OPEN)?.strip_suffix(CLOSE)?.parse().ok()?;
        let parts = self.0.lock().unwrap_or_else(|e| e.into_inner());
        parts.get(index).map(|part| (part.text.clone(), part.name.clone()))
    }
}

/// A JSON value as a template sees it: its strings are sentinels, its keys keep their order.
#[derive(Debug)]
struct Json {
    value: Arc<Value>,
    name: Arc<str>,
    table: Arc<Table>,
}

impl Json {
    fn child(&self, value: &Value) -> JinjaValue {
        match value {
            Value::Null => JinjaValue::from(()),
            Value::Bool(b) => JinjaValue::from(*b),
            Value::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
                (Some(i), _, _) => JinjaValue::from(i),
                (_, Some(u), _) => JinjaValue::from(u),
                (_, _, f) => JinjaValue::from(f.unwrap_or_default()),
            },
            Value::String(text) => {
                self.table.add(Part { text: text.clone(), ids: None, name: self.name.to_string(), message: None })
            }
            Value::Array(_) | Value::Object(_) => JinjaValue::from_object(Json {
                value: Arc::new(value.clone()),
                name: self.name.clone(),
                table: self.table.clone(),
            }),
        }
    }

    /// A key is a plain string, so that templates can look things up, unless it tries to be more.
    fn key(&self, key: &str) -> JinjaValue {
        if key.contains(['<', OPEN, CLOSE]) {
            self.child(&Value::String(key.to_owned()))
        } else {
            JinjaValue::from(key)
        }
    }
}

impl Object for Json {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        if self.value.is_array() { ObjectRepr::Seq } else { ObjectRepr::Map }
    }

    fn get_value(self: &Arc<Self>, key: &JinjaValue) -> Option<JinjaValue> {
        let child = match key.as_str() {
            Some(key) => match self.table.original(key) {
                Some((key, _)) => self.value.get(key.as_str()),
                None => self.value.get(key),
            },
            None => self.value.get(key.as_usize()?),
        };
        child.map(|value| self.child(value))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match &*self.value {
            Value::Array(items) => Enumerator::Seq(items.len()),
            Value::Object(map) => Enumerator::Values(map.keys().map(|key| self.key(key)).collect()),
            _ => Enumerator::Empty,
        }
    }
}

/// A name that is not taken: `name` itself, else `name#2` and so on.
pub fn unique(name: String, taken: &[String]) -> String {
    if !taken.contains(&name) {
        return name;
    }
    let numbered = (2..).map(|number| format!("{name}#{number}"));
    numbered.into_iter().find(|numbered| !taken.contains(numbered)).unwrap_or(name)
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, which is what the models were trained on.
pub fn to_json(value: &Value) -> String {
    let mut out = String::new();
    write_json(value, &mut out);
    out
}

fn write_json(value: &Value, out: &mut String) {
    match value {
        Value::Number(n) if n.is_f64() => out.push_str(&python_float(n.as_f64().unwrap_or_default())),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_json(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_json(&Value::String(key.clone()), out);
                out.push_str(": ");
                write_json(item, out);
            }
            out.push('}');
        }
        // Strings, whole numbers and the constants are the same in both.
        scalar => out.push_str(&scalar.to_string()),
    }
}

/// Python's `repr` of a float: an exponent, of two digits at least, below 1e-4 and from 1e16 on.
fn python_float(x: f64) -> String {
    if x == 0.0 || (1e-4..1e16).contains(&x.abs()) {
        return format!("{x:?}");
    }
    let text = format!("{x:e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let (sign, digits) = match exponent.strip_prefix('-') {
                Some(digits) => ('-', digits),
                None => ('+', exponent),
            };
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None => text,
    }
}
