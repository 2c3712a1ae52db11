//! `cob cost` as a user starts it: without a model by the built-in tokenizer, on the real model against the engine's own counts.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::real::model_file;

const SMALL: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m";

fn data(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name).display().to_string()
}

/// A folder for sessions and settings, and where to find a model in it: nowhere, or the given file.
struct Place {
    dir: tempfile::TempDir,
    model: Option<PathBuf>,
}

impl Place {
    fn new(model: Option<PathBuf>) -> Place {
        Place { dir: tempfile::tempdir().unwrap(), model }
    }

    /// Exit code, standard output, standard error.
    fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cob"));
        command.args(arguments).current_dir(self.dir.path());
        for name in ["COB_MODEL", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"] {
            command.env_remove(name);
        }
        command.env("COB_HOME", self.dir.path().join("home")).env("HF_ENDPOINT", "http://127.0.0.1:9");
        if let Some(model) = &self.model {
            command.env("COB_MODEL", model);
        }
        let done = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.code().unwrap_or(-1), text(done.stdout), text(done.stderr))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let (code, out, err) = self.run(arguments);
        let value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{arguments:?}: {e}\n{out}\n{err}"));
        assert!(code <= 1, "{arguments:?}: {code} {err}");
        value
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

/// The row of a table whose first column is `name`.
fn row<'a>(report: &'a Value, table: &str, key: &str, name: &str) -> &'a Value {
    let rows = report[table].as_array().unwrap_or_else(|| panic!("no table {table}: {report:#}"));
    rows.iter().find(|row| row[key] == name).unwrap_or_else(|| panic!("no {name} in {table}: {report:#}"))
}

fn number(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// The segments sum to the prompt, and the last row says so.
fn sum(report: &Value) -> i64 {
    let rows = report["segments"].as_array().unwrap();
    let (last, rows) = rows.split_last().unwrap();
    assert_eq!(last["segment"], "sum");
    let sum: i64 = rows.iter().map(|row| number(&row["tokens"])).sum();
    assert_eq!(sum, number(&last["tokens"]), "{report:#}");
    sum
}

const QUESTION: &str = "Trời Hà Nội có mưa không?";

/// The table of the first seed document, with no model on the machine.
#[test]
fn the_counts_of_the_seed_come_out_without_a_model() {
    let place = Place::new(None);
    let count = |tools: &[&str]| {
        let tools: Vec<String> = tools.iter().map(|name| data(name)).collect();
        let mut arguments = vec!["cost", "tools", "--plain", "--task", QUESTION, "--format", "json"];
        arguments.extend(tools.iter().map(String::as_str));
        place.json(&arguments)
    };
    let search = count(&["search_blog.json"]);
    assert_eq!((number(&search["nth"][0]["prompt_tokens"]), sum(&search)), (37, 37 + 156));
    assert_eq!(number(&row(&search, "segments", "segment", "tool:search_blog")["marginal_tokens"]), 156);
    assert!(search["notes"][0].as_str().unwrap().contains("Qwen2.5 (built in)"), "{search:#}");

    let five = count(&["cost/five.json"]);
    assert_eq!(sum(&five), 37 + 77 + 186);
    let fifty = count(&["cost/fifty.json"]);
    assert_eq!(sum(&fifty), 37 + 9377);
    let nth: Vec<i64> = fifty["nth"].as_array().unwrap()[1..].iter().map(|row| number(&row["added_tokens"])).collect();
    assert_eq!((nth.len(), nth[0]), (50, 77 + 186));
    assert!(nth[1..].iter().all(|&tokens| tokens == 186), "{nth:?}");
    let turns = |cache: &str| number(&row(&fifty, "turns", "cache", cache)["tokens"]);
    assert_eq!(turns("without"), 10 * (37 + 9377));
    let fresh = number(&row(&fifty, "turns", "cache", "with")["tokens_a_turn"]);
    assert_eq!(turns("with"), 37 + 9377 + 9 * fresh);
    assert!(fresh < 37);

    let skills = place.json(&["cost", "skills", "--format", "json", &data("cost/skills")]);
    let skill = row(&skills, "skills", "skill", "new-blog-post");
    assert_eq!((number(&skill["label_tokens"]), number(&skill["line_tokens"])), (44, 45));
    assert!(number(&skill["file_tokens"]) > 200 && number(&skill["references_tokens"]) > 200, "{skill}");
}

/// Formats, and faults: exit code, and what standard error or standard output has.
#[test]
fn what_cannot_be_counted_is_named() {
    let place = Place::new(None);
    let bad = place.write("bad.json", "[{\"name\": 3}]");
    let bytes = place.dir.path().join("bytes.bin");
    std::fs::write(&bytes, [0xff, 0xfe]).unwrap();
    let bytes = bytes.display().to_string();
    let text = place.write("chữ.txt", "Trời hôm nay đẹp\n");
    let five = data("cost/five.json");
    let check = |arguments: &[&str], code: i32, expected: &[&str]| {
        let (found, out, err) = place.run(&[&["cost"], arguments].concat());
        assert_eq!(found, code, "{arguments:?}\n{out}\n{err}");
        let all = format!("{out}{err}");
        for part in expected {
            assert!(all.contains(part), "{arguments:?} has no {part:?}:\n{all}");
        }
        assert!(!all.contains("panicked"), "{all}");
    };
    check(&["tools"], 0, &["tool:Read", "built in", "tools.preamble", "10 turns"]);
    check(&["tools", "--format", "csv", &five], 0, &["# segments\nsegment,tokens,marginal_tokens"]);
    check(&["tools", "--format", "md", &five], 0, &["| segment | tokens |", "| --- | ---: |"]);
    check(&["tools", &bad], 2, &["bad.json", "tool 1"]);
    check(&["tools", "missing.json"], 2, &["missing.json", "cannot be read"]);
    check(&["tools", "--mcp", "github"], 2, &["--mcp github", "no MCP client"]);
    check(&["tools", "--plot", "out.svg", &five], 2, &["--plot", "no model"]);
    check(&["tools", "--model", SMALL], 2, &[SMALL, "cob model pull"]);
    check(&["text", &text, &bytes], 1, &["chữ.txt", "bytes.bin", "not text"]);
    check(&["text", &bytes], 2, &["no file could be read"]);
    check(&["skills", "."], 2, &["SKILL.md"]);
    check(&["skills"], 2, &[".claude/skills"]);
    check(&["session", "nothing"], 2, &["nothing"]);
    check(&["session"], 2, &["<ID>"]);
    check(&["lint", "nothing"], 2, &["nothing"]);
    check(&["tools", "--turns", "0"], 2, &["--turns"]);
}

#[test]
fn two_tool_files_are_compared() {
    let place = Place::new(None);
    let tool = |name: &str, description: &str| {
        json!({"name": name, "description": description,
               "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}})
    };
    let before = place.write("a.json", &json!([tool("a", "one"), tool("b", "two"), tool("c", "three")]).to_string());
    let after = json!([tool("c", "three"), tool("b", "two, and more words than before"), tool("d", "four")]);
    let after = place.write("b.json", &after.to_string());
    let report = place.json(&["cost", "tools", "--compare", &before, &after, "--format", "json", "--turns", "7"]);
    let change = |name: &str| row(&report, "changes", "tool", name)["change"].as_str().unwrap().to_owned();
    assert_eq!(["a", "b", "d", "all"].map(change), ["removed", "changed", "added", "reordered"]);
    let total: i64 = report["changes"].as_array().unwrap().iter().map(|row| number(&row["change_tokens"])).sum();
    let sums = report["sums"].as_array().unwrap();
    let of = |at: usize| number(&sums[at]["change_tokens"]);
    assert_eq!((of(0), of(1), of(2)), (total, 7 * total, total));
    let count = |file: &str| {
        let report = place.json(&["cost", "tools", "--plain", file, "--format", "json"]);
        sum(&report) - number(&report["nth"][0]["prompt_tokens"])
    };
    assert_eq!((number(&sums[0]["before_tokens"]), number(&sums[0]["after_tokens"])), (count(&before), count(&after)));
    let same = place.json(&["cost", "tools", "--compare", &before, &before, "--format", "json"]);
    assert_eq!(row(&same, "changes", "tool", "all")["change"], "none");
}

/// A session in several runs, each with its flags; its id.
fn scripted(place: &Place, runs: &[&[&str]]) -> String {
    let replies: Vec<Value> = runs.iter().enumerate().map(|(n, _)| json!({"text": format!("answer {n}")})).collect();
    let mut id = String::new();
    for (n, flags) in runs.iter().enumerate() {
        let script = format!("scripted:{}", place.write("script.json", &json!([replies[n]]).to_string()));
        let task = format!("task {n}");
        let mut arguments = vec!["run", &task, "--model", &script, "--output-format", "json"];
        arguments.extend(*flags);
        let resume = id.clone();
        if n > 0 {
            arguments.extend(["--resume", &resume]);
        }
        let result = place.json(&arguments);
        assert_eq!(result["stop_reason"], "answer", "{result:#}");
        id = result["session_id"].as_str().unwrap().to_owned();
    }
    id
}

#[test]
fn a_broken_prefix_is_named() {
    let place = Place::new(None);
    let check = |runs: &[&[&str]], code: i32, expected: &[(&str, &str)]| {
        let id = scripted(&place, runs);
        let (found, out, err) = place.run(&["cost", "lint", &id, "--format", "json"]);
        assert_eq!(found, code, "{runs:?}\n{out}\n{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        let breaks = report["breaks"].as_array().unwrap();
        assert_eq!(breaks.len(), usize::from(code != 0), "{report:#}");
        for (key, part) in expected {
            assert!(breaks[0][key].as_str().unwrap().contains(part), "{key} has no {part:?}: {report:#}");
        }
        // Both sides agree on what is common, and something is lost.
        for found in breaks {
            assert!(number(&found["lost_tokens"]) > 0 && number(&found["turn"]) == 2, "{report:#}");
        }
    };
    check(&[&["--tools", "Read,LS"], &[], &[]], 0, &[]);
    let clock: &[(&str, &str)] =
        &[("segment_before", "system"), ("segment_after", "system"), ("text_before", "10:31"), ("text_after", "10:32")];
    check(
        &[
            &["--tools", "none", "--system", "The time is 10:31. Bạn là cob."],
            &["--system", "The time is 10:32. Bạn là cob."],
        ],
        1,
        clock,
    );
    // The built-in tools keep their order whatever --tools says; those of a file stand as they do there.
    check(&[&["--tools", "Read,LS", "--system", "x"], &["--tools", "LS,Read", "--system", "x"]], 0, &[]);
    let tool =
        |name: &str| json!({"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}});
    let [ab, ba] = [["first", "second"], ["second", "first"]]
        .map(|names| place.write(&format!("{}.json", names[0]), &json!(names.map(tool)).to_string()));
    let reordered: &[(&str, &str)] =
        &[("segment_before", "tool:first"), ("segment_after", "tool:second"), ("text_after", "second")];
    let offered = |file| ["--tools", "none", "--system", "x", "--tool-file", file];
    check(&[&offered(&ab), &offered(&ba)], 1, reordered);
}

/// Against the engine's own counts: the built-in tools, a file of 50, a finished session.
#[test]
fn the_sums_are_the_engines() {
    let Some(model) = model_file(SMALL) else { return };
    let place = Place::new(Some(model));
    place.write("chào.txt", "một\nhai\nba\n");
    let first_prompt = |arguments: &[&str]| {
        let (_, out, err) = place.run(&[arguments, &["--max-turns", "1", "--output-format", "stream-json"]].concat());
        let events = out.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let usage = events.filter_map(|event| event["usage"]["prompt_tokens"].as_i64()).next();
        usage.unwrap_or_else(|| panic!("no usage: {out}\n{err}"))
    };
    let fifty = data("cost/fifty.json");
    let counted = |extra: &[&str]| {
        sum(&place.json(&[&["cost", "tools", "--no-time", "--format", "json", "--task", QUESTION], extra].concat()))
    };
    let seed: &[&str] = &["--seed", "1", "--max-output-tokens", "8"];
    assert_eq!(counted(&[]), first_prompt(&[&["run", QUESTION], seed].concat()));
    assert_eq!(
        counted(&[&fifty]),
        first_prompt(&[&["run", QUESTION, "--tools", "none", "--tool-file", &fifty], seed].concat())
    );

    let result = place.json(&[
        "run",
        "Read the file chào.txt.",
        "--tool-choice",
        "Read",
        "--seed",
        "1",
        "--max-turns",
        "6",
        "--output-format",
        "json",
    ]);
    let id = result["session_id"].as_str().unwrap();
    let (code, out, err) = place.run(&["cost", "session", id, "--format", "json"]);
    assert_eq!(code, 0, "{out}\n{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let turns = report["turns"].as_array().unwrap();
    assert!(turns.len() >= 3, "{report:#}");
    for turn in turns {
        assert_eq!(turn["prompt_tokens"], turn["logged_tokens"], "{report:#}");
    }
    let total = &turns[turns.len() - 1];
    assert_eq!(total["prompt_tokens"], result["usage"]["prompt_tokens"], "{report:#}");
    assert_eq!(total["prefilled_tokens"], result["usage"]["prefilled_tokens"], "{report:#}");
    assert_eq!(sum(&report), number(&turns[turns.len() - 2]["prompt_tokens"]), "{report:#}");
    // Measured now: cold takes longer than with the prefix in memory or on disk.
    let read = &report["prefill"][0];
    let ms = |key: &str| read[key].as_f64().unwrap_or_else(|| panic!("no {key}: {report:#}"));
    assert!(ms("cold_ms") > ms("cached_ms") && ms("cold_ms") > ms("disk_ms"), "{report:#}");

    let (code, out, err) = place.run(&["cost", "lint", id, "--no-time"]);
    assert_eq!(code, 0, "{out}\n{err}");
    let both = place.json(&["cost", "session", "--compare", id, id, "--format", "json"]);
    assert!(both["turns"].as_array().unwrap().iter().all(|row| row["change_tokens"] == 0), "{both:#}");

    // The chart, of the smallest file that has several points.
    let svg = place.dir.path().join("out.svg");
    let (code, out, err) =
        place.run(&["cost", "tools", "--plain", &data("cost/five.json"), "--plot", svg.to_str().unwrap()]);
    assert_eq!(code, 0, "{out}\n{err}");
    assert!(std::fs::read_to_string(&svg).unwrap().contains("from disk"));
}

/// Every command of `docs/cost.md`, on files of this repository.
#[test]
fn the_commands_of_the_document_run() {
    let text = include_str!("../../docs/cost.md");
    let Some(model) = model_file(SMALL) else { return };
    let place = Place::new(Some(model));
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let mut ran = 0;
    for line in blocks.flat_map(str::lines).filter(|line| !line.trim().is_empty()) {
        // What takes minutes is counted only.
        let line = line.split("  #").next().unwrap().trim();
        let Some(arguments) = line.strip_prefix("cob ") else { panic!("no test runs this: {line}") };
        if line.contains("SESSION") {
            continue;
        }
        let slow = ["fifty", "--plot"].iter().any(|part| line.contains(part));
        let arguments = arguments.replace(" --plot tools.svg", "").replace("tests/data", &data(""));
        let bin = env!("CARGO_BIN_EXE_cob");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{bin} {arguments}{}", if slow { " --no-time" } else { "" })]);
        command.env("COB_HOME", place.dir.path().join("home")).env("COB_MODEL", place.model.as_ref().unwrap());
        let done = command.current_dir(root).output().unwrap();
        assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
        ran += 1;
    }
    assert!(ran >= 4, "{ran} commands");
}
