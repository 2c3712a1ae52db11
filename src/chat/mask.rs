//! The constraint on one completion, and how its output is read.
//!
//! [`CallMask`] is what the engine asks; [`StreamView`] is what the consumer shows, fed with the same tokens and rewinds;
//! [`parse`] reads a finished output. In the text phase everything but control tokens is allowed, which costs nothing; a
//! call, native or rescued, is written inside its grammar. With [`CallMask::routing`] a line of a few fixed forms comes first.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use llguidance::Matcher;
use serde_json::Value;

use super::Delta;
use super::grammar::{CallGrammar, Grammars};
use super::rescue::{Scan, Scanner};
use crate::engine::{Mask, Verdict};
use crate::message::{ToolCall, ToolChoice};

/// How often a completion without calls is led away from a foreign call before it is left as text.
const GUARD_LIMIT: usize = 8;

/// The text of the text phase, with the byte at which each token ends. Bytes that are not UTF-8 are held as `?`, one for
/// one, so that offsets stay those of the bytes.
#[derive(Clone, Debug, Default)]
struct Text {
    text: String,
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Text {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        for chunk in self.bytes[self.text.len()..].utf8_chunks() {
            self.text.push_str(chunk.valid());
            let broken = chunk.invalid();
            let at_end = self.text.len() + broken.len() == self.bytes.len();
            if at_end && std::str::from_utf8(broken).is_err_and(|e| e.error_len().is_none()) {
                break; // it can still become a character
            }
            self.text.extend(broken.iter().map(|_| '?'));
        }
    }

    /// Keeps the first `keep` tokens. `bytes_of` gives their bytes again.
    fn truncate<'a>(&mut self, keep: usize, bytes_of: impl Fn(usize) -> &'a [u8]) {
        // Cheap enough: it happens a few times a completion at most.
        let mut shorter = Text::default();
        for i in 0..keep.min(self.ends.len()) {
            shorter.push(bytes_of(i));
        }
        *self = shorter;
    }
}

/// Where in a call's JSON the output stands, as far as numbers go.
///
/// The grammar takes a number of any length and exponent; readers do not. So a run of digits ends at [`DIGIT_LIMIT`] and
/// there is no exponent, wherever the schema leaves another way. Bounds in the schema would do the same, but take
/// milliseconds to compile for each tool.
#[derive(Clone, Copy, Debug, Default)]
struct Digits {
    in_string: bool,
    escaped: bool,
    /// Open braces and brackets.
    depth: usize,
    /// Digits in a row, up to here.
    run: usize,
}

const DIGIT_LIMIT: usize = 18;

impl Digits {
    fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let was_escaped = std::mem::take(&mut self.escaped);
            match byte {
                b'"' if !was_escaped => self.in_string = !self.in_string,
                b'\\' if !was_escaped => self.escaped = self.in_string,
                b'{' | b'[' if !self.in_string => self.depth += 1,
                b'}' | b']' if !self.in_string => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
            self.run = if byte.is_ascii_digit() && !self.in_string { self.run + 1 } else { 0 };
        }
    }

    /// Whether a token that begins so should not come next.
    fn avoids(&self, first: u8) -> bool {
        match first {
            b'0'..=b'9' => self.run >= DIGIT_LIMIT,
            b'e' | b'E' => self.run > 0,
            _ => false,
        }
    }
}

enum Phase {
    /// The routing line, as far as it has come.
    Route(Vec<u8>),
    Text,
    Call(Box<Matcher>, Digits),
    /// Behind a call. `newline`: its line has been ended, so another call can follow.
    After {
        newline: bool,
    },
}

/// The routing line: this and a name before a call of that tool …
pub const ROUTE_TOOL: &str = "Tool: ";
/// … or this before an answer.
pub const ROUTE_ANSWER: &str = "Answer:";

/// The constraint on one completion.
pub struct CallMask {
    grammars: Arc<Grammars>,
    grammar: Arc<CallGrammar>,
    choice: ToolChoice,
    /// Whether text may turn into a call.
    may_call: bool,
    /// None: text stays text, whatever it looks like.
    scanner: Option<Scanner>,
    ids: Vec<u32>,
    text: Text,
    phase: Phase,
    /// What must come next outside of a grammar.
    queue: VecDeque<u32>,
    /// The tools that may be called …
    callable: Arc<[String]>,
    /// … and those that may not this time: a foreign call of one is led away from.
    withheld: Arc<[String]>,
    /// The tool of the next call; `None`: any of them.
    only: Option<String>,
    /// A matcher whose first forced tokens were given out together with `<tool_call>`.
    opened: Option<Box<Matcher>>,
    /// By position: what led to a foreign call there while calls are forbidden.
    banned: HashMap<usize, Vec<u32>>,
    guarded: usize,
    /// How much likelier than the end of the arguments, in nats, an optional one must be.
    optional_margin: f32,
    /// The text began with a routing line, which is over.
    routed: bool,
    /// The text begins with a word.
    prose: bool,
    rescued: bool,
    /// Where each call begins in `ids`.
    starts: Vec<usize>,
    newline: u32,
}

impl CallMask {
    /// `rescue`: whether foreign calls become real ones (or, where calls are forbidden, are led away from).
    ///
    /// Errors: a named or required tool that is not offered or was refused.
    pub fn new(
        grammars: Arc<Grammars>,
        grammar: Arc<CallGrammar>,
        choice: ToolChoice,
        rescue: bool,
    ) -> Result<CallMask, String> {
        let names = grammar.names();
        let refused = |name: &str| grammar.refused().iter().find(|r| r.name == name).map(|r| r.why.clone());
        let only = match &choice {
            ToolChoice::Named(name) if !names.contains(&name.as_str()) => {
                return Err(match refused(name) {
                    Some(why) => format!("the tool `{name}` cannot be called: {why}"),
                    None if names.is_empty() => format!("the tool `{name}` is not offered; no tool is"),
                    None => format!("the tool `{name}` is not offered; offered are: {}", names.join(", ")),
                });
            }
            ToolChoice::Named(name) => Some(name.clone()),
            ToolChoice::Required if names.is_empty() => {
                let why: String = grammar.refused().iter().map(|r| format!("; `{}`: {}", r.name, r.why)).collect();
                return Err(format!("a call is required, but no tool that can be called is offered{why}"));
            }
            _ => None,
        };
        let may_call = choice != ToolChoice::None && !names.is_empty();
        let scans = rescue && !names.is_empty() && matches!(choice, ToolChoice::Auto | ToolChoice::None);
        let callable: Arc<[String]> = names.iter().map(|name| (*name).to_owned()).collect();
        let scanner = scans.then(|| Scanner::new(callable.clone()));
        let newline = grammars.tokenizer().encode_exact("\n").first().copied().unwrap_or_default();
        let must_call = matches!(choice, ToolChoice::Required | ToolChoice::Named(_));
        let queue = if must_call { VecDeque::from([grammars.ids.tool_call]) } else { VecDeque::new() };
        Ok(CallMask {
            grammars,
            grammar,
            choice,
            may_call,
            scanner,
            ids: Vec::new(),
            text: Text::default(),
            phase: Phase::Text,
            queue,
            callable,
            withheld: [].into(),
            only,
            opened: None,
            banned: HashMap::new(),
            guarded: 0,
            optional_margin: 0.0,
            routed: false,
            prose: false,
            rescued: false,
            starts: Vec::new(),
            newline,
        })
    }

    /// These tools may not be called this time, though the prompt shows them.
    pub fn withhold(mut self, names: &[String]) -> CallMask {
        if self.choice == ToolChoice::Auto {
            let (withheld, callable) =
                self.callable.iter().cloned().partition::<Vec<_>, _>(|name| names.contains(name));
            (self.withheld, self.callable) = (withheld.into(), callable.into());
            self.may_call &= !self.callable.is_empty();
        }
        self
    }

    /// With `prose` the text begins with a word: no bracket, tag, quote of code or fence.
    pub fn prose(mut self, prose: bool) -> CallMask {
        self.prose = prose;
        self
    }

    /// Where the arguments could end, another one must be likelier by `nats`: small models fill in whatever a schema offers.
    pub fn optional_margin(mut self, nats: f32) -> CallMask {
        self.optional_margin = nats;
        self
    }

    /// With `routing` a reply that may hold a call begins with a line that says whether it does, and of which tool.
    pub fn routing(mut self, routing: bool) -> CallMask {
        let decides = matches!(self.choice, ToolChoice::Auto | ToolChoice::None);
        if routing && decides && !self.grammar.names().is_empty() {
            self.phase = Phase::Route(Vec::new());
        }
        self
    }

    /// Whether the output begins with a routing line: what [`parse`] asks for. Before the first token.
    pub fn is_routed(&self) -> bool {
        matches!(self.phase, Phase::Route(_))
    }

    /// The routing lines, each with the name of its tool.
    fn routes(&self) -> Vec<(String, Option<String>)> {
        let names = if self.may_call { &self.callable[..] } else { &[] };
        let tools = names.iter().map(|name| (format!("{ROUTE_TOOL}{name}\n"), Some(name.clone())));
        tools.chain([(ROUTE_ANSWER.to_owned(), None)]).collect()
    }

    /// The view that reads this mask's output. It must be made before the first token.
    pub fn view(&self) -> StreamView {
        StreamView {
            grammars: self.grammars.clone(),
            scanner: self.scanner.clone(),
            ids: Vec::new(),
            text: Text::default(),
            routed: self.is_routed(),
            emitted: 0,
            open: None,
            announced: false,
            undecided: false,
            rewound: false,
            rescued: Vec::new(),
        }
    }

    /// The text without the routing line.
    fn body(&self) -> &str {
        if self.routed { unrouted(&self.text.text) } else { &self.text.text }
    }

    fn open(&self) -> Result<Box<Matcher>, String> {
        let only = self.only.as_ref().map(std::slice::from_ref);
        self.grammars.matcher(&self.grammar, only.unwrap_or(&self.callable)).map(Box::new)
    }

    /// The first token that reaches behind `start`, and the bytes of it that stand before.
    fn cut(&self, start: usize) -> (usize, Vec<u8>) {
        let keep = self.text.ends.partition_point(|&end| end <= start);
        let before = if keep == 0 { 0 } else { self.text.ends[keep - 1] };
        (keep, self.text.bytes[before..start].to_vec())
    }

    fn rewind(&mut self, keep: usize) {
        self.ids.truncate(keep);
        let (ids, tokenizer) = (&self.ids, self.grammars.tokenizer());
        self.text.truncate(keep, |i| tokenizer.token_bytes(ids[i]));
        self.banned.retain(|at, _| *at <= keep);
        if let Some(scanner) = &mut self.scanner {
            scanner.reset();
        }
    }

    fn found(&mut self, start: usize, name: String) -> Verdict {
        let (keep, before) = self.cut(start);
        if self.choice == ToolChoice::None || self.withheld.contains(&name) {
            if self.guarded == GUARD_LIMIT {
                if let Some(scanner) = &mut self.scanner {
                    scanner.pass(&self.text.text);
                }
                return Verdict::Continue;
            }
            self.guarded += 1;
            let began = self.ids[keep];
            self.banned.entry(keep).or_default().push(began);
            self.rewind(keep);
            return Verdict::Rewind { keep };
        }
        self.rewind(keep);
        // Text before a call ends its line, as in the trained format.
        let before = String::from_utf8_lossy(&before).into_owned();
        self.queue.extend(self.grammars.tokenizer().encode_exact(&before));
        if start > 0 && !(format!("{}{before}", self.text.text)).ends_with('\n') {
            self.queue.push_back(self.newline);
        }
        self.queue.push_back(self.grammars.ids.tool_call);
        self.only = Some(name);
        self.rescued = true;
        Verdict::Rewind { keep }
    }

    /// The last two calls are the same: the model is going round in circles.
    fn repeats(&self) -> bool {
        let [.., a, b] = self.starts[..] else { return false };
        let trim = |ids: &'_ [u32]| {
            let end = ids.iter().rposition(|&id| id == self.grammars.ids.end_tool_call).map_or(ids.len(), |i| i + 1);
            ids[..end].to_vec()
        };
        trim(&self.ids[a..b]) == trim(&self.ids[b..])
    }
}

fn forbid(logits: &mut [f32], id: u32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// Forbids everything but `ids`.
pub(super) fn allow_only(logits: &mut [f32], ids: impl IntoIterator<Item = u32>) {
    let kept: Vec<(usize, f32)> =
        ids.into_iter().filter_map(|id| logits.get(id as usize).map(|&logit| (id as usize, logit))).collect();
    logits.fill(f32::NEG_INFINITY);
    for (id, logit) in kept {
        logits[id] = logit;
    }
}

impl Mask for CallMask {
    fn forced(&mut self) -> Vec<u32> {
        if !self.queue.is_empty() {
            let mut tokens: Vec<u32> = self.queue.iter().copied().collect();
            // The beginning of a call is known too; one batch instead of two.
            if tokens.last() == Some(&self.grammars.ids.tool_call)
                && let Ok(mut matcher) = self.open()
            {
                tokens.extend(matcher.compute_ff_tokens());
                self.opened = Some(matcher);
            }
            return tokens;
        }
        match &mut self.phase {
            Phase::Call(matcher, _) => matcher.compute_ff_tokens(),
            Phase::Route(said) => {
                let said = std::mem::take(said);
                let mut left: Vec<String> = self.routes().into_iter().map(|(line, _)| line).collect();
                left.retain(|line| line.as_bytes().starts_with(&said));
                let forced = match &left[..] {
                    [line] => line.get(said.len()..).map(|rest| self.grammars.tokenizer().encode_exact(rest)),
                    _ => None,
                };
                self.phase = Phase::Route(said);
                forced.unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let ids = self.grammars.ids;
        let repeats = matches!(self.phase, Phase::After { .. }) && self.repeats();
        let routes = if let Phase::Route(_) = self.phase { self.routes() } else { Vec::new() };
        let blank = self.body().trim().is_empty();
        let begun = self.text.text.len() > if self.routed { ROUTE_ANSWER.len() } else { 0 };
        match &mut self.phase {
            Phase::Route(said) => {
                let left: Vec<&[u8]> =
                    routes.iter().filter_map(|(line, _)| line.as_bytes().strip_prefix(&said[..])).collect();
                let tokenizer = self.grammars.tokenizer();
                for &(_, id) in tokenizer.controls() {
                    forbid(logits, id);
                }
                for (id, logit) in logits.iter_mut().enumerate() {
                    let bytes = tokenizer.token_bytes(id as u32);
                    if bytes.is_empty() || !left.iter().any(|left| left.starts_with(bytes)) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Phase::Text => {
                let tokenizer = self.grammars.tokenizer();
                for &(_, id) in tokenizer.controls() {
                    // An empty reply is none: small models give one now and then right after a tool's result.
                    let ends = (id == ids.im_end || Some(id) == ids.end_of_text)
                        && !self.ids.is_empty()
                        && !(blank && self.routed);
                    let calls = id == ids.tool_call && self.may_call;
                    if !ends && !calls {
                        forbid(logits, id);
                    }
                }
                let used = tokenizer.vocab_size().min(logits.len());
                logits[used..].fill(f32::NEG_INFINITY);
                // One token of white space may come before the words of an answer.
                if (self.routed || self.prose) && blank && begun {
                    for (id, logit) in logits[..used].iter_mut().enumerate() {
                        if tokenizer.token_bytes(id as u32).trim_ascii().is_empty() {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
                if self.prose && blank {
                    for (id, logit) in logits[..used].iter_mut().enumerate() {
                        let bytes = tokenizer.token_bytes(id as u32).trim_ascii_start();
                        if bytes.first().is_some_and(|first| b"{}[]()<>`|#*=/\\\"'".contains(first)) {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
                for &id in self.banned.get(&self.ids.len()).into_iter().flatten() {
                    forbid(logits, id);
                }
            }
            Phase::Call(matcher, digits) => {
                let mut mask = matcher.compute_mask().map_err(|e| format!("the grammar of the call: {e}"))?;
                if digits.run > 0 {
                    let first =
                        |id: u32| self.grammars.tokenizer().token_bytes(id).first().copied().unwrap_or_default();
                    let avoided: Vec<u32> = mask.iter().filter(|&id| digits.avoids(first(id))).collect();
                    if avoided.len() < mask.num_set() {
                        avoided.into_iter().for_each(|id| mask.disallow_token(id));
                    }
                }
                for (chunk, &word) in logits.chunks_mut(32).zip(mask.as_slice()) {
                    if word == u32::MAX {
                        continue;
                    }
                    for (bit, logit) in chunk.iter_mut().enumerate() {
                        if word & (1 << bit) == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
                let covered = (mask.as_slice().len() * 32).min(logits.len());
                logits[covered..].fill(f32::NEG_INFINITY);
                if self.optional_margin > 0.0 {
                    for ends in self.grammars.argument_ends(digits.depth, digits.in_string) {
                        ends.prefer_end(logits, self.optional_margin);
                    }
                }
            }
            Phase::After { newline } => {
                let ends = std::iter::once(ids.im_end).chain(ids.end_of_text);
                let more = if repeats {
                    None
                } else if *newline {
                    Some(ids.tool_call)
                } else {
                    Some(self.newline)
                };
                allow_only(logits, ends.chain(more));
            }
        }
        if logits.iter().all(|logit| *logit == f32::NEG_INFINITY || logit.is_nan()) {
            return Err(
                "no token may follow here; the model's logits are not numbers, or the grammar has a dead end".into()
            );
        }
        Ok(())
    }

    fn fits(&mut self, draft: &[u32]) -> usize {
        match &mut self.phase {
            Phase::Call(matcher, _) => matcher.validate_tokens(draft).unwrap_or(0),
            // A control token ends a turn or begins a call: what would follow it is another matter.
            Phase::Text => {
                let controls = self.grammars.tokenizer().controls();
                draft.iter().take_while(|&&id| !controls.iter().any(|&(_, control)| control == id)).count()
            }
            Phase::Route(_) | Phase::After { .. } => 0,
        }
    }

    fn accept(&mut self, token: u32) -> Result<Verdict, String> {
        let ids = self.grammars.ids;
        if let Some(&want) = self.queue.front() {
            if token != want {
                return Err(format!("token {token} came where {want} was forced"));
            }
            self.queue.pop_front();
        }
        self.ids.push(token);
        let at = self.ids.len() - 1;
        if token == ids.tool_call && !matches!(self.phase, Phase::Call(..)) {
            if !self.may_call {
                return Err("a call began where calls are forbidden".into());
            }
            self.starts.push(at);
            let matcher = match self.opened.take() {
                Some(matcher) => matcher,
                None => self.open()?,
            };
            self.phase = Phase::Call(matcher, Digits::default());
            return Ok(Verdict::Continue);
        }
        let routes = if let Phase::Route(_) = self.phase { self.routes() } else { Vec::new() };
        match &mut self.phase {
            Phase::Route(said) => {
                let bytes = self.grammars.tokenizer().token_bytes(token);
                self.text.push(bytes);
                said.extend_from_slice(bytes);
                let Some((_, name)) = routes.iter().find(|(line, _)| line.as_bytes() == said) else {
                    return Ok(Verdict::Continue);
                };
                self.phase = Phase::Text;
                self.routed = true;
                if let Some(scanner) = &mut self.scanner {
                    scanner.begin_at(self.text.text.len());
                }
                if let Some(name) = name {
                    self.only = Some(name.clone());
                    self.queue.push_back(ids.tool_call);
                }
                Ok(Verdict::Continue)
            }
            Phase::Text => {
                self.text.push(self.grammars.tokenizer().token_bytes(token));
                if !self.queue.is_empty() {
                    return Ok(Verdict::Continue);
                }
                match self.scanner.as_mut().map(|s| s.scan(&self.text.text)) {
                    Some(Scan::Call { start, name }) => Ok(self.found(start, name)),
                    _ => Ok(Verdict::Continue),
                }
            }
            Phase::Call(matcher, digits) => {
                digits.push(self.grammars.tokenizer().token_bytes(token));
                matcher.consume_token(token).map_err(|e| format!("the grammar of the call: {e}"))?;
                if !matcher.is_stopped() {
                    return Ok(Verdict::Continue);
                }
                if token != ids.end_tool_call {
                    return Err(format!("the grammar of the call gave up: {}", matcher.stop_reason()));
                }
                self.phase = Phase::After { newline: false };
                if matches!(self.choice, ToolChoice::Named(_)) {
                    return Ok(Verdict::Stop);
                }
                self.only = None;
                Ok(Verdict::Continue)
            }
            Phase::After { newline } => {
                *newline = true;
                Ok(Verdict::Continue)
            }
        }
    }

    fn structured(&self) -> bool {
        !matches!(self.phase, Phase::Text) || !self.queue.is_empty()
    }
}

/// A finished output, read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The text outside calls, to the byte; the line end before a call belongs to the call.
    pub text: String,
    /// Ids are empty: the loop numbers them.
    pub calls: Vec<ToolCall>,
    /// The output ended inside a call, which is therefore none.
    pub cut_call: bool,
}

/// Reads an output's ids (without the final `<|im_end|>`). `routed`: it begins with a routing line, which is no part of the text.
/// Nothing tells here which calls were rescued.
pub fn parse(grammars: &Grammars, ids: &[u32], routed: bool) -> Parsed {
    let control = grammars.ids;
    let tokenizer = grammars.tokenizer();
    let text_of = |ids: &[u32]| String::from_utf8_lossy(&tokenizer.decode(ids)).into_owned();
    let mut out = Parsed::default();
    let mut rest = ids;
    while let Some(open) = rest.iter().position(|&id| id == control.tool_call) {
        out.text.push_str(text_of(&rest[..open]).trim_end());
        let inside = &rest[open + 1..];
        let Some(close) = inside.iter().position(|&id| id == control.end_tool_call) else {
            out.cut_call = true;
            break;
        };
        let body = text_of(&inside[..close]);
        out.calls.push(read_call(body.trim()));
        rest = &inside[close + 1..];
    }
    let text = text_of(rest);
    if !out.cut_call {
        out.text.push_str(if out.calls.is_empty() { &text } else { text.trim() });
    }
    if routed {
        out.text = unrouted(&out.text).to_owned();
    }
    out
}

/// A routed reply without its routing line, as far as that has come.
fn unrouted(text: &str) -> &str {
    match text.strip_prefix(ROUTE_ANSWER) {
        Some(answer) => answer.trim_start(),
        None => text.split_once('\n').map_or("", |(_, rest)| rest),
    }
}

/// The grammar makes every call readable; one from elsewhere that is not keeps its text as arguments, so that the loop can
/// answer it.
fn read_call(body: &str) -> ToolCall {
    let mut call = ToolCall { id: String::new(), name: String::new(), arguments: Value::Null, rescued: false };
    match serde_json::from_str::<Value>(body) {
        Ok(Value::Object(mut map)) if map.get("name").is_some_and(Value::is_string) => {
            if let Some(Value::String(name)) = map.shift_remove("name") {
                call.name = name;
            }
            call.arguments = map.shift_remove("arguments").unwrap_or(Value::Null);
        }
        _ => call.arguments = Value::String(body.to_owned()),
    }
    call
}

/// Turns tokens and rewinds, in the order in which they happened, into what can be shown. Text that could still become a
/// call is held back, and so is white space until something follows it.
pub struct StreamView {
    grammars: Arc<Grammars>,
    scanner: Option<Scanner>,
    ids: Vec<u32>,
    text: Text,
    /// The text begins with the routing line, which is not shown.
    routed: bool,
    /// Bytes of the text that were given out.
    emitted: usize,
    /// Where the call that is being written begins in `ids`.
    open: Option<usize>,
    /// Its name was given out.
    announced: bool,
    /// The scanner sees a call; a rewind must come now, or the mask has let it stand.
    undecided: bool,
    rewound: bool,
    /// For each call, in order.
    rescued: Vec<bool>,
}

impl StreamView {
    /// One token that was sampled or forced.
    pub fn token(&mut self, token: u32, mut sink: impl FnMut(Delta)) {
        let control = self.grammars.ids;
        if std::mem::take(&mut self.undecided)
            && let Some(scanner) = &mut self.scanner
        {
            scanner.pass(&self.text.text);
        }
        self.ids.push(token);
        if token == control.tool_call && self.open.is_none() {
            self.open = Some(self.ids.len() - 1);
            self.announced = false;
            self.rescued.push(std::mem::take(&mut self.rewound));
            return;
        }
        if let Some(open) = self.open {
            if token == control.end_tool_call {
                self.open = None;
            } else if !self.announced {
                let body = self.grammars.tokenizer().decode(&self.ids[open + 1..]);
                if let Some(name) = name_of(&String::from_utf8_lossy(&body)) {
                    self.announced = true;
                    sink(Delta::CallStarted { name, rescued: self.rescued.last().copied().unwrap_or(false) });
                }
            }
            return;
        }
        if !self.rescued.is_empty() {
            return; // the line end between two calls
        }
        self.text.push(self.grammars.tokenizer().token_bytes(token));
        let text = &self.text.text;
        if self.routed {
            self.emitted = self.emitted.max(text.len() - unrouted(text).len());
            if text == ROUTE_ANSWER || !text.starts_with(ROUTE_ANSWER) {
                // The routing line is just ending, or still to come.
                if let Some(scanner) = &mut self.scanner {
                    scanner.begin_at(text.len());
                }
                return;
            }
        }
        let stands = match self.scanner.as_mut().map(|s| s.scan(text)) {
            None | Some(Scan::Clear) => text.len(),
            Some(Scan::Pending { start }) => start,
            Some(Scan::Call { start, .. }) => {
                self.undecided = true;
                start
            }
        };
        self.emit(text[..stands].trim_end().len(), &mut sink);
    }

    /// The engine forgot all tokens from index `keep` on.
    pub fn rewind(&mut self, keep: usize) {
        self.undecided = false;
        self.rewound = true;
        self.ids.truncate(keep);
        let (ids, tokenizer) = (&self.ids, self.grammars.tokenizer());
        self.text.truncate(keep, |i| tokenizer.token_bytes(ids[i]));
        // White space at the beginning of an answer counts as given out; it may be gone.
        self.emitted = self.emitted.min(self.text.bytes.len());
        if let Some(scanner) = &mut self.scanner {
            scanner.reset();
        }
    }

    /// The ids so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The output has ended: gives out what was held back, and reads the whole.
    pub fn finish(mut self, mut sink: impl FnMut(Delta)) -> (Vec<u32>, Parsed) {
        let mut parsed = parse(&self.grammars, &self.ids, self.routed);
        for (call, rescued) in parsed.calls.iter_mut().zip(&self.rescued) {
            call.rescued = *rescued;
        }
        // Of a routing line that was cut there is nothing to show.
        if self.rescued.is_empty() && !(self.routed && parsed.text.is_empty()) {
            self.emit(self.text.bytes.len(), &mut sink);
        }
        (std::mem::take(&mut self.ids), parsed)
    }

    fn emit(&mut self, upto: usize, sink: &mut impl FnMut(Delta)) {
        if upto > self.emitted {
            sink(Delta::Text(String::from_utf8_lossy(&self.text.bytes[self.emitted..upto]).into_owned()));
            self.emitted = upto;
        }
    }
}

/// The name in the beginning of a call's body, once it is complete.
fn name_of(body: &str) -> Option<String> {
    let value = body.trim_start().strip_prefix('{')?.trim_start().strip_prefix("\"name\"")?;
    let value = value.trim_start().strip_prefix(':')?.trim_start();
    let mut strings = serde_json::Deserializer::from_str(value).into_iter::<String>();
    strings.next()?.ok()
}
