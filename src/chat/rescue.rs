//! Finds calls that the model writes in a foreign form: bare JSON, a fence, `<tools>`, a function-style call.
//!
//! A call is an opener, then the complete name of an offered tool, then `arguments` or `parameters` (or, function-style,
//! an opening parenthesis). Openers are:
//!
//! * a JSON object or list: `{"name": "X", "arguments"`, `{"type": "function", "function": {"name": …`,
//!   `[{"name": …`, `{"tool": "X", …`, `{"tool_calls": [{…`, in any order of these keys, either kind of quote;
//!   with doubled braces too;
//! * XML: `<name>X</name> <arguments>`, after such a tag or without one;
//! * a tag spelled from ordinary characters, such as `<tool_call>`, `<tools>`, `<function_call>`, `<|tool_call|>`;
//! * the name itself followed directly by `(`, at the start of a line only: a sentence can say `use Read(path)`;
//! * a fence (three backticks, any word after them) with one of these first in it.
//!
//! An object with any other key, an unknown name, code in a fence or between backticks is an answer. What lies inside it is not
//! looked at again, so an answer that holds a call somewhere within stays an answer too.

use std::sync::Arc;

/// What a text is, as far as it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scan {
    /// No call, and nothing at the end that could become one.
    Clear,
    /// The text from `start` (a byte offset) on could still become a call.
    Pending { start: usize },
    /// The text from `start` on is a call of this tool.
    Call { start: usize, name: String },
}

/// The first call in `text`, or whether its end could become one. `tools` are the offered names.
///
/// `start` is where the opener begins, or where its line does if only white space stands between: a fence and its indentation
/// belong to the call. If nothing but white space stands before it at all, `start` is 0.
pub fn scan(text: &str, tools: &[&str]) -> Scan {
    Scanner::new(tools.iter().map(|&t| t.to_owned()).collect()).scan(text)
}

/// [`scan`] for a text that grows: what was decided is not read again.
#[derive(Clone, Debug)]
pub struct Scanner {
    tools: Arc<[String]>,
    /// Where the text begins, as far as calls go.
    from: usize,
    /// Everything before is decided.
    at: usize,
    mode: Mode,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Mode {
    /// `at` is the start of a line.
    LineStart,
    InLine,
    /// Inside a fence whose content is no call; `at` is after its backticks or at the start of a line.
    Fence,
    /// Between backticks in a line.
    Code,
    /// Inside a JSON value that is no call. One that began within a line is over with the line.
    Value {
        within_line: bool,
        depth: usize,
        quoted: bool,
        escaped: bool,
    },
}

impl Scanner {
    pub fn new(tools: Arc<[String]>) -> Scanner {
        Scanner { tools, from: 0, at: 0, mode: Mode::LineStart }
    }

    /// Forgets what was read: the text has been shortened.
    pub fn reset(&mut self) {
        self.at = self.from;
        self.mode = Mode::LineStart;
    }

    /// The text begins here; what stands before is no part of it.
    pub fn begin_at(&mut self, from: usize) {
        self.from = from;
        self.reset();
    }

    /// Takes everything up to the end of `text` for an answer, whatever it looks like.
    pub fn pass(&mut self, text: &str) {
        self.at = text.len();
        self.mode = Mode::InLine;
    }

    /// As [`scan`]; `text` begins with the text of the last call.
    pub fn scan(&mut self, text: &str) -> Scan {
        loop {
            match &mut self.mode {
                Mode::InLine => {
                    let Some(i) = text[self.at..].find(['\n', '{', '[', '<', '`']) else {
                        self.at = text.len();
                        return Scan::Clear;
                    };
                    let before = text[..self.at + i].chars().next_back();
                    self.at += i;
                    let start = self.at;
                    let first = text.as_bytes()[start];
                    if first == b'\n' {
                        self.at += 1;
                        self.mode = Mode::LineStart;
                        continue;
                    }
                    if before.is_some_and(|c| c.is_alphanumeric() || "_\"'\\([{".contains(c)) && first != b'`' {
                        self.at += 1; // an index, a type, a quotation
                        continue;
                    }
                    let mut cursor = Cursor { text, at: start, tools: &self.tools };
                    match cursor.opener(0) {
                        Ok(name) => return Scan::Call { start, name },
                        Err(Stop::More) => return Scan::Pending { start },
                        Err(Stop::No) => match first {
                            b'`' => {
                                self.at += text[start..].bytes().take(3).take_while(|&b| b == b'`').count();
                                self.mode = if self.at - start < 3 { Mode::Code } else { Mode::InLine };
                            }
                            b'<' => self.at += 1,
                            _ => {
                                self.mode = Mode::Value { within_line: true, depth: 0, quoted: false, escaped: false };
                            }
                        },
                    }
                }
                Mode::Code => match text[self.at..].find(['\n', '`']) {
                    None => {
                        self.at = text.len();
                        return Scan::Clear;
                    }
                    Some(i) => {
                        self.at += i;
                        let ends = text.as_bytes()[self.at] == b'`';
                        self.at += usize::from(ends);
                        self.mode = Mode::InLine;
                    }
                },
                Mode::Fence => {
                    // The closing fence is a line that starts with the backticks.
                    let line_end = text[self.at..].find('\n').map(|i| self.at + i);
                    let line = &text[self.at..line_end.unwrap_or(text.len())];
                    if line.trim_start().starts_with("```") {
                        self.at += line.len() - line.trim_start().len() + 3;
                        self.mode = Mode::InLine;
                        continue;
                    }
                    match line_end {
                        None => return Scan::Clear,
                        Some(end) => self.at = end + 1,
                    }
                }
                Mode::Value { within_line, depth, quoted, escaped } => {
                    let mut closed = false;
                    for &byte in &text.as_bytes()[self.at..] {
                        if byte == b'\n' && *within_line {
                            closed = true;
                            break;
                        }
                        self.at += 1;
                        match byte {
                            _ if *escaped => *escaped = false,
                            b'\\' if *quoted => *escaped = true,
                            b'"' => *quoted = !*quoted,
                            b'{' | b'[' if !*quoted => *depth += 1,
                            b'}' | b']' if !*quoted => {
                                *depth = depth.saturating_sub(1);
                                if *depth == 0 {
                                    closed = true;
                                    break;
                                }
                            }
                            _ => {}
                        }
                    }
                    if !closed {
                        return Scan::Clear;
                    }
                    self.mode = Mode::InLine;
                }
                Mode::LineStart => {
                    let rest = &text[self.at..];
                    let opener = self.at + (rest.len() - rest.trim_start().len());
                    let before = &text[self.from..opener];
                    let line = self.from + before.rfind('\n').map_or(0, |i| i + 1);
                    let start = if before.trim_start().is_empty() { self.from } else { line };
                    if opener == text.len() {
                        // White space at the very beginning, or an indentation, would vanish with the call.
                        return if start < text.len() { Scan::Pending { start } } else { Scan::Clear };
                    }
                    let mut cursor = Cursor { text, at: opener, tools: &self.tools };
                    match cursor.opener(0) {
                        Ok(name) => return Scan::Call { start, name },
                        Err(Stop::More) => return Scan::Pending { start },
                        Err(Stop::No) => {
                            self.at = opener;
                            let rest = &text[opener..];
                            self.mode = if rest.starts_with("```") {
                                self.at += 3;
                                Mode::Fence
                            } else if rest.starts_with(['{', '[']) {
                                Mode::Value { within_line: false, depth: 0, quoted: false, escaped: false }
                            } else {
                                Mode::InLine
                            };
                        }
                    }
                }
            }
        }
    }
}

/// Why there is no call here.
enum Stop {
    /// The text ends before it is decided.
    More,
    /// It cannot become one.
    No,
}

const TAGS: &[&str] = &[
    "<tool_call>",
    "<tool_calls>",
    "<tools>",
    "<tool>",
    "<function_call>",
    "<function_calls>",
    "<function>",
    "<functions>",
    "<|tool_call|>",
    "<|tool_calls|>",
    "<|function_call|>",
    "<|tool_call_start|>",
];
const NAME_KEYS: &[&str] = &["name", "tool", "tool_name", "function_name"];
const ARGUMENT_KEYS: &[&str] = &["arguments", "parameters"];
/// The value is a call or a list of calls. `function` can also hold the name itself.
const WRAPPER_KEYS: &[&str] = &["function", "function_call", "tool_call", "tool_calls", "function_calls"];
/// The value says nothing about whether this is a call.
const NEUTRAL_KEYS: &[&str] = &["type", "id", "call_id"];
/// The value says nothing either, but a tool's definition has it too: what follows must be no schema.
const DESCRIPTION_KEY: &str = "description";

struct Cursor<'a> {
    text: &'a str,
    at: usize,
    tools: &'a [String],
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    /// The next byte after white space.
    fn peek(&mut self) -> Result<u8, Stop> {
        self.skip_space();
        self.rest().bytes().next().ok_or(Stop::More)
    }

    fn expect(&mut self, byte: u8) -> Result<(), Stop> {
        if self.peek()? != byte {
            return Err(Stop::No);
        }
        self.at += 1;
        Ok(())
    }

    fn opener(&mut self, depth: usize) -> Result<String, Stop> {
        if depth > 4 {
            return Err(Stop::No);
        }
        match self.peek()? {
            b'{' | b'[' => self.calls(depth),
            b'<' => {
                let rest = self.rest();
                if let Some(tag) = TAGS.iter().find(|tag| rest.starts_with(**tag)) {
                    self.at += tag.len();
                    return self.opener(depth + 1);
                }
                if rest.starts_with("<name>") {
                    return self.named_by_tag();
                }
                if "<name>".starts_with(rest) {
                    return Err(Stop::More);
                }
                Err(if TAGS.iter().any(|tag| tag.starts_with(rest)) { Stop::More } else { Stop::No })
            }
            b'`' => {
                let rest = self.rest();
                let Some(after) = rest.strip_prefix("```") else {
                    return Err(if "```".starts_with(rest) { Stop::More } else { Stop::No });
                };
                let info = after.split('\n').next().unwrap_or_default();
                let word = info.trim_end_matches('\r').trim();
                if word.len() > 32 || !word.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '+' | '.')) {
                    return Err(Stop::No);
                }
                if info.len() == after.len() {
                    return Err(Stop::More);
                }
                self.at += 3 + info.len() + 1;
                self.opener(depth + 1)
            }
            _ => {
                let rest = self.rest();
                let mut stop = Stop::No;
                for tool in self.tools {
                    match rest.strip_prefix(tool.as_str()) {
                        Some("") => stop = Stop::More,
                        Some(after) if after.starts_with('(') => return Ok(tool.clone()),
                        Some(_) => {}
                        None if tool.starts_with(rest) => stop = Stop::More,
                        None => {}
                    }
                }
                Err(stop)
            }
        }
    }

    /// `<name>X</name>`, then `<arguments>` or `<parameters>`: XML all the way.
    fn named_by_tag(&mut self) -> Result<String, Stop> {
        self.at += "<name>".len();
        let rest = self.rest();
        let Some(end) = rest.find('<') else {
            let begun = rest.trim_start();
            return Err(if self.tools.iter().any(|t| t.starts_with(begun.trim_end())) { Stop::More } else { Stop::No });
        };
        let name = rest[..end].trim().to_owned();
        if !self.tools.contains(&name) {
            return Err(Stop::No);
        }
        self.at += end;
        self.tag(&["</name>"])?;
        self.skip_space();
        self.tag(&["<arguments>", "<parameters>"])?;
        Ok(name)
    }

    /// One of these, to be read past.
    fn tag(&mut self, tags: &[&str]) -> Result<(), Stop> {
        let rest = self.rest();
        match tags.iter().find(|tag| rest.starts_with(**tag)) {
            Some(tag) => self.at += tag.len(),
            None if tags.iter().any(|tag| tag.starts_with(rest)) => return Err(Stop::More),
            None => return Err(Stop::No),
        }
        Ok(())
    }

    /// An object that is a call, or a list that begins with one.
    fn calls(&mut self, depth: usize) -> Result<String, Stop> {
        if depth > 4 {
            return Err(Stop::No);
        }
        match self.peek()? {
            b'[' => {
                self.at += 1;
                self.calls(depth + 1)
            }
            b'{' => self.object(depth),
            _ => Err(Stop::No),
        }
    }

    fn object(&mut self, depth: usize) -> Result<String, Stop> {
        self.expect(b'{')?;
        // Doubled braces, as in a Python format string: the 1.5B Coder writes most of its calls so.
        if self.rest().starts_with('{') {
            return if depth > 4 { Err(Stop::No) } else { self.object(depth + 1) };
        }
        let mut name: Option<String> = None;
        let mut arguments = false;
        let mut described = false;
        loop {
            let keys = [NAME_KEYS, ARGUMENT_KEYS, WRAPPER_KEYS, NEUTRAL_KEYS, &[DESCRIPTION_KEY]];
            let key = self.string(|partial, complete| {
                keys.iter()
                    .flat_map(|k| k.iter())
                    .any(|k| if complete { *k == partial } else { k.starts_with(partial) })
            })?;
            let key = key.as_str();
            if ARGUMENT_KEYS.contains(&key) {
                arguments = true;
                if let Some(name) = name {
                    if described && key == "parameters" {
                        self.no_schema()?;
                    }
                    return Ok(name);
                }
                self.expect(b':')?;
                self.skip_value()?;
            } else {
                self.expect(b':')?;
                let next = self.peek()?;
                if NEUTRAL_KEYS.contains(&key) {
                    self.skip_value()?;
                } else if key == DESCRIPTION_KEY && next != b'{' && !arguments {
                    described = true;
                    self.skip_value()?;
                } else if WRAPPER_KEYS.contains(&key) && matches!(next, b'{' | b'[') {
                    return self.calls(depth + 1);
                } else if NAME_KEYS.contains(&key) || key == "function" {
                    let tools = self.tools;
                    let value = self.string(|partial, complete| {
                        tools.iter().any(|t| if complete { t == partial } else { t.starts_with(partial) })
                    })?;
                    if arguments {
                        return Ok(value);
                    }
                    name = Some(value);
                } else {
                    return Err(Stop::No);
                }
            }
            match self.peek()? {
                b',' => self.at += 1,
                _ => return Err(Stop::No),
            }
        }
    }

    /// What comes are arguments and not the JSON Schema of arguments.
    fn no_schema(&mut self) -> Result<(), Stop> {
        self.expect(b':')?;
        self.expect(b'{')?;
        let key = self.string(|_, _| true)?;
        self.expect(b':')?;
        match key.as_str() {
            "$schema" | "properties" => Err(Stop::No),
            "type" if matches!(self.peek()?, b'"' | b'\'') && self.string(|_, _| true)? == "object" => Err(Stop::No),
            _ => Ok(()),
        }
    }

    /// A string in either kind of quote, if `fits(text, complete)`; an unfinished one that does not fit is refused early.
    fn string(&mut self, fits: impl Fn(&str, bool) -> bool) -> Result<String, Stop> {
        let quote = self.peek()?;
        if !matches!(quote, b'"' | b'\'') {
            return Err(Stop::No);
        }
        let inner = &self.rest()[1..];
        let mut escaped = false;
        let mut end = None;
        for (i, byte) in inner.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'\n' => return Err(Stop::No),
                _ if byte == quote => {
                    end = Some(i);
                    break;
                }
                _ => {}
            }
        }
        let raw = &inner[..end.unwrap_or(inner.len())];
        let text = if raw.contains('\\') {
            let complete = end.and_then(|_| serde_json::from_str::<String>(&format!("\"{raw}\"")).ok());
            match (complete, end) {
                (Some(text), _) => text,
                // Only the end of an escape can tell what it is; the plain part before it can already rule it out.
                (None, None) => raw[..raw.find('\\').unwrap_or(0)].to_owned(),
                (None, Some(_)) => return Err(Stop::No),
            }
        } else {
            raw.to_owned()
        };
        if !fits(&text, end.is_some()) {
            return Err(Stop::No);
        }
        match end {
            None => Err(Stop::More),
            Some(i) => {
                self.at += 1 + i + 1;
                Ok(text)
            }
        }
    }

    /// Goes past one value, strings in either kind of quote respected.
    fn skip_value(&mut self) -> Result<(), Stop> {
        self.skip_space();
        let (mut depth, mut quote, mut escaped) = (0usize, None, false);
        for (i, byte) in self.rest().bytes().enumerate() {
            if let Some(q) = quote {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' => escaped = true,
                    _ if byte == q => {
                        quote = None;
                        if depth == 0 {
                            self.at += i + 1;
                            return Ok(());
                        }
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' | b'\'' => quote = Some(byte),
                b'{' | b'[' => depth += 1,
                b'}' | b']' if depth == 0 => {
                    self.at += i;
                    return Ok(());
                }
                b'}' | b']' => {
                    depth -= 1;
                    if depth == 0 {
                        self.at += i + 1;
                        return Ok(());
                    }
                }
                b',' if depth == 0 => {
                    self.at += i;
                    return Ok(());
                }
                _ => {}
            }
        }
        Err(Stop::More)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: &[&str] = &["search_blog", "Read", "ReadAll", "weather.now-2", "tìm_kiếm", "搜索"];

    /// Every text is also fed character by character: the answer on the whole must be the first that is not open, and
    /// what was clear must not turn into a call that starts before.
    fn check(text: &str, want: Scan) {
        assert_eq!(scan(text, TOOLS), want, "{text:?}");
        let mut scanner = Scanner::new(TOOLS.iter().map(|t| t.to_string()).collect());
        let mut given_out = 0;
        for (i, c) in text.char_indices() {
            let part = &text[..i + c.len_utf8()];
            match scanner.scan(part) {
                Scan::Clear => given_out = part.len(),
                Scan::Pending { start } => {
                    assert!(start >= given_out, "{text:?}: {part:?} took back what had been given out");
                    given_out = start;
                }
                Scan::Call { start, name } => {
                    assert!(start >= given_out, "{text:?}: {part:?} took back what had been given out");
                    assert!(matches!(&want, Scan::Call { start: s, name: n } if (*s, n) == (start, &name)), "{part:?}");
                    return;
                }
            }
        }
        assert!(!matches!(want, Scan::Call { .. }), "{text:?} grown was no call");
        assert_eq!(scanner.scan(text), want, "{text:?} grown");
    }

    fn call(text: &str, start: usize, name: &str) {
        check(text, Scan::Call { start, name: name.to_owned() });
    }

    #[test]
    fn calls() {
        call(r#"{"name": "search_blog", "arguments": {"query": "x"}}"#, 0, "search_blog");
        call(r#"{"name":"search_blog","parameters":{}}"#, 0, "search_blog");
        call("{\n  \"name\" : \"Read\",\n  \"arguments\" : {", 0, "Read");
        call("{'name': 'Read', 'arguments': {}}", 0, "Read");
        call(r#"{"arguments": {"a": ["}", 'x']}, "name": "Read"}"#, 0, "Read");
        call(r#"{"type": "function", "function": {"name": "Read", "arguments": "{}"}}"#, 0, "Read");
        call(r#"{"function": {"name": "Read", "parameters": {}}}"#, 0, "Read");
        call(r#"{"function": "Read", "parameters": {}}"#, 0, "Read");
        call(r#"{"tool": "Read", "arguments": {}}"#, 0, "Read");
        call(r#"{"id": "call_1", "type": "function", "name": "Read", "arguments": {}}"#, 0, "Read");
        call(r#"{"tool_calls": [{"name": "Read", "arguments": {}}]}"#, 0, "Read");
        call(r#"[{"name": "Read", "arguments": {}}, {"name": "Read"}]"#, 0, "Read");
        call(r#"{"name": "weather.now-2", "arguments": {}}"#, 0, "weather.now-2");
        // The definition of the tool, filled in; and the definition itself, which is none.
        call(r#"{"name": "Read", "description": "Reads a.", "parameters": {"file_path": "a"}}"#, 0, "Read");
        call(r#"{"name": "Read", "description": "", "parameters": {"type": "object-like"}}"#, 0, "Read");
        call(r#"{"description": "Reads.", "name": "Read", "arguments": {}}"#, 0, "Read");
        check(
            r#"{"name": "Read", "description": "Reads a.", "parameters": {"type": "object", "properties": {}}}"#,
            Scan::Clear,
        );
        check(r#"{"name": "Read", "description": "Reads a.", "parameters": {"properties": {"a": {}}}}"#, Scan::Clear);
        check(r#"{"name": "Read", "description": "Reads a.", "parameters": ["a"]}"#, Scan::Clear);
        call(r#"{"name": "tìm_kiếm", "arguments": {}}"#, 0, "tìm_kiếm");
        call(r#"{"name": "\u641c\u7d22", "arguments": {}}"#, 0, "搜索");
        call("```json\n{\"name\": \"Read\", \"arguments\": {}}\n```", 0, "Read");
        call("```\n{\"name\": \"Read\", \"arguments\": {}}\n```", 0, "Read");
        call("```tool_call\n[{\"name\": \"Read\", \"arguments\": {}}]\n```", 0, "Read");
        call("```python\nsearch_blog(query=\"x\")\n```", 0, "search_blog");
        call("```xml\n<tool_call>\n{\"name\": \"Read\", \"arguments\": {}}", 0, "Read");
        call("<tools>\n{\"name\": \"Read\", \"arguments\": {}}\n</tools>", 0, "Read");
        call("<function_call> {\"name\": \"Read\", \"arguments\": {}}", 0, "Read");
        call("<tool_call>\n{\"name\": \"Read\", \"arguments\": {}}", 0, "Read");
        call("<|tool_call|>{\"name\": \"Read\", \"arguments\": {}}", 0, "Read");
        call("<tool_call>\n```json\n{\"name\": \"Read\", \"arguments\": {}}", 0, "Read");
        call("Read(file_path=\"a\")", 0, "Read");
        call("ReadAll()", 0, "ReadAll");
        call(r#"{{"name": "Read", "arguments": {"file_path": "a"}}}"#, 0, "Read");
        call(r#"{{ "name": "Read", "arguments": {{}} }}"#, 0, "Read");
        call("<tools>\n  <function>\n    <name>Read</name>\n    <arguments>\n <file_path>a", 0, "Read");
        call("<name>Read</name><parameters>", 0, "Read");
        call("搜索(\"x\")", 0, "搜索");
        // Where it starts.
        call("\n\n  {\"name\": \"Read\", \"arguments\": {}}", 0, "Read");
        call("I will look.\n\n```json\n{\"name\": \"Read\", \"arguments\": {}}\n```", 14, "Read");
        call("Được.\n  Read(\"a\")", "Được.\n".len(), "Read");
        // Within a line.
        call(r#"Sure: {"name": "Read", "arguments": {}}"#, 6, "Read");
        call(r#"I use [{"name": "Read", "arguments": {}}]."#, 6, "Read");
        call("- <tool_call>{\"name\": \"Read\", \"arguments\": {}}", 2, "Read");
        call("Here: ```json\n{\"name\": \"Read\", \"arguments\": {}}\n```", 6, "Read");
        call("`a` {} [b] {\"name\": \"Read\", \"arguments\": {}}", 11, "Read");
        call("fn main() {\n{\"name\": \"Read\", \"arguments\": {}}", 12, "Read");
        call("Xem <b>đây</b>: {\"name\": \"Read\", \"arguments\": {}}", "Xem <b>đây</b>: ".len(), "Read");
        // After an answer that was none.
        call("{\"a\": 1}\nRead(1)", 9, "Read");
        call("```py\nx = 1\n```\nRead(1)", 16, "Read");
    }

    #[test]
    fn answers() {
        for text in [
            "",
            "Hello.",
            r#"{"name": "Alice", "age": 3}"#,
            r#"{"name": "search_blog", "posts": 3}"#,
            r#"{"name": "search_blog"}"#,
            r#"{"name": "search_blog", "description": "d", "parameters": {}}"#,
            r#"{"name": "Reader", "arguments": {}}"#,
            r#"{"arguments": {"a": 1}}"#,
            r#"{"result": {"name": "Read", "arguments": {}}}"#,
            "{\n  \"calls\": [\n{\"name\": \"Read\", \"arguments\": {}}\n  ]\n}",
            "```json\n{\"name\": \"Alice\"}\n```",
            "```python\nimport os\nRead(1)\n```",
            "```rust\nfn main() {\n    Read(1);\n}\n```\nDone.",
            r#"To call it, write `{"name": "Read", "arguments": {}}` on a line."#,
            r#"`a {"name": "Read", "arguments": {}}`"#,
            r#"It prints "{"name": "Read", "arguments": {}}"."#,
            r#"x = {"result": {"name": "Read", "arguments": {}}}"#,
            r#"see [1] and map[{"name": "Read", "arguments": {}}]"#,
            "if a < b and <b>c</b> { x",
            "Use Read(path) for that.",
            "Read the file (it is short).",
            "Reading(1)",
            "search_blog is a tool.",
            "<b>bold</b>",
            "[1] a note",
            "[{\"name\": \"Alice\"}]",
            "`Read(1)`",
            "a\n\n",
            "``` a fence with a sentence\nRead(1)\n```",
            r#"{{"name": "Alice"}}"#,
            "<name>Reader</name>\n<arguments>",
            "<name>Read</name>\n<age>3</age>",
        ] {
            check(text, Scan::Clear);
        }
    }

    #[test]
    fn open() {
        for (text, start) in [
            (" \n", 0),
            ("{", 0),
            ("{\"na", 0),
            ("{\"name\": \"sea", 0),
            ("{\"name\": \"search_blog\"", 0),
            ("{\"name\": \"search_blog\", \"arg", 0),
            ("[", 0),
            ("`", 0),
            ("```js", 0),
            ("```json\n", 0),
            ("<too", 0),
            ("Rea", 0),
            ("Read", 0),
            ("Hi.\n  Read", 4),
            ("Hi {", 3),
            ("a <too", 2),
            ("so: {\"name\": \"Re", 4),
            ("Hi.\n{\"arguments\": {\"name\": \"x\"", 4),
        ] {
            check(text, Scan::Pending { start });
        }
    }

    #[test]
    fn any_text_is_scanned_without_a_panic() {
        let pieces = [
            "{",
            "}",
            "[",
            "\"",
            "'",
            "\\",
            "name",
            "Read",
            "(",
            ":",
            ",",
            "\n",
            "```",
            "json",
            "<tools>",
            " ",
            "ế",
            "搜索",
            "arguments",
        ];
        let mut seed = 1u64;
        for _ in 0..5_000 {
            let mut text = String::new();
            for _ in 0..12 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                text.push_str(pieces[(seed >> 33) as usize % pieces.len()]);
            }
            let whole = scan(&text, TOOLS);
            let mut scanner = Scanner::new(TOOLS.iter().map(|t| t.to_string()).collect());
            let mut grown = Scan::Clear;
            for (i, c) in text.char_indices() {
                grown = scanner.scan(&text[..i + c.len_utf8()]);
                if matches!(grown, Scan::Call { .. }) {
                    break;
                }
            }
            assert_eq!(grown, whole, "{text:?}");
        }
    }
}
