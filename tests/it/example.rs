//! The programs of `examples/` as a user would run them.

use std::path::PathBuf;
use std::process::Command;

use crate::real::model_file;

/// Where cargo puts the examples: beside the program itself.
fn example(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_cob")).parent().unwrap().join("examples").join(name)
}

fn own_tool(arguments: &[&str]) -> String {
    let done = Command::new(example("own_tool")).args(arguments).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

#[test]
fn a_tool_of_your_own_with_a_scripted_model() {
    assert_eq!(own_tool(&[]), "thermometer {\"city\":\"Hanoi\"} → Ok\nAnswer: It is 31 °C in Hanoi.\n");
}

#[test]
fn a_tool_of_your_own_with_the_real_model() {
    let Some(path) = model_file("qwen2.5-coder-0.5b-instruct-q4_k_m") else { return };
    let out = own_tool(&[path.to_str().unwrap(), "How warm is it in Hanoi? Use the tool."]);
    assert!(out.starts_with("thermometer {\"city\":\"Hanoi\"} → Ok\n"), "{out}");
}
