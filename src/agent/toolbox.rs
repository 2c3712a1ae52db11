//! The tools of a task, by name, with the check of their arguments.

use std::sync::Arc;

use serde_json::Value;

use crate::chat::grammar;
use crate::message::ToolSpec;
use crate::tools::Tool;

/// Faults of the arguments that one error result names.
const FAULTS_MAX: usize = 5;

/// The tools that the model is offered.
#[derive(Default)]
pub struct Toolbox {
    entries: Vec<Entry>,
    specs: Vec<ToolSpec>,
}

pub(super) struct Entry {
    pub tool: Arc<dyn Tool>,
    validator: jsonschema::Validator,
}

impl Toolbox {
    /// The strings name each tool that is left out, and why: a name that is taken, a schema that calls cannot be held to.
    pub fn new(tools: Vec<Arc<dyn Tool>>) -> (Toolbox, Vec<String>) {
        let mut toolbox = Toolbox::default();
        let mut left_out = Vec::new();
        for tool in tools {
            let spec = tool.spec().clone();
            if toolbox.find(&spec.name).is_some() {
                left_out.push(format!("the tool `{}` is left out: there is another one of that name", spec.name));
                continue;
            }
            let validator = grammar::check(&spec).and_then(|()| {
                let built = jsonschema::options().should_validate_formats(true).build(&spec.parameters);
                built.map_err(|error| format!("its schema cannot be used: {error}"))
            });
            match validator {
                Ok(validator) => {
                    toolbox.specs.push(spec);
                    toolbox.entries.push(Entry { tool, validator });
                }
                Err(why) => left_out.push(format!("the tool `{}` is left out: {why}", spec.name)),
            }
        }
        (toolbox, left_out)
    }

    /// As the model is told of them, in the order given.
    pub fn specs(&self) -> &[ToolSpec] {
        &self.specs
    }

    pub(super) fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.tool.spec().name == name)
    }

    pub(super) fn read_only(&self, name: &str) -> bool {
        self.find(name).is_some_and(|entry| entry.tool.read_only())
    }

    /// What a call of an unknown tool is answered.
    pub(super) fn unknown(&self, name: &str) -> String {
        if self.specs.is_empty() {
            return format!("error: there is no tool `{name}`; no tools are offered. Answer without one.");
        }
        let mut names: Vec<&str> = self.specs.iter().map(|spec| spec.name.as_str()).collect();
        names.sort_by_key(|known| distance(&name.to_lowercase(), &known.to_lowercase()));
        format!(
            "error: there is no tool `{name}`. The tools are: {}. Call one of them, or answer without a tool.",
            names.join(", ")
        )
    }
}

impl Entry {
    /// `Err` is what a call with such arguments is answered.
    pub(super) fn check(&self, arguments: &Value) -> Result<(), String> {
        let spec = self.tool.spec();
        if !arguments.is_object() {
            return Err(format!(
                "error: the arguments of {} are not a JSON object. {} Make the call again with correct arguments.",
                spec.name,
                expected(spec)
            ));
        }
        let mut faults = self.validator.iter_errors(arguments).map(|fault| {
            let at = fault.instance_path().to_string();
            if at.is_empty() { fault.to_string() } else { format!("{at}: {fault}") }
        });
        let mut named: Vec<String> = faults.by_ref().take(FAULTS_MAX).collect();
        let rest = faults.count();
        if named.is_empty() {
            return Ok(());
        }
        if rest > 0 {
            named.push(format!("and {rest} more"));
        }
        Err(format!(
            "error: the arguments of {} are wrong: {}. {} Make the call again with correct arguments.",
            spec.name,
            named.join("; "),
            expected(spec)
        ))
    }
}

/// `It takes file_path (string, required), limit (integer).`
fn expected(spec: &ToolSpec) -> String {
    let required: Vec<&str> =
        spec.parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let properties = spec.parameters["properties"].as_object().into_iter().flatten();
    let fields: Vec<String> = properties
        .map(|(name, schema)| {
            let kind = schema["type"].as_str().unwrap_or("any");
            let must = if required.contains(&name.as_str()) { ", required" } else { "" };
            format!("{name} ({kind}{must})")
        })
        .collect();
    if fields.is_empty() { "It takes no arguments.".into() } else { format!("It takes {}.", fields.join(", ")) }
}

/// The edit distance of two words, in characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let check = |a, b, expected| assert_eq!(distance(a, b), expected, "{a} {b}");
        check("", "", 0);
        check("", "abc", 3);
        check("kitten", "sitting", 3);
        check("read", "raed", 2);
        check("đọc", "đoc", 1);
    }
}
