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
    let task = "Read the file chào.txt.";
    let done = Command::new(env!("CARGO_BIN_EXE_cob"))
        .args([
            "run",
            task,
            "--output-format",
            "json",
            "--tool-choice",
            "Read",
            "--offline",
            "--max-turns",
            "6",
            "--model",
        ])
        .arg(&model)
        .current_dir(folder.path())
        .env("XDG_STATE_HOME", folder.path().join("state"))
        .output()
        .unwrap();
    let result: Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| {
        panic!("{e}: {} {}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
    });
    assert_eq!(result["type"], "result");
    let call = &result["tool_calls"][0];
    assert_eq!((&call["name"], &call["outcome"]), (&"Read".into(), &"ok".into()), "{result:#}");
    assert_eq!(call["arguments"]["file_path"].as_str().map(str::trim), Some("chào.txt"));
    let usage = |key: &str| result["usage"][key].as_u64().unwrap();
    assert_eq!(usage("prompt_tokens"), usage("cached_tokens") + usage("prefilled_tokens"));
    assert!(usage("forced_tokens") > 0 && usage("sampled_tokens") > 0 && usage("kv_bytes") > 0, "{result:#}");
    assert!(usage("cached_tokens") > usage("prefilled_tokens") / 2, "the second step finds the first: {result:#}");
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
