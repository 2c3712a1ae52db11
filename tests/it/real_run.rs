//! `cob run` on the real model, as a user starts it.

use std::process::Command;

use cob::chat::qwen::ChatFormat;
use serde_json::Value;

use crate::real::model_file;

const SMALL: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m";
const DEFAULT: &str = "qwen2.5-coder-1.5b-instruct-q4_k_m";

#[test]
fn a_task_calls_a_tool_and_the_result_says_all_of_it() {
    let Some(model) = model_file(SMALL) else { return };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chào.txt"), "một\nhai\nba\n").unwrap();
    let run = || {
        let task = "Read the file chào.txt.";
        let flags =
            ["--output-format", "json", "--tool-choice", "Read", "--offline", "--max-turns", "6", "--seed", "1"];
        let done = Command::new(env!("CARGO_BIN_EXE_cob"))
            .args(["run", task])
            .args(flags)
            .arg("--model")
            .arg(&model)
            .current_dir(folder.path())
            .env("XDG_STATE_HOME", folder.path().join("state"))
            .env("XDG_CACHE_HOME", folder.path().join("cache"))
            .output()
            .unwrap();
        serde_json::from_slice::<Value>(&done.stdout).unwrap_or_else(|e| {
            panic!("{e}: {} {}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
        })
    };
    let result = run();
    assert_eq!(result["type"], "result");
    let call = &result["tool_calls"][0];
    assert_eq!((&call["name"], &call["outcome"]), (&"Read".into(), &"ok".into()), "{result:#}");
    assert_eq!(call["arguments"]["file_path"].as_str().map(str::trim), Some("chào.txt"));
    let usage = |key: &str| result["usage"][key].as_u64().unwrap();
    assert_eq!(usage("prompt_tokens"), usage("cached_tokens") + usage("prefilled_tokens"));
    assert!(usage("forced_tokens") > 0 && usage("sampled_tokens") > 0 && usage("kv_bytes") > 0, "{result:#}");
    assert!(usage("cached_tokens") > usage("prefilled_tokens") / 2, "the second step finds the first: {result:#}");

    // The next process finds on disk what this one computed of it, and does the same.
    let again = run();
    assert!(usage("restored_tokens") == 0 && again["usage"]["restored_tokens"].as_u64().unwrap() > 200, "{again:#}");
    assert_eq!((&again["answer"], &again["turns"]), (&result["answer"], &result["turns"]));
}

/// Its file shows calls with doubled braces; the other files of the family do not.
#[test]
fn the_default_files_template_is_repaired() {
    let (Some(small), Some(default)) = (model_file(SMALL), model_file(DEFAULT)) else { return };
    let header = |path: &std::path::Path| ChatFormat::open(path, None).unwrap().template.header_tokens().unwrap();
    assert_eq!((header(&small), header(&default)), (77, 77));
}

#[test]
fn model_info_says_what_is_in_the_file() {
    let (Some(small), Some(default)) = (model_file(SMALL), model_file(DEFAULT)) else { return };
    let info = |path: &std::path::Path| {
        let done =
            Command::new(env!("CARGO_BIN_EXE_cob")).args(["model", "info", "--json"]).arg(path).output().unwrap();
        serde_json::from_slice::<Value>(&done.stdout).unwrap()
    };
    let (small, default) = (info(&small), info(&default));
    assert_eq!(small["tensors"], "133 Q5_0, 13 Q8_0, 12 Q4_K, 12 Q6_K, 121 F32");
    assert_eq!(default["tensors"], "169 Q4_K, 29 Q6_K, 141 F32");
    assert_eq!((&small["runs_here"], &default["runs_here"]), (&"yes".into(), &"yes".into()));
    assert_eq!((&small["kv_bytes_a_token"], &default["kv_bytes_a_token"]), (&12288.into(), &28672.into()));
    assert!(
        small.get("chat_template").is_none() && default["chat_template"].as_str().unwrap().contains("doubled braces")
    );
}

/// As `cob tools --file` shows them: copies of one tool add up, and what a run leaves out is not counted.
#[test]
fn a_file_of_tools_costs_what_its_tools_cost() {
    let Some(small) = model_file(SMALL) else { return };
    let golden: Value = serde_json::from_str(include_str!("../data/chat_template.json")).unwrap();
    let cases = golden.as_array().or_else(|| golden["cases"].as_array()).unwrap();
    let tool = cases.iter().find_map(|case| case["tools"].get(0)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let check = |tools: Value, tokens: u64, said: &str| {
        let file = folder.path().join("tools.json");
        std::fs::write(&file, tools.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cob"));
        let done = command.args(["tools", "--json", "--file"]).arg(&file).arg("--model").arg(&small).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        let counted: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}{err}"));
        assert_eq!(counted["total_tokens"], tokens, "{counted}");
        assert!(if said.is_empty() { err.is_empty() } else { err.contains(said) }, "{err}");
    };
    check(serde_json::json!([tool]), 156, "");
    check(serde_json::json!([tool, tool, tool]), 77 + 3 * 79, "there is a tool `search_blog` before it");
    let mut remote = tool.clone();
    let function = if remote.get("function").is_some() { &mut remote["function"] } else { &mut remote };
    function["name"] = "remote".into();
    function["parameters"] = serde_json::json!({"$ref": "https://example.org/s.json"});
    check(serde_json::json!([tool, remote]), 156, "the tool `remote` is left out");
}
