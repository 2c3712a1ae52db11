//! The dependency arrows and the invariants that a reader of the source can check.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What each room may use besides `message`: the picture in `lib.rs`, arrows followed to their ends.
fn arrows() -> BTreeMap<&'static str, Vec<&'static str>> {
    let model = vec![];
    let engine = vec!["model"];
    let chat = vec!["engine", "model"];
    let process = vec![];
    let permission = vec![];
    let hub = vec!["process"];
    let tools = vec!["permission", "process"];
    let session = vec!["chat"];
    let context = vec!["session"];
    let measure = vec!["context", "session", "chat", "engine"];
    let agent = vec!["context", "session", "tools", "permission", "process", "chat"];
    let cli = vec![
        "agent",
        "chat",
        "config",
        "context",
        "engine",
        "hub",
        "measure",
        "model",
        "permission",
        "process",
        "session",
        "tools",
    ];
    let config = vec!["agent", "chat", "engine", "hub", "model", "permission", "session", "tools"];
    BTreeMap::from([
        ("model", model),
        ("engine", engine),
        ("chat", chat),
        ("process", process),
        ("permission", permission),
        ("hub", hub),
        ("tools", tools),
        ("session", session),
        ("context", context),
        ("measure", measure),
        ("agent", agent),
        ("cli", cli),
        ("config", config),
        ("message", vec![]),
    ])
}

fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// (room, path below `src`, text) of every file; the room of `src/x/y.rs` and of `src/x.rs` is `x`.
fn rooms() -> Vec<(String, String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    files.sort();
    let file = |path: &PathBuf| {
        let below = path.strip_prefix(&src).unwrap();
        let room = below.components().next().unwrap().as_os_str().to_string_lossy().replace(".rs", "");
        (room, below.display().to_string(), std::fs::read_to_string(path).unwrap())
    };
    files.iter().map(file).collect()
}

/// The file without its unit tests, which may do as they like.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests").next().unwrap()
}

/// A file of tests alone.
fn is_tests(path: &str) -> bool {
    path.ends_with("tests.rs")
}

/// Lines of code, comments left out.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(i, line)| (i + 1, line)).filter(|(_, line)| !line.trim_start().starts_with("//"))
}

/// The rooms that a line names with `crate::`, `use crate::{a::…, b}` included.
fn used_rooms(line: &str) -> Vec<String> {
    let mut out = Vec::new();
    for rest in line.split("crate::").skip(1) {
        let names = match rest.strip_prefix('{') {
            Some(list) => list.split(',').collect(),
            None => vec![rest],
        };
        for name in names {
            let name: String = name.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if name.chars().next().is_some_and(char::is_lowercase) {
                out.push(name);
            }
        }
    }
    out
}

#[test]
fn dependencies_point_down() {
    let arrows = arrows();
    let mut faults = Vec::new();
    for (room, path, text) in rooms() {
        if room == "main" || room == "lib" || is_tests(&path) {
            continue;
        }
        let Some(allowed) = arrows.get(room.as_str()) else {
            faults.push(format!("{path}: the room `{room}` is not on the map; add it to lib.rs and to this test"));
            continue;
        };
        for (n, line) in code(without_tests(&text)) {
            for used in used_rooms(line) {
                let known = arrows.contains_key(used.as_str());
                if known && used != room && used != "message" && !allowed.contains(&used.as_str()) {
                    faults.push(format!("{path}:{n}: `{room}` uses `{used}`"));
                }
            }
        }
    }
    assert!(faults.is_empty(), "arrows that are not in the picture:\n{}", faults.join("\n"));
}

/// (what, where it may stand, the words that give it away)
const ABSENCES: [(&str, &[&str], &[&str]); 4] = [
    ("only `process` starts children", &["process"], &["Command::new("]),
    ("only front ends print", &["cli", "main"], &["println!(", "print!("]),
    ("only `model` (and who opens one) knows candle", &["model", "cli"], &["candle_core::", "candle_nn::"]),
    ("only `chat` knows the control tokens", &["chat"], &["\"<|im_end|>", "\"<tool_call>"]),
];

#[test]
fn what_must_be_absent_is() {
    let mut faults = Vec::new();
    for (room, path, text) in rooms() {
        for (what, rooms, words) in ABSENCES {
            if rooms.contains(&room.as_str()) || is_tests(&path) {
                continue;
            }
            for (n, line) in code(without_tests(&text)) {
                if words.iter().any(|word| line.contains(word)) {
                    faults.push(format!("{path}:{n}: {what}: {}", line.trim()));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_map_names_every_room() {
    let lib = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    for (room, _, _) in rooms() {
        let named = room == "lib"
            || room == "main"
            || lib.lines().any(|l| l.starts_with("//!") && l.contains(&format!("[`{room}`]")));
        assert!(named, "lib.rs's map says nothing of `{room}`");
    }
}

#[test]
fn the_arrow_reader_sees_what_it_should() {
    assert_eq!(used_rooms("use crate::message::Message;"), ["message"]);
    assert_eq!(used_rooms("use crate::{chat, engine::Mask};"), ["chat", "engine"]);
    assert_eq!(used_rooms("let x = crate::tools::validate(y);"), ["tools"]);
    assert_eq!(used_rooms("use std::fmt;"), Vec::<String>::new());
}
