//! What the model is told when nobody says otherwise: how to act, shown by examples. Small models follow an example where
//! they overlook a rule; `docs/LOG.md` has the measurements.

use std::fmt::Write;

use crate::chat::{ROUTE_ANSWER, ROUTE_TOOL};
use crate::message::{Habits, ToolSpec};

/// Where no tool is one of ours: examples of other tools are copied, names and all.
const ABOUT: &str = "You are cob, an agent. When one of the listed tools fits the task, your whole reply is {\"name\": the tool, \
                     \"arguments\": {...}}, with nothing before it or after it. Do not explain how a tool is used: use it. Use \
                     only the tools that are listed, by their exact names. Take the values of arguments from the task, word \
                     for word. When a tool's result is there, answer in one short sentence. When none of the tools does what \
                     the task asks, call none and answer in words.";
const ABOUT_FILES: &str = "You are cob, an agent that works in the user's folder with tools. A reply names a tool and calls it, or \
                     answers. When a task is about a file, a folder or a command, call a tool first; when its result is \
                     there, answer in one short sentence.";

/// One task and what the model replies to it.
struct Example {
    task: &'static str,
    /// A tool and its arguments.
    call: Option<(&'static str, &'static str)>,
    result: &'static str,
    answer: &'static str,
}

const fn call(task: &'static str, tool: &'static str, arguments: &'static str) -> Example {
    Example { task, call: Some((tool, arguments)), result: "", answer: "" }
}

const fn answer(task: &'static str, answer: &'static str) -> Example {
    Example { task, call: None, result: "", answer }
}

/// Of each tool at least one. None of them names a thing that a task is likely to be about: the models copy.
const EXAMPLES: &[Example] = &[
    Example {
        result: "data.csv has 3 lines",
        answer: "data.csv has 3 lines.",
        ..call("How many lines does data.csv have?", "Read", r#"{"file_path": "data.csv"}"#)
    },
    Example {
        result: "1\tA crow held a piece of cheese. A fox praised its voice; the crow sang, and the cheese fell.",
        answer: "A fox gets a crow's cheese by flattery.",
        ..call("Read story.txt and summarise it.", "Read", r#"{"file_path": "story.txt"}"#)
    },
    Example {
        result: "1\t{\"title\": \"Walden\"}",
        answer: "The title is Walden.",
        ..call("What is the title in book.json?", "Read", r#"{"file_path": "book.json"}"#)
    },
    Example {
        result: "lib/user.js:7:function load_user() {",
        answer: "It is in lib/user.js.",
        ..call("Where is the function load_user?", "Grep", r#"{"pattern": "load_user"}"#)
    },
    call("Which file contains the word draft?", "Grep", r#"{"pattern": "draft"}"#),
    call("What is in the folder images?", "LS", r#"{"path": "images"}"#),
    call("How many .js files are there?", "Glob", r#"{"pattern": "**/*.js"}"#),
    call("Run make test. Does it pass?", "Bash", r#"{"command": "make test"}"#),
    call("Write the word ok into out.log.", "Write", r#"{"file_path": "out.log", "content": "ok\n"}"#),
    call("Add the line pear to the end of list.txt.", "Bash", r#"{"command": "echo pear >> list.txt"}"#),
    call(
        "Rename total to sum in calc.js.",
        "Edit",
        r#"{"file_path": "calc.js", "old_string": "total", "new_string": "sum", "replace_all": true}"#,
    ),
    answer("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    answer("What is 5 times 3?", "15"),
    answer("Hi", "Hello! What can I do for you?"),
];

/// The system prompt for these tools. With `routing`, and where a tool of the examples is offered, the examples begin with the
/// routing line ([`crate::chat::CompletionRequest::routing`]).
fn system_prompt(tools: &[ToolSpec], routing: bool) -> String {
    let offered = |name: &str| tools.iter().any(|tool| tool.name == name);
    let shown = |example: &&Example| example.call.is_none_or(|(tool, _)| offered(tool));
    if !EXAMPLES.iter().any(|example| example.call.is_some_and(|(tool, _)| offered(tool))) {
        return ABOUT.to_owned();
    }
    let mut text = format!("{ABOUT_FILES} Examples:\n");
    for Example { task, call, result, answer } in EXAMPLES.iter().filter(shown) {
        let _ = write!(text, "\n{task}\n");
        if let Some((tool, arguments)) = call {
            if routing {
                let _ = writeln!(text, "{ROUTE_TOOL}{tool}");
            }
            let _ = writeln!(text, r#"{{"name": "{tool}", "arguments": {arguments}}}"#);
        }
        for line in [result, answer].into_iter().filter(|line| !line.is_empty()) {
            let route = if routing && line == answer { ROUTE_ANSWER } else { "" };
            let _ = writeln!(text, "{route}{}{line}", if route.is_empty() { "" } else { " " });
        }
    }
    text
}

/// The system prompt of a run, and the habits that go with it: `given`, else ours where a tool is offered. The routing line
/// stays on only under a prompt that shows it.
pub fn instruct(given: Option<String>, tools: &[ToolSpec], habits: Habits) -> (Option<String>, Habits) {
    let system = given.or_else(|| (!tools.is_empty()).then(|| system_prompt(tools, habits.routing)));
    let routing = habits.routing && system.as_deref().is_some_and(shows_routing);
    (system, Habits { routing, ..habits })
}

/// Whether a system prompt shows the routing line. A model that was not shown it always says that it answers.
pub fn shows_routing(system: &str) -> bool {
    [ROUTE_TOOL, ROUTE_ANSWER].iter().all(|route| system.contains(&format!("\n{route}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Tools;

    #[test]
    fn the_examples_obey_the_tools() {
        let tools = Tools::builtin(None).unwrap();
        for example in EXAMPLES {
            let Some((name, arguments)) = example.call else { continue };
            let tool = tools.get(name).unwrap_or_else(|| panic!("no tool {name}"));
            let arguments = serde_json::from_str(arguments).unwrap();
            let schema = jsonschema::validator_for(&tool.spec().parameters).unwrap();
            assert!(schema.is_valid(&arguments), "{name} {arguments}");
        }
        for tool in tools.iter() {
            let name = &tool.spec().name;
            assert!(EXAMPLES.iter().any(|e| e.call.is_some_and(|(tool, _)| tool == name)), "no example of {name}");
        }
    }

    #[test]
    fn only_offered_tools_are_shown() {
        let read = Tools::builtin(Some(&["Read".to_owned()])).unwrap();
        let specs: Vec<ToolSpec> = read.iter().map(|tool| tool.spec().clone()).collect();
        insta::assert_snapshot!(system_prompt(&specs, true));
        let plain = system_prompt(&specs, false);
        assert!(!plain.contains("Tool:") && !plain.contains("Answer:") && !plain.contains("Bash"), "{plain}");

        let strange =
            [ToolSpec { name: "get_weather".into(), description: String::new(), parameters: serde_json::Value::Null }];
        let (text, habits) = instruct(None, &strange, Habits { routing: true, ..Habits::default() });
        assert!(!habits.routing && !text.unwrap().contains("Examples"));
        assert_eq!(instruct(None, &[], Habits::default()).0, None);
    }
}
