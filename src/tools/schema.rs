//! Argument structs → small JSON Schemas, and arguments checked against them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use jsonschema::Validator;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::text;
use crate::message::{ToolSpec, json_canonical};

/// The specification of a tool whose arguments are an `A`: its doc comments are the descriptions, and the order of its
/// fields is the order in which the model writes them, so what decides (a path, a command) comes first.
///
/// ```
/// #[derive(serde::Deserialize, schemars::JsonSchema)]
/// struct Arguments {
///     /// Name of the city.
///     city: String,
///     days: Option<u32>,
/// }
/// let spec = cob::tools::spec_of::<Arguments>("forecast", "Tells the weather of the next days.");
/// assert_eq!(
///     spec.parameters.to_string(),
///     r#"{"type":"object","properties":{"city":{"type":"string","description":"Name of the city."},"days":{"type":"integer"}},"required":["city"],"additionalProperties":false}"#
/// );
/// ```
pub fn spec_of<A: JsonSchema>(name: &str, description: &str) -> ToolSpec {
    let mut settings = schemars::generate::SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    let schema = settings.into_generator().into_root_schema_for::<A>().to_value();
    let mut parameters = small(schema);
    if let Some(object) = parameters.as_object_mut() {
        // The description of the struct is the developer's; the tool has its own.
        object.remove("description");
        object.entry("properties").or_insert_with(|| json!({}));
        object.shift_remove("additionalProperties");
        object.insert("additionalProperties".into(), Value::Bool(false));
    }
    ToolSpec { name: name.to_string(), description: description.to_string(), parameters }
}

/// Without what only costs tokens: titles, formats, defaults, `null` as a second type (optional is said by
/// `required`), and the numeric bounds that follow from a Rust type.
fn small(schema: Value) -> Value {
    let Value::Object(mut schema) = schema else { return schema };
    for keyword in ["anyOf", "oneOf"] {
        let branches = schema.get(keyword).and_then(Value::as_array).cloned().unwrap_or_default();
        let is_null = |branch: &Value| branch.get("type").and_then(Value::as_str) == Some("null");
        let others: Vec<Value> = branches.iter().filter(|branch| !is_null(branch)).cloned().collect();
        if others.len() == 1 && branches.len() == 2 {
            schema.remove(keyword);
            if let Value::Object(other) = &others[0] {
                other.iter().for_each(|(key, value)| {
                    schema.entry(key.clone()).or_insert_with(|| value.clone());
                });
            }
        }
    }
    let machine_number = schema.get("format").and_then(Value::as_str).is_some_and(|format| {
        format.starts_with("int") || format.starts_with("uint") || matches!(format, "float" | "double")
    });
    let mut clean = Map::new();
    // The type first: the reader, and the grammar, want it before the rest.
    for key in ["type", "description"] {
        if let Some(value) = schema.shift_remove(key) {
            let value = match value {
                Value::Array(types) if key == "type" => {
                    let types: Vec<Value> = types.into_iter().filter(|name| name != "null").collect();
                    if types.len() == 1 { types[0].clone() } else { Value::Array(types) }
                }
                Value::String(text) => Value::String(text.split_whitespace().collect::<Vec<_>>().join(" ")),
                value => value,
            };
            clean.insert(key.into(), value);
        }
    }
    for (key, value) in schema {
        let value = match key.as_str() {
            "$schema" | "title" | "format" | "default" => continue,
            "minimum" | "maximum" if machine_number => continue,
            "properties" | "$defs" => match value {
                Value::Object(named) => named.into_iter().map(|(name, value)| (name, small(value))).collect(),
                value => value,
            },
            // `null` stands among the values of an optional enum.
            "enum" => match value {
                Value::Array(values) => values.into_iter().filter(|value| !value.is_null()).collect(),
                value => value,
            },
            "items" | "additionalProperties" => small(value),
            "anyOf" | "oneOf" | "allOf" | "prefixItems" => match value {
                Value::Array(branches) => branches.into_iter().map(small).collect(),
                value => value,
            },
            _ => value,
        };
        clean.insert(key, value);
    }
    Value::Object(clean)
}

/// The arguments as their struct. `Err` is for the model.
pub(super) fn arguments<A: DeserializeOwned>(value: Value) -> Result<A, String> {
    let fault = |error| format!("The arguments do not fit: {error}. Make the call again with correct arguments.");
    serde_json::from_value(integral(value)).map_err(fault)
}

/// `2.0` is an integer to JSON Schema, and not to serde.
fn integral(value: Value) -> Value {
    /// Whole numbers up to here are exact.
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) => match number.as_f64().filter(|x| number.is_f64() && x.fract() == 0.0) {
            Some(x) if x.abs() <= EXACT_MAX => json!(x as i64),
            _ => Value::Number(number),
        },
        Value::Array(values) => values.into_iter().map(integral).collect(),
        Value::Object(map) => map.into_iter().map(|(key, value)| (key, integral(value))).collect(),
        other => other,
    }
}

/// Checks arguments against the tool's schema, before anything else is done with them. `Err` is for the model: it names
/// each property at fault (at most three) and lists the properties there are.
///
/// Validators are compiled once a schema. Nothing remote is fetched; a schema that cannot be compiled is said to be so.
pub fn validate(spec: &ToolSpec, arguments: &Value) -> Result<(), String> {
    const FAULTS_MAX: usize = 3;
    const FAULT_BYTES_MAX: usize = 300;
    let validator = compiled(&spec.parameters)
        .map_err(|why| format!("The schema of the tool {} cannot be used: {why}.", spec.name))?;
    if !arguments.is_object() {
        return Err(format!("The arguments of {} must be a JSON object. {}", spec.name, properties(spec)));
    }
    let mut errors = validator.iter_errors(arguments);
    let faults: Vec<String> = errors
        .by_ref()
        .take(FAULTS_MAX)
        .map(|error| {
            let place = error.instance_path().to_string();
            let place = place.trim_start_matches('/').replace('/', ".");
            let why = text::shortened(&error.to_string(), FAULT_BYTES_MAX);
            if place.is_empty() { why } else { format!("{}: {why}", text::shortened(&place, 100)) }
        })
        .collect();
    if faults.is_empty() {
        return Ok(());
    }
    let more = errors.count();
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    Err(format!("The arguments of {} are wrong: {}{more}. {}", spec.name, faults.join("; "), properties(spec)))
}

fn properties(spec: &ToolSpec) -> String {
    let required = spec.parameters.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
    let names: Vec<String> = match spec.parameters.get("properties").and_then(Value::as_object) {
        Some(properties) => properties
            .keys()
            .map(|name| match required.iter().any(|required| required == name) {
                true => format!("{name} (required)"),
                false => name.clone(),
            })
            .collect(),
        None => Vec::new(),
    };
    let names = if names.is_empty() { "none".to_string() } else { names.join(", ") };
    text::shortened(&format!("Its arguments: {names}."), 600)
}

fn compiled(schema: &Value) -> Result<Arc<Validator>, String> {
    /// More schemas than a run ever has; past it (an evaluation over thousands of cases) all are compiled anew.
    const CACHED_MAX: usize = 512;
    type Cache = HashMap<String, Result<Arc<Validator>, String>>;
    static CACHE: Mutex<Option<Cache>> = Mutex::new(None);
    let key = json_canonical(schema);
    let lock = || CACHE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(found) = lock().as_ref().and_then(|cache| cache.get(&key)) {
        return found.clone();
    }
    let made = jsonschema::validator_for(schema).map(Arc::new).map_err(|error| error.to_string());
    let mut cache = lock();
    let cache = cache.get_or_insert_default();
    if cache.len() >= CACHED_MAX {
        cache.clear();
    }
    cache.insert(key, made.clone());
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Tools;

    #[test]
    fn schemas_are_small_plain_and_ordered() {
        let tools = Tools::builtin(None).unwrap();
        for spec in tools.specs() {
            let text = spec.parameters.to_string();
            for word in ["$schema", "title", "format", "null", "minimum", "default\"", "$ref", "$defs", "\\n"] {
                assert!(!text.contains(word), "{}: {text}", spec.name);
            }
            assert_eq!(spec.parameters["additionalProperties"], json!(false));
            assert!(spec.description.len() < 200, "{}", spec.name);
            let first = spec.parameters["properties"].as_object().unwrap().keys().next().unwrap().as_str();
            assert!(matches!(first, "file_path" | "path" | "pattern" | "command"), "{first}");
        }
        let grep = tools.get("Grep").unwrap().spec();
        assert_eq!(
            grep.parameters["properties"]["output_mode"]["enum"],
            json!(["content", "files_with_matches", "count"])
        );
        assert_eq!(grep.parameters["properties"]["output_mode"]["type"], json!("string"));
        assert_eq!(grep.parameters["properties"]["-i"]["type"], json!("boolean"));
    }

    #[test]
    fn faults_name_the_property() {
        let tools = Tools::builtin(None).unwrap();
        let long = "ộ".repeat(10_000);
        for (tool, arguments, parts) in [
            ("Read", json!({"file_path": "x"}), &[][..]),
            ("Read", json!({"file_path": "x", "offset": 3}), &[]),
            ("Read", json!({}), &["file_path", "required", "Its arguments: file_path (required), offset, limit."]),
            ("Read", json!({"path": "x", "file_path": "y"}), &["'path'"]),
            ("Read", json!({"file_path": "x", "offset": "three"}), &["offset: ", "integer"]),
            ("Read", json!("x"), &["must be a JSON object"]),
            ("Read", json!({"file_path": 1, "offset": long}), &["file_path: ", "offset: "]),
            ("Grep", json!({"pattern": "x", "output_mode": "lines"}), &["output_mode: ", "files_with_matches"]),
        ] {
            match validate(tools.get(tool).unwrap().spec(), &arguments) {
                Ok(()) => assert!(parts.is_empty(), "{arguments}"),
                Err(fault) => {
                    assert!(!parts.is_empty(), "{fault}");
                    assert!(fault.len() < 1500, "{}", fault.len());
                    parts.iter().for_each(|part| assert!(fault.contains(part), "{part}: {fault}"));
                }
            }
        }
    }

    #[test]
    fn a_schema_that_cannot_be_used_is_said() {
        let spec = |parameters: Value| ToolSpec { name: "t".into(), description: String::new(), parameters };
        let fault = validate(&spec(json!({"type": "nothing"})), &json!({})).unwrap_err();
        assert!(fault.contains("schema of the tool t"), "{fault}");
        let remote = json!({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}});
        assert!(validate(&spec(remote), &json!({"a": 1})).is_err());
        // What only validates is checked here, after the grammar.
        let unique = json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}});
        assert!(validate(&spec(unique.clone()), &json!({"a": [1, 2]})).is_ok());
        let fault = validate(&spec(unique), &json!({"a": [1, 1]})).unwrap_err();
        assert!(fault.contains("a: "), "{fault}");
    }
}
