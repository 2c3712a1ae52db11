//! Tools that a file describes. They can be offered to a model and counted, not run.

use std::path::Path;

use async_trait::async_trait;
use serde_json::{Value, json};

use crate::message::ToolSpec;
use crate::permission::Access;
use crate::tools::{Tool, ToolContext, ToolOutput};

/// Reads the tools of a file: a list of tools, one tool, an object with a list `tools`, or an MCP server's whole answer
/// (`{"result": {"tools": […]}}`). Names need not be unique. Each tool has OpenAI's shape
/// (`{"type":"function","function":{name,description,parameters}}`), the bare one (`{name,description,parameters}`), or MCP's
/// (`{name,description,inputSchema}`). `Err` names the file, the place and the fault.
pub fn read(path: &Path) -> Result<Vec<ToolSpec>, String> {
    let fault = |why: String| format!("the tool file {}: {why}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fault(format!("it cannot be read: {error}")))?;
    let text = text.trim_start_matches('\u{feff}');
    let value: Value = serde_json::from_str(text).map_err(|error| fault(format!("it is not JSON: {error}")))?;
    parse(&value).map_err(fault)
}

fn parse(value: &Value) -> Result<Vec<ToolSpec>, String> {
    let tools = match value {
        Value::Array(tools) => tools.as_slice(),
        Value::Object(object) => match object.get("tools") {
            Some(Value::Array(tools)) => tools.as_slice(),
            Some(_) => return Err("`tools` is not a list".into()),
            None if object.get("result").is_some_and(|result| result.get("tools").is_some()) => {
                return parse(&object["result"]);
            }
            None => std::slice::from_ref(value),
        },
        _ => return Err("it holds neither a list of tools nor an object".into()),
    };
    let numbered = tools.iter().enumerate();
    numbered.map(|(at, tool)| one(tool).map_err(|why| format!("tool {}: {why}", at + 1))).collect()
}

/// The first tool, counted from 1, whose name another one before it has.
pub fn twice(specs: &[ToolSpec]) -> Option<(usize, &str)> {
    let before = |at: usize, name: &str| specs[..at].iter().any(|before| before.name == name);
    specs.iter().enumerate().find(|(at, spec)| before(*at, &spec.name)).map(|(at, spec)| (at + 1, spec.name.as_str()))
}

fn one(tool: &Value) -> Result<ToolSpec, String> {
    let body = tool.get("function").unwrap_or(tool);
    let name = match &body["name"] {
        Value::String(name) if !name.is_empty() => name.clone(),
        _ => return Err("it has no `name`".into()),
    };
    let description = match &body["description"] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        _ => return Err(format!("the `description` of `{name}` is not a text")),
    };
    let schema = body.get("parameters").or_else(|| body.get("inputSchema")).or_else(|| body.get("input_schema"));
    let parameters = match schema {
        Some(Value::Object(schema)) => Value::Object(schema.clone()),
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(_) => return Err(format!("the parameters of `{name}` are not a JSON Schema object")),
    };
    Ok(ToolSpec { name, description, parameters })
}

/// A tool that is offered and has nothing behind it.
pub struct Offered(pub ToolSpec);

#[async_trait]
impl Tool for Offered {
    fn spec(&self) -> &ToolSpec {
        &self.0
    }

    fn access(&self, _: &Value, _: &ToolContext) -> Result<Vec<Access>, String> {
        Ok(Vec::new())
    }

    fn read_only(&self) -> bool {
        true
    }

    async fn run(&self, _: Value, _: &ToolContext) -> ToolOutput {
        ToolOutput::final_error(format!(
            "{} was called, but nothing stands behind it in this run: there is no result.",
            self.0.name
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_shapes_mean_the_same() {
        let schema = json!({"type": "object", "properties": {"q": {"type": "string"}}});
        let openai = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}});
        let bare = json!({"name": "f", "description": "d", "parameters": schema});
        let mcp = json!({"name": "f", "description": "d", "inputSchema": schema});
        let expected = ToolSpec { name: "f".into(), description: "d".into(), parameters: schema };
        let answer = json!({"jsonrpc": "2.0", "id": 1, "result": {"tools": [mcp]}});
        for value in [json!([openai]), openai, json!([bare]), bare, json!({"tools": [mcp]}), answer, json!([mcp]), mcp]
        {
            assert_eq!(parse(&value), Ok(vec![expected.clone()]), "{value}");
        }
        let empty = json!({"type": "object", "properties": {}});
        assert_eq!(parse(&json!([{"name": "g"}])).unwrap()[0].parameters, empty);
        assert_eq!(parse(&json!([])), Ok(vec![]));
        let same = parse(&json!([{"name": "g"}, {"name": "f"}, {"name": "f"}])).unwrap();
        assert_eq!((twice(&same), twice(&same[..2])), (Some((3, "f")), None));
    }

    #[test]
    fn faults_say_where() {
        let check = |value: Value, expected: &str| assert_eq!(parse(&value), Err(expected.to_owned()));
        check(json!("x"), "it holds neither a list of tools nor an object");
        check(json!({"tools": 1}), "`tools` is not a list");
        check(json!([{"name": "f"}, {}]), "tool 2: it has no `name`");
        check(json!([{"name": "f", "description": 1}]), "tool 1: the `description` of `f` is not a text");
        check(json!([{"name": "f", "parameters": []}]), "tool 1: the parameters of `f` are not a JSON Schema object");
    }
}
