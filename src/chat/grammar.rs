//! What may stand inside a call: llguidance grammars made from the tools' JSON Schemas.
//!
//! A grammar covers one call, from behind `<tool_call>` to `</tool_call>`. What stands outside calls needs no grammar;
//! [`super::mask`] sees to it with a few comparisons.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, OnceLock};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Logger, Matcher, ParserFactory};
use serde_json::{Map, Value, json};

use super::tokenizer::Tokenizer;
use crate::message::ToolSpec;

/// Names of the control tokens of the format.
pub const IM_END: &str = "<|im_end|>";
pub const END_OF_TEXT: &str = "<|endoftext|>";
pub const TOOL_CALL: &str = "<tool_call>";
pub const END_TOOL_CALL: &str = "</tool_call>";

/// The grammar machinery of one tokenizer. Making it is cheap; the token trie (about 0.1 s) is built when the first call
/// needs it, or by [`Grammars::warm`].
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// The width of the logits; ids beyond the vocabulary are never allowed.
    vocab: usize,
    pub(super) ids: ControlIds,
    factory: OnceLock<Result<ParserFactory, String>>,
    ends: OnceLock<[ArgumentEnds; 6]>,
    cache: Mutex<HashMap<String, Arc<CallGrammar>>>,
}

/// The ids of the control tokens that masks deal with.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlIds {
    pub im_end: u32,
    pub end_of_text: Option<u32>,
    pub tool_call: u32,
    pub end_tool_call: u32,
}

/// The brackets around an argument: those of the call and those of its arguments …
const ARGUMENTS_DEPTH: usize = 2;
/// … and around what is inside an array or object that is one.
const INNER_DEPTH: usize = 3;

/// Tokens that end a value: with a comma, or with the brace that ends the arguments.
pub(super) struct ArgumentEnds {
    more: Vec<u32>,
    end: Vec<u32>,
}

impl ArgumentEnds {
    /// Where a comma is the likeliest of all, but likelier than the end by less than `margin`: only the end is left.
    pub fn prefer_end(&self, logits: &mut [f32], margin: f32) {
        let best = |ids: &[u32], logits: &[f32]| {
            let logits = ids.iter().filter_map(|&id| logits.get(id as usize));
            logits.fold(f32::NEG_INFINITY, |best, &logit| best.max(logit))
        };
        let (end, more) = (best(&self.end, logits), best(&self.more, logits));
        let close = end > f32::NEG_INFINITY && end < more && more < end + margin;
        if close && logits.iter().all(|&logit| logit <= more) {
            super::mask::allow_only(logits, self.end.iter().copied());
        }
    }
}

/// A tool whose calls cannot be constrained, so it is not offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub name: String,
    pub why: String,
}

/// The calls of one list of tools.
pub struct CallGrammar {
    specs: Vec<ToolSpec>,
    /// Name and the rule of its arguments: a schema that the grammar takes. As long as `specs`.
    tools: Vec<(String, Value)>,
    refused: Vec<Refused>,
    notes: Vec<String>,
    /// By the tools that may be called.
    matchers: Mutex<HashMap<Vec<String>, Matcher>>,
}

impl CallGrammar {
    /// The tools that can be called, in order.
    pub fn names(&self) -> Vec<&str> {
        self.tools.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The same as they were given: what the prompt should show.
    pub fn specs(&self) -> &[ToolSpec] {
        &self.specs
    }

    /// The tools that cannot, and why.
    pub fn refused(&self) -> &[Refused] {
        &self.refused
    }

    /// What is not enforced while a call is written and must be checked afterwards, one line a tool and keyword.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl Grammars {
    /// `vocab`: the width of the logits. Errors: the tokenizer lacks a control token of the format.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize) -> Result<Grammars, String> {
        let id = |name: &str| {
            tokenizer.control(name).ok_or_else(|| {
                format!("the vocabulary has no control token `{name}`, which Qwen2.5's tool calls need; this model cannot be run")
            })
        };
        if vocab < tokenizer.vocab_size() {
            return Err(format!(
                "the model has {vocab} output rows but its vocabulary has {} tokens; the file is damaged",
                tokenizer.vocab_size()
            ));
        }
        let ids = ControlIds {
            im_end: id(IM_END)?,
            end_of_text: tokenizer.control(END_OF_TEXT),
            tool_call: id(TOOL_CALL)?,
            end_tool_call: id(END_TOOL_CALL)?,
        };
        Ok(Grammars { tokenizer, vocab, ids, factory: OnceLock::new(), ends: OnceLock::new(), cache: Mutex::default() })
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The ids that end the model's turn: the stop ids of a request.
    pub fn stop_ids(&self) -> Vec<u32> {
        std::iter::once(self.ids.im_end).chain(self.ids.end_of_text).collect()
    }

    /// The tokens that decide whether another argument follows. `depth`: of the brackets around, 1 for the call itself.
    pub(super) fn argument_ends(&self, depth: usize, in_string: bool) -> &[ArgumentEnds] {
        let ends = self.ends.get_or_init(|| {
            // What a token may close before the comma or the last brace.
            ["", "\"", "]", "}", "\"]", "\"}"].map(|closing| {
                let starting = |with: char| -> Vec<u32> {
                    let prefix = format!("{closing}{with}");
                    let ids = 0..self.tokenizer.vocab_size() as u32;
                    ids.filter(|&id| self.tokenizer.token_bytes(id).starts_with(prefix.as_bytes())).collect()
                };
                ArgumentEnds { more: starting(','), end: starting('}') }
            })
        });
        match (depth, in_string) {
            (ARGUMENTS_DEPTH, false) => &ends[..1],
            (ARGUMENTS_DEPTH, true) => &ends[1..2],
            (INNER_DEPTH, false) => &ends[2..4],
            (INNER_DEPTH, true) => &ends[4..],
            _ => &[],
        }
    }

    /// Builds the token trie now, so that no call has to wait for it. Meant for a thread that runs beside the prefill.
    pub fn warm(&self) {
        let _ = self.factory();
        self.argument_ends(ARGUMENTS_DEPTH, false);
    }

    /// Checks the tools and prepares their grammar; the same list again is looked up. Nothing here fails as a whole: a
    /// tool that cannot be constrained is in [`CallGrammar::refused`].
    pub fn compile(&self, tools: &[ToolSpec]) -> Arc<CallGrammar> {
        let key = serde_json::to_string(tools).unwrap_or_default();
        if let Some(known) = self.cache.lock().unwrap_or_else(|e| e.into_inner()).get(&key) {
            return known.clone();
        }
        let mut grammar = CallGrammar {
            specs: Vec::new(),
            tools: Vec::new(),
            refused: Vec::new(),
            notes: Vec::new(),
            matchers: Mutex::default(),
        };
        for tool in tools {
            let refuse = |why: String| Refused { name: tool.name.clone(), why };
            if grammar.tools.iter().any(|(name, _)| *name == tool.name) {
                grammar.refused.push(refuse("another tool of this name is offered already".into()));
            } else {
                match prepare(tool, &mut grammar.notes) {
                    Ok(schema) => {
                        grammar.specs.push(tool.clone());
                        grammar.tools.push((tool.name.clone(), schema));
                    }
                    Err(why) => grammar.refused.push(refuse(why)),
                }
            }
        }
        let grammar = Arc::new(grammar);
        let mut cache = self.cache.lock().unwrap_or_else(|e| e.into_inner());
        if cache.len() >= 64 {
            cache.clear();
        }
        cache.insert(key, grammar.clone());
        grammar
    }

    /// A matcher at the start of a call (behind `<tool_call>`) of one of `callable`.
    pub fn matcher(&self, grammar: &CallGrammar, callable: &[String]) -> Result<Matcher, String> {
        let mut matchers = grammar.matchers.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(fresh) = matchers.get(callable) {
            return Ok(fresh.deep_clone());
        }
        let tools: Vec<&(String, Value)> = grammar.tools.iter().filter(|(name, _)| callable.contains(name)).collect();
        if tools.is_empty() {
            return Err(format!(
                "none of the tools that may be called is offered; offered are: {}",
                grammar.names().join(", ")
            ));
        }
        let lark = lark(&tools, self.ids.end_tool_call);
        let parser = self.factory()?.create_parser(TopLevelGrammar::from_lark(lark));
        let matcher = Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(format!("the grammar of the tools cannot be built: {}", first_line(&error)));
        }
        matchers.insert(callable.to_vec(), matcher.deep_clone());
        Ok(matcher)
    }

    fn factory(&self) -> Result<&ParserFactory, String> {
        let built = self.factory.get_or_init(|| {
            let env: TokEnv = Arc::new(Env::new(self.tokenizer.clone(), self.vocab, &self.ids));
            let caps = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
            // The tokens that any string can hold, masked as one. llguidance proposes four such classes; they take three times
            // as long to build and save little: the first mask in a string costs 0.4 ms with one of them, 2 ms with none.
            let slices = [r#"[^"\\\x00-\x1F\x7F]{1,30}"#.to_owned()];
            let mut factory = ParserFactory::new(&env, caps, &slices)
                .map_err(|e| format!("the grammar engine cannot use this vocabulary: {e}"))?;
            factory.quiet();
            // Errors would carry the whole grammar and all tokens so far.
            factory.limits_mut().verbose_errors = false;
            Ok(factory)
        });
        built.as_ref().map_err(String::clone)
    }
}

/// The tokenizer as llguidance wants it.
struct Env {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl Env {
    fn new(tokenizer: Arc<Tokenizer>, vocab: usize, ids: &ControlIds) -> Env {
        let mut words: Vec<Vec<u8>> = (0..vocab as u32).map(|id| tokenizer.token_bytes(id).to_vec()).collect();
        for (_, id) in tokenizer.controls() {
            words[*id as usize].insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, ids.im_end), &words);
        Env { trie, tokenizer }
    }
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Exact, without NFC: these bytes are what the grammar demands.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.tokenizer.encode_exact(text))
    }
}

/// The grammar of one call. Each tool's schema is a grammar of its own, so that its `$ref`s mean itself.
fn lark(tools: &[&(String, Value)], end_tool_call: u32) -> String {
    use std::fmt::Write;
    let mut out = String::from("%llguidance {}\n");
    let alternatives: Vec<String> = (0..tools.len()).map(|i| format!("t{i}")).collect();
    let _ = writeln!(out, "start: call <[{end_tool_call}]>\ncall: {}", alternatives.join(" | "));
    for (i, (name, schema)) in tools.iter().enumerate() {
        // A JSON string in a JSON string: the first is what the model writes, the second is how the grammar quotes it.
        let head = format!("\n{{\"name\": {}, \"arguments\": ", Value::String(name.clone()));
        let _ = writeln!(out, "t{i}: {} a{i} \"}}\\n\"\na{i}: %json {schema}", Value::String(head));
    }
    out
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// Keywords that only rule values out. The grammar cannot enforce them; whoever runs the tool checks them.
const CHECKED_AFTERWARDS: &[&str] = &[
    "uniqueItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contentSchema",
];

/// Formats that the grammar enforces.
const FORMATS: &[&str] = &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Why a tool cannot be offered, if it cannot: what [`Grammars::compile`] refuses, without a vocabulary. Costs about a
/// millisecond.
pub fn check(tool: &ToolSpec) -> Result<(), String> {
    prepare(tool, &mut Vec::new()).map(drop)
}

/// The schema of a tool's arguments in the form that the grammar takes.
fn prepare(tool: &ToolSpec, notes: &mut Vec<String>) -> Result<Value, String> {
    if tool.name.is_empty() {
        return Err("a tool needs a name".into());
    }
    if tool.name.contains(char::is_control) {
        return Err("a tool's name must not contain control characters".into());
    }
    let mut schema = match &tool.parameters {
        Value::Object(map) => map.clone(),
        Value::Bool(true) => Map::new(),
        Value::Null => json!({"properties": {}}).as_object().cloned().unwrap_or_default(),
        other => return Err(format!("its parameters must be a JSON Schema of an object, not `{}`", short(other))),
    };
    let is_object = match schema.get("type") {
        None => true,
        Some(Value::String(kind)) => kind == "object",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "object"),
        Some(_) => false,
    };
    if !is_object {
        return Err(format!("its arguments must be an object, but the schema's type is `{}`", short(&schema["type"])));
    }
    schema.remove("$schema");
    schema.remove("$id");
    schema.insert("type".into(), json!("object"));
    // A schema that lists its properties and forgets to close the list: what else a model would write, it would invent.
    let combined = ["allOf", "anyOf", "oneOf", "$ref", "patternProperties", "minProperties"];
    if schema.contains_key("properties")
        && !schema.contains_key("additionalProperties")
        && !combined.iter().any(|k| schema.contains_key(*k))
    {
        schema.insert("additionalProperties".into(), json!(false));
    }

    let mut value = Value::Object(schema);
    let mut skipped = Vec::new();
    strip(&mut value, &mut skipped, 0)?;
    if !finite(&value, &value, &mut Vec::new(), &mut 10_000) {
        return Err("no finite value satisfies its schema: it requires itself".into());
    }
    if let Some(map) = value.as_object_mut() {
        let options = json!({
            "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", "lenient": true,
        });
        map.insert("x-guidance".into(), options);
    }
    let warnings = try_compile(&value)?;
    for warning in warnings {
        let what = if warning.starts_with("oneOf") {
            "oneOf".to_owned()
        } else if warning.contains("maxProperties") {
            "minProperties/maxProperties".to_owned()
        } else {
            first_line(&warning).to_owned()
        };
        if !skipped.contains(&what) {
            skipped.push(what);
        }
    }
    for keyword in skipped {
        notes.push(format!(
            "tool `{}`: `{keyword}` is not enforced while a call is written, only checked after",
            tool.name
        ));
    }
    Ok(value)
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 80 { text.chars().take(80).chain(std::iter::once('…')).collect() } else { text }
}

/// Builds the grammar of one schema without a vocabulary. Returns the warnings.
fn try_compile(schema: &Value) -> Result<Vec<String>, String> {
    let limits = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
    let init = GrammarInit::Serialized(TopLevelGrammar::from_json_schema(schema.clone()));
    let result = llguidance::panic_utils::catch_unwind(AssertUnwindSafe(|| {
        let (grammar, lexer) = init.to_internal(None, limits.clone())?;
        let warnings = lexer.render_warnings();
        // The lexer too: a schema can be too large for it.
        GrammarInit::Internal(grammar, lexer).to_cgrammar(None, &mut Logger::new(0, 0), limits, Vec::new())?;
        Ok(warnings)
    }));
    match result {
        Ok(warnings) => Ok(warnings),
        Err(e) => {
            let text = format!("{e:#}");
            // A panic inside the library comes with a backtrace that helps nobody here.
            let line = first_line(&text);
            Err(match line.strip_prefix("panic: ") {
                Some(_) => "its schema cannot be compiled".to_owned(),
                None => format!("its schema cannot be compiled: {line}"),
            })
        }
    }
}

/// Removes what the grammar cannot take and nothing depends on, and names it; refuses what it cannot do without.
fn strip(schema: &mut Value, skipped: &mut Vec<String>, depth: usize) -> Result<(), String> {
    if depth > 64 {
        return Err("its schema is nested more than 64 deep".into());
    }
    let Value::Object(map) = schema else { return Ok(()) };
    let mut skip = |what: String| {
        if !skipped.contains(&what) {
            skipped.push(what);
        }
    };
    for keyword in CHECKED_AFTERWARDS {
        if map.shift_remove(*keyword).is_some() {
            skip((*keyword).to_owned());
        }
    }
    for reference in ["$ref", "$dynamicRef", "$recursiveRef"] {
        if let Some(target) = map.get(reference).and_then(Value::as_str)
            && !target.starts_with('#')
        {
            return Err(format!(
                "its schema has a `{reference}` to `{target}`, outside of itself; put the definition under $defs"
            ));
        }
    }
    if let Some(format) = map.get("format") {
        match format.as_str() {
            Some(name) if FORMATS.contains(&name) => {}
            Some(name) => {
                skip(format!("format: {name}"));
                map.shift_remove("format");
            }
            None => {
                map.shift_remove("format");
            }
        }
    }
    if let Some(pattern) = map.get("pattern")
        && try_compile(&json!({"type": "string", "pattern": pattern})).is_err()
    {
        skip(format!("pattern: {}", pattern.as_str().unwrap_or("?")));
        map.shift_remove("pattern");
    }
    if let Some(patterns) = map.get("patternProperties").and_then(Value::as_object) {
        let fits = patterns.keys().all(|p| {
            try_compile(&json!({"type": "object", "patternProperties": {p: {}}, "additionalProperties": false})).is_ok()
        });
        // Two patterns that overlap are refused by the grammar too; then none of them is enforced.
        let alone = json!({"type": "object", "patternProperties": patterns.keys().map(|p| (p.clone(), json!({}))).collect::<Map<_, _>>()});
        if !fits || try_compile(&alone).is_err() {
            skip("patternProperties".into());
            map.shift_remove("patternProperties");
        }
    }
    // Draft 3 wrote `required: true` into the property itself.
    if map.get("required").is_some_and(|required| !required.is_array()) {
        skip("required (not a list)".into());
        map.shift_remove("required");
    }
    // A multiple can need one more digit again and again, so that only a bound ends it; see `Digits` in `mask`.
    if map.contains_key("multipleOf") {
        const LIMIT: f64 = 1e12;
        let bound = |keys: [&str; 2]| keys.iter().find_map(|key| map.get(*key).and_then(Value::as_f64));
        let (low, high) = (bound(["minimum", "exclusiveMinimum"]), bound(["maximum", "exclusiveMaximum"]));
        if low.is_none() && high.is_none_or(|high| high > -LIMIT) {
            map.insert("minimum".into(), json!(-LIMIT));
        }
        if high.is_none() && low.is_none_or(|low| low < LIMIT) {
            map.insert("maximum".into(), json!(LIMIT));
        }
    }
    for (keyword, value) in map.iter_mut() {
        match keyword.as_str() {
            "properties" | "patternProperties" | "$defs" | "definitions" => {
                for child in value.as_object_mut().into_iter().flat_map(|m| m.values_mut()) {
                    strip(child, skipped, depth + 1)?;
                }
            }
            "items" | "additionalItems" | "additionalProperties" | "prefixItems" | "anyOf" | "oneOf" | "allOf" => {
                match value {
                    Value::Array(children) => {
                        for child in children {
                            strip(child, skipped, depth + 1)?;
                        }
                    }
                    child => strip(child, skipped, depth + 1)?,
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether some value of finite size satisfies the schema, as far as required properties, items and references tell. When
/// `fuel` runs out the answer is yes: the schema is then large, and this is only a guard against endless nesting.
fn finite<'a>(schema: &'a Value, root: &'a Value, open: &mut Vec<&'a str>, fuel: &mut usize) -> bool {
    if *fuel == 0 {
        return true;
    }
    *fuel -= 1;
    let Value::Object(map) = schema else { return true };
    if let Some(target) = map.get("$ref").and_then(Value::as_str) {
        if open.contains(&target) {
            return false;
        }
        let Some(found) = root.pointer(target.trim_start_matches('#').trim_end_matches('/')) else { return true };
        open.push(target);
        let is_finite = finite(found, root, open, fuel);
        open.pop();
        if !is_finite {
            return false;
        }
    }
    for any in ["anyOf", "oneOf"] {
        if let Some(options) = map.get(any).and_then(Value::as_array)
            && !options.is_empty()
            && !options.iter().any(|option| finite(option, root, open, fuel))
        {
            return false;
        }
    }
    if let Some(parts) = map.get("allOf").and_then(Value::as_array)
        && !parts.iter().all(|part| finite(part, root, open, fuel))
    {
        return false;
    }
    let only = |kind: &str| map.get("type").is_some_and(|t| t == kind);
    if only("object")
        && let Some(required) = map.get("required").and_then(Value::as_array)
        && let Some(properties) = map.get("properties")
    {
        let mut needed = required.iter().filter_map(|name| properties.get(name.as_str()?));
        if !needed.all(|property| finite(property, root, open, fuel)) {
            return false;
        }
    }
    if only("array")
        && map.get("minItems").and_then(Value::as_u64).unwrap_or(0) > 0
        && let Some(items) = map.get("items")
        && !finite(items, root, open, fuel)
    {
        return false;
    }
    true
}
