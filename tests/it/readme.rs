//! Every command of the README as a user would type it, in a scratch crate, on the real models.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::real::model_file;

const SMALL: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m";
const DEFAULT: &str = "qwen2.5-coder-1.5b-instruct-q4_k_m";

/// The lines of the README's `sh` blocks, without comments.
fn commands() -> Vec<String> {
    let readme = include_str!("../../README.md");
    let blocks = readme.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let lines = blocks.flat_map(str::lines).map(|line| line.split("  #").next().unwrap().trim());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// What the README's commands are about.
fn scratch(folder: &Path) {
    std::fs::create_dir(folder.join("src")).unwrap();
    std::fs::write(folder.join("config.ini"), "[server]\nhost = localhost\nport = 8080\n").unwrap();
    std::fs::write(
        folder.join("Cargo.toml"),
        "[package]\nname = \"scratch\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[workspace]\n",
    )
    .unwrap();
    std::fs::write(
        folder.join("src/lib.rs"),
        "pub fn parse_config(text: &str) -> usize {\n    text.lines().count()\n}\n\n#[test]\nfn counts() {\n    \
         assert_eq!(parse_config(\"a\\nb\"), 2);\n}\n",
    )
    .unwrap();
}

/// Runs one line with this build's `cob`; its standard output. The first command of all has the default model, the others the
/// small one where they name none.
fn run(line: &str, folder: &Path, model: &Path) -> String {
    let bin = Path::new(env!("CARGO_BIN_EXE_cob")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let done = Command::new("sh")
        .args(["-c", line])
        .env("PATH", path)
        .env("COB_MODEL", model)
        .env("XDG_STATE_HOME", folder.join("state"))
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let out = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{line}: {}\n{out}{}", done.status, String::from_utf8_lossy(&done.stderr));
    out
}

#[test]
fn every_command_of_the_readme_runs() {
    let (Some(small), Some(default)) = (model_file(SMALL), model_file(DEFAULT)) else { return };
    let folder = tempfile::tempdir().unwrap();
    scratch(folder.path());
    // The models of this machine, and a folder of our own for kept prefixes.
    std::fs::create_dir_all(folder.path().join("cache/cob")).unwrap();
    std::os::unix::fs::symlink(small.parent().unwrap(), folder.path().join("cache/cob/models")).unwrap();
    let mut ran = 0;
    for line in commands() {
        let from_source = line.strip_prefix("cargo run --release -- ");
        match line.as_str() {
            // That is what runs here.
            "cargo test --release" => continue,
            _ if from_source.is_some() => {
                let out = run(&format!("cob {}", from_source.unwrap()), folder.path(), &default);
                let manifest = std::fs::read_to_string(folder.path().join("Cargo.toml")).unwrap();
                assert!(out.contains(&manifest.lines().count().to_string()), "{line}: {out}");
            }
            _ if line.starts_with("cob ") => {
                let out = run(&line, folder.path(), &small);
                assert!(line == "cob chat" || !out.trim().is_empty(), "{line} printed nothing");
            }
            _ => panic!("no test runs this command of the README: {line}"),
        }
        ran += 1;
    }
    assert!(ran > 5, "the README's commands were not found");
}
