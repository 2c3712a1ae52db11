//! The program itself, with a scripted model: output, exit codes, signals, crashes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A home and a workspace of its own.
struct Home {
    dir: tempfile::TempDir,
}

impl Home {
    fn new() -> Home {
        let home = Home { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(home.work()).unwrap();
        fs::write(home.work().join("notes.txt"), "một\nhai\nba\n").unwrap();
        home
    }

    fn work(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    fn sessions(&self) -> PathBuf {
        self.dir.path().join("home/sessions")
    }

    /// Writes what the model will say; the value for `--model`.
    fn script(&self, replies: Value) -> String {
        let number = fs::read_dir(self.dir.path()).unwrap().count();
        let path = self.dir.path().join(format!("script-{number}.json"));
        fs::write(&path, replies.to_string()).unwrap();
        format!("scripted:{}", path.display())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if ["COB_", "HF_", "XDG_"].iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        let home = self.dir.path().join("home");
        command.env("COB_HOME", home).env("HOME", self.dir.path()).env("HF_ENDPOINT", "http://127.0.0.1:9");
        command.current_dir(self.work()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn cob(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(env!("CARGO_BIN_EXE_cob"));
        command.args(arguments);
        command
    }

    fn ran(&self, arguments: &[&str]) -> Ran {
        Ran::from(self.cob(arguments).output().unwrap())
    }
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Ran {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }

    /// The events of `stream-json`; `init` is the first, `result` the last, and neither comes twice.
    fn events(&self) -> Vec<Value> {
        let events: Vec<Value> = self.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).count();
        assert_eq!((of("init"), of("result")), (1, 1), "{}{}", self.out, self.err);
        assert_eq!((&events[0]["type"], &events[events.len() - 1]["type"]), (&json!("init"), &json!("result")));
        events
    }

    fn result(&self) -> Value {
        self.events().pop().unwrap()
    }
}

fn call(name: &str, arguments: Value) -> Value {
    json!({"calls": [{"name": name, "arguments": arguments}]})
}

fn read_notes() -> Value {
    call("Read", json!({"file_path": "notes.txt"}))
}

#[test]
fn the_answer_goes_to_standard_output_and_the_rest_to_standard_error() {
    let home = Home::new();
    let model = home.script(json!([read_notes(), {"text": "Nó có 3 dòng."}]));
    let ran = home.ran(&["run", "--model", &model, "How many lines?"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "Nó có 3 dòng.\n"), "{}", ran.err);
    assert!(ran.err.contains("● Read notes.txt → notes.txt has 3 lines …"), "{}", ran.err);
    let last = ran.err.lines().last().unwrap();
    assert!(last.starts_with("2 turns · ") && last.contains(" s · session "), "{last}");
    assert!(!ran.err.contains('\x1b'), "no colour where there is no terminal");
    let model = home.script(json!([read_notes(), {"text": "3"}]));
    let ran = home.ran(&["run", "--quiet", "--model", &model, "How many lines?"]);
    assert_eq!((ran.out.as_str(), ran.err.as_str()), ("3\n", ""));
}

#[test]
fn json_is_one_object() {
    let home = Home::new();
    let model = home.script(json!([
        {"calls": [{"name": "Read", "arguments": {"file_path": "notes.txt"}, "rescued": true},
                   {"name": "Write", "arguments": {"file_path": "new.txt", "content": "x"}}]},
        {"text": "done"},
    ]));
    let ran = home.ran(&["run", "--output-format", "json", "--model", &model, "go"]);
    let result = ran.json();
    assert_eq!((ran.code, &result["type"], &result["stop_reason"]), (Some(0), &json!("result"), &json!("answer")));
    assert_eq!((&result["answer"], &result["turns"], &result["error"]), (&json!("done"), &json!(2), &Value::Null));
    assert_eq!(result["model"], "scripted");
    let calls = &result["tool_calls"];
    assert_eq!(
        calls[0],
        json!({"id": "call_0", "name": "Read", "arguments": {"file_path": "notes.txt"}, "outcome": "ok", "rescued": true})
    );
    assert_eq!((&calls[1]["outcome"], &calls[1]["id"]), (&json!("refused"), &json!("call_1")));
    assert_eq!(
        (&result["refusals"][0]["call_id"], &result["refusals"][0]["name"]),
        (&json!("call_1"), &json!("Write"))
    );
    assert!(result["usage"]["prompt_tokens"].as_u64().unwrap() > 0);
    assert!(!home.work().join("new.txt").exists());
    let model = home.script(json!([call("Write", json!({"file_path": "new.txt", "content": "x"})), {"text": "done"}]));
    let ran = home.ran(&["run", "--allow", "Edit", "--output-format", "json", "--model", &model, "go"]);
    assert_eq!(ran.json()["tool_calls"][0]["outcome"], "ok", "{}", ran.out);
    assert_eq!(fs::read_to_string(home.work().join("new.txt")).unwrap(), "x");
}

#[test]
fn a_stream_begins_with_init_and_ends_with_one_result() {
    let home = Home::new();
    let model = home.script(json!([read_notes(), read_notes(), {"text": "3"}]));
    let ran = home.ran(&["run", "--output-format", "stream-json", "--model", &model, "How many?"]);
    let events = ran.events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected =
        "init call_opened assistant tool_started tool_finished call_opened repeat_guarded text assistant result";
    assert_eq!(kinds.join(" "), expected);
    let init = &events[0];
    assert_eq!((&init["model"]["id"], &init["resumed"]), (&json!("scripted"), &json!(false)));
    assert!(init["tools"].as_array().unwrap().contains(&json!("Bash")));
    assert!(init["sampling"]["seed"].as_u64().unwrap() < 1 << 53);
    assert_eq!(init["session_id"], events[9]["session_id"]);
}

/// Whatever goes wrong, the stream is whole, and the exit code and the reason agree.
#[test]
fn every_failure_ends_in_a_result_and_its_exit_code() {
    let home = Home::new();
    let check = |script: Value, flags: &[&str], code: i32, reason: &str, error: &str| {
        let model = home.script(script);
        let fixed = ["run", "--output-format", "stream-json", "--model", &model, "go"];
        let arguments: Vec<&str> = fixed.iter().chain(flags).copied().collect();
        let ran = home.ran(&arguments);
        let result = ran.result();
        assert_eq!((ran.code, result["stop_reason"].as_str()), (Some(code), Some(reason)), "{flags:?}: {}", ran.err);
        let said = result["error"].as_str().unwrap_or_default();
        assert!(said.contains(error) && ran.err.contains(error), "{flags:?}: {said:?} {:?}", ran.err);
    };
    let fine = || json!([{"text": "a"}]);
    check(fine(), &[], 0, "answer", "");
    check(json!([{"failure": "no memory left"}]), &[], 1, "failed", "no memory left");
    check(json!([{"panic": "shape mismatch"}]), &[], 1, "failed", "the model panicked: shape mismatch");
    check(json!([{"text": "half", "cut": true}]), &[], 3, "max_output_tokens", "--max-output-tokens");
    check(json!([read_notes()]), &["--max-turns", "1"], 3, "max_turns", "--max-turns");
    let failing = call("Read", json!({"file_path": "missing"}));
    check(json!([failing, failing]), &["--max-repeats", "2", "--no-guard"], 3, "max_repeats", "2 times in a row");
    check(json!([{"delay_ms": 600_000}]), &["--timeout", "0.05"], 3, "timeout", "--timeout");
    check(fine(), &["--max-output-tokens", "40000"], 4, "context_overflow", "reserved output");
    check(fine(), &["--max-output-tokens", &usize::MAX.to_string()], 4, "context_overflow", "reserved output");
    check(fine(), &["--resume", "../x"], 2, "refused", "cannot be a session id");
    check(fine(), &["--resume", "20200101-000000-aaaa"], 2, "refused", "there is no session");
    check(fine(), &["--cwd", "missing"], 2, "refused", "cannot work in missing");
    check(fine(), &["--allow", "Bash("], 2, "refused", "--allow");
    check(fine(), &["--tools", "Read,Reed"], 2, "refused", "Reed");
    check(fine(), &["--tool-choice", "Reed"], 2, "refused", "there is no tool `Reed`");
    check(fine(), &["--tools", "none", "--tool-choice", "required"], 2, "refused", "none is offered");
    check(fine(), &["--tool-file", "missing.json"], 2, "refused", "the tool file missing.json");
    check(json!([{"txet": 1}]), &[], 2, "refused", "unknown field `txet`");
    // No model, and nothing may be fetched.
    let ran = home.ran(&["run", "--offline", "--output-format", "stream-json", "go"]);
    assert_eq!((ran.code, ran.result()["stop_reason"].as_str()), (Some(4), Some("refused")), "{}", ran.err);
    let ran = home.ran(&["run", "--output-format", "stream-json", "--model", "no-such-model", "go"]);
    assert_eq!((ran.code, ran.result()["session_id"].clone()), (Some(2), Value::Null), "{}", ran.err);
    // Nothing of this left a session without events.
    let list = home.ran(&["session", "list", "--json"]).json();
    assert!(list.as_array().unwrap().iter().all(|session| session["problem"].is_null()), "{list}");
}

#[test]
fn usage_errors_are_two() {
    let home = Home::new();
    let check = |arguments: &[&str], expected: &str| {
        let ran = home.ran(arguments);
        assert_eq!(ran.code, Some(2), "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(expected) && ran.out.is_empty(), "{arguments:?}: {}", ran.err);
    };
    check(&["run", "--max-turns", "0", "x"], "a whole number from 1 on is needed");
    check(&["run", "--temperature=-1", "x"], "a number from 0 to 100 is needed");
    check(&["run", "--temperature", "NaN", "x"], "a number from 0 to 100 is needed");
    check(&["run", "--top-p", "1.5", "x"], "a number from 0 to 1 is needed");
    check(&["run", "--timeout", "0", "x"], "a number of seconds above 0 is needed");
    check(&["run", "--timeout", "1e300", "x"], "a number of seconds above 0 is needed");
    check(&["run", "--device", "tpu", "x"], "possible values");
    check(&["run", "--model", "", "x"], "--model");
    check(&["model", "info", ""], "ID|FILE");
    check(&["run", "--threads", "0", "x"], "a whole number from 1 on is needed");
    check(&["run", "--threads", "100000", "x"], "more threads than cores");
    check(&["run", "--permission-mode", "yolo", "x"], "there is no permission mode");
    check(&["run", "--output-format", "xml", "x"], "stream-json");
    check(&["run", "--allow", "Bsh(x)", "x", "--model", "scripted:x"], "there is no tool `Bsh`");
    check(&["run", "--allow", "Edit,Write", "x", "--model", "scripted:x"], "one rule a flag");
    check(&["run", "  "], "the task is empty");
    check(&["run"], "the task is empty");
    check(&["flee"], "unrecognized subcommand");
    check(&["session", "show", "a/b"], "cannot be a session id");
    check(&["session", "rm", "20200101-000000-aaaa"], "there is no session");
}

#[test]
fn a_task_can_come_from_standard_input() {
    let home = Home::new();
    let check = |arguments: &[&str]| {
        let model = home.script(json!([{"text": "ok"}]));
        let mut child =
            home.cob(&["run", "--quiet", "--model", &model]).args(arguments).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all("Trời Hà Nội\ncó mưa không?\n".as_bytes()).unwrap();
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "ok\n"), "{}", ran.err);
    };
    check(&[]);
    check(&["-"]);
    let list = home.ran(&["session", "list", "--json"]).json();
    assert_eq!(list[1]["task"], "Trời Hà Nội\ncó mưa không?");
    // With a task besides, it is not read, and that is said.
    let model = home.script(json!([{"text": "ok"}]));
    let mut child = home.cob(&["run", "Do it.", "--model", &model]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"more\n").unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert!(ran.code == Some(0) && ran.err.contains("standard input is not read"), "{}", ran.err);
    assert!(!home.ran(&["run", "Do it.", "--model", &model]).err.contains("standard input is not read"));
}

#[test]
fn offered_tools_have_no_results() {
    let home = Home::new();
    let file = home.dir.path().join("tools.json");
    let schema = json!({"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]});
    fs::write(
        &file,
        json!({"tools": [{"name": "search_blog", "description": "d", "inputSchema": schema}]}).to_string(),
    )
    .unwrap();
    let model = home.script(json!([call("search_blog", json!({"q": "x"})), {"text": "I would search."}]));
    let file = file.display().to_string();
    let ran = home.ran(&[
        "run",
        "--tools",
        "none",
        "--tool-file",
        &file,
        "--output-format",
        "stream-json",
        "--model",
        &model,
        "go",
    ]);
    let events = ran.events();
    assert_eq!(events[0]["tools"], json!(["search_blog"]));
    let finished = events.iter().find(|event| event["type"] == "tool_finished").unwrap();
    assert!(finished["text"].as_str().unwrap().contains("nothing stands behind it in this run"), "{finished}");
    assert_eq!(ran.code, Some(0));
}

#[test]
fn sessions_can_be_listed_shown_and_removed() {
    let home = Home::new();
    assert_eq!(home.ran(&["session", "list"]).out, "");
    let model = home.script(json!([read_notes(), {"text": "3"}]));
    home.ran(&["run", "--model", &model, "--system", "be brief", "How many lines?"]);
    let list = home.ran(&["session", "list", "--json"]).json();
    let id = list[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(
        (&list[0]["stop_reason"], &list[0]["turns"], &list[0]["calls"]),
        (&json!("answer"), &json!(2), &json!(1))
    );
    let text = home.ran(&["session", "list"]).out;
    assert!(text.contains(&id) && text.contains("2 turns, 1 call  answer  scripted  How many lines?"), "{text}");
    let shown = home.ran(&["session", "show", &id]).out;
    for part in ["user  How many lines?", "→ Read notes.txt", "result  call_0 Read", "end  answer"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let path = home.ran(&["session", "path", &id]).out;
    let raw = home.ran(&["session", "show", &id, "--json"]).out;
    assert_eq!(fs::read_to_string(path.trim()).unwrap(), raw);
    assert_eq!(home.ran(&["session", "rm", &id]).out, format!("removed {id}\n"));
    assert!(!Path::new(path.trim()).exists());
    assert_eq!(home.ran(&["session", "path", &id]).code, Some(2));
}

#[test]
fn a_session_goes_on_with_its_folder_system_prompt_and_seed() {
    let home = Home::new();
    let model = home.script(json!([{"text": "a"}]));
    home.ran(&["run", "--model", &model, "--system", "be brief", "--seed", "7", "--temperature", "0.5", "one"]);
    let id = home.ran(&["session", "list", "--json"]).json()[0]["id"].as_str().unwrap().to_owned();
    let model = home.script(json!([read_notes(), {"text": "b"}]));
    let mut command = home.cob(&["run", "--model", &model, "--resume", &id, "--output-format", "stream-json", "two"]);
    let ran = Ran::from(command.current_dir("/").output().unwrap());
    let events = ran.events();
    assert_eq!((&events[0]["session_id"], &events[0]["resumed"]), (&json!(id), &json!(true)));
    assert_eq!((&events[0]["sampling"]["seed"], &events[0]["sampling"]["temperature"]), (&json!(7), &json!(0.5)));
    assert_eq!(ran.result()["tool_calls"][0]["outcome"], "ok", "{}", ran.out);
    let raw = home.ran(&["session", "show", &id, "--json"]).out;
    let resumed =
        raw.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).find(|e| e["type"] == "resumed").unwrap();
    assert_eq!(resumed["system"], "be brief");
    // With its task done there is nothing to go on with.
    let ran = home.ran(&["run", "--model", &model, "--resume", &id]);
    assert_eq!(ran.code, Some(4));
    assert!(ran.err.contains("nothing left to do"), "{}", ran.err);
    // And it stays what it was.
    assert_eq!(home.ran(&["session", "list", "--json"]).json()[0]["stop_reason"], "answer");
    assert_eq!(home.ran(&["session", "show", &id, "--json"]).out, raw);
}

/// The newest of the folder, or a part of an id: what a person types.
#[test]
fn a_session_is_found_by_its_folder_and_by_a_part_of_its_id() {
    let home = Home::new();
    let say = |text: &str| home.script(json!([{"text": text}]));
    let ids = || -> Vec<String> {
        let list = home.ran(&["session", "list", "--json"]).json();
        list.as_array().unwrap().iter().map(|session| session["id"].as_str().unwrap().to_owned()).collect()
    };
    let none = home.ran(&["run", "-m", &say("a"), "-c", "more"]);
    assert!(none.code == Some(2) && none.err.contains("no session works in"), "{}", none.err);
    home.ran(&["run", "-m", &say("a"), "one"]);
    let [first] = ids().try_into().unwrap();
    let mut elsewhere = home.cob(&["run", "-m", &say("a"), "two"]);
    assert_eq!(elsewhere.current_dir(home.dir.path()).output().unwrap().status.code(), Some(0));
    let second = ids().into_iter().find(|id| *id != first).unwrap();

    let ran = home.ran(&["run", "-m", &say("b"), "-c", "--output-format", "json", "more"]);
    assert_eq!(ran.json()["session_id"], json!(first), "the newest is of another folder");
    let (_, end) = first.rsplit_once('-').unwrap();
    let ran = home.ran(&["run", "-m", &say("c"), "-r", end, "--output-format", "json", "more"]);
    assert_eq!(ran.json()["session_id"], json!(first));
    assert_eq!(home.ran(&["session", "path", end]).out, home.ran(&["session", "path", &first]).out);

    let both = home.ran(&["session", "show", &first[..8]]);
    assert!(both.code == Some(2) && both.err.contains("fits 2 sessions"), "{}", both.err);
    let neither = home.ran(&["session", "rm", "zzzzz"]);
    assert!(neither.code == Some(2) && neither.err.contains("there is no session"), "{}", neither.err);
    assert_eq!(home.ran(&["run", "-c", "-r", &second, "more"]).code, Some(2));
    let (_, end) = second.rsplit_once('-').unwrap();
    assert_eq!(home.ran(&["session", "rm", end]).out, format!("removed {second}\n"));
    assert_eq!(ids(), [first]);
}

#[test]
fn kept_prefixes_can_be_listed_verified_and_cleared() {
    let home = Home::new();
    let none = home.ran(&["cache", "list"]);
    assert!(none.code == Some(0) && none.out.starts_with("0 kept prefixes"), "{}{}", none.out, none.err);
    assert_eq!(home.ran(&["cache", "verify"]).code, Some(0));
    assert_eq!(home.ran(&["cache", "clear", "--json"]).json(), json!({"removed": 0, "bytes": 0}));
    let folder = home.dir.path().join("home/kv");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("0123456789abcdef-0123456789abcdef.kv"), "junk").unwrap();
    fs::write(folder.join("of-somebody-else.txt"), "stays").unwrap();
    let list = home.ran(&["cache", "list", "--json"]).json();
    assert_eq!((list["prefixes"].as_array().unwrap().len(), list["unusable"].as_array().unwrap().len()), (0, 1));
    let ran = home.ran(&["cache", "verify"]);
    assert!(ran.code == Some(1) && ran.out.contains("WRONG: it is damaged"), "{}", ran.out);
    assert_eq!(home.ran(&["cache", "clear"]).out, "removed 1 of the kept prefixes (4 B)\n");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

/// A run that is under way: its first line has been read.
struct Live {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
    id: String,
    read: String,
}

impl Live {
    fn start(home: &Home, model: &str, flags: &[&str]) -> Live {
        let mut command = home.cob(&["run", "--output-format", "stream-json", "--model", model]);
        Live::of(command.args(flags).arg("go"))
    }

    fn of(command: &mut Command) -> Live {
        // The tests themselves may run under `nohup`.
        // SAFETY: signal may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGHUP, libc::SIG_DFL);
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut read = String::new();
        lines.read_line(&mut read).unwrap();
        let init: Value = serde_json::from_str(&read).unwrap();
        Live { child, lines, id: init["session_id"].as_str().unwrap().to_owned(), read }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill has no memory effects; the child has not been waited for, so its id is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn wait_for(&mut self, kind: &str) {
        while !self.read.lines().last().unwrap_or_default().contains(&format!("\"type\":\"{kind}\"")) {
            assert_ne!(self.lines.read_line(&mut self.read).unwrap(), 0, "no {kind}: {}", self.read);
        }
    }

    fn end(mut self) -> Ran {
        self.lines.read_to_string(&mut self.read).unwrap();
        let output = self.child.wait_with_output().unwrap();
        Ran { code: output.status.code(), out: self.read, err: String::from_utf8(output.stderr).unwrap() }
    }
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_signal_stops_the_model_at_once_and_the_session_resumes() {
    let home = Home::new();
    for (signal, code, reason) in
        [(libc::SIGINT, 130, "interrupted"), (libc::SIGTERM, 143, "terminated"), (libc::SIGHUP, 143, "terminated")]
    {
        let model = home.script(json!([{"delay_ms": 600_000}]));
        let live = Live::start(&home, &model, &[]);
        let id = live.id.clone();
        let begin = Instant::now();
        live.signal(signal);
        let ran = live.end();
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        assert_eq!((ran.code, ran.result()["stop_reason"].as_str()), (Some(code), Some(reason)), "{}", ran.err);
        let model = home.script(json!([{"text": "late"}]));
        let ran = home.ran(&["run", "--quiet", "--model", &model, "--resume", &id]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "late\n"), "{}", ran.err);
    }
}

#[test]
fn a_hangup_is_ignored_under_nohup() {
    let home = Home::new();
    let model = home.script(json!([{"delay_ms": 400, "text": "done"}]));
    let mut command = home.command("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_cob")]);
    let live = Live::of(command.args(["run", "--output-format", "stream-json", "--model", &model, "go"]));
    live.signal(libc::SIGHUP);
    assert_eq!(live.end().result()["answer"], "done");
}

#[test]
fn signals_kill_the_children_of_a_tool() {
    let home = Home::new();
    let check = |line: &str, signals: &[i32], code: i32| {
        let file = home.work().join("pid");
        let _ = fs::remove_file(&file);
        let model = home.script(json!([call("Bash", json!({"command": line}))]));
        let mut live = Live::start(&home, &model, &["--allow", "Bash"]);
        live.wait_for("tool_started");
        wait_until("the command begins", || fs::read_to_string(&file).is_ok_and(|text| text.ends_with('\n')));
        let pid: i32 = fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        let begin = Instant::now();
        for signal in signals {
            live.signal(*signal);
            std::thread::sleep(Duration::from_millis(50));
        }
        let ran = live.end();
        assert!(begin.elapsed() < Duration::from_secs(2), "{line}: {:?}", begin.elapsed());
        let outcome = &ran.result()["tool_calls"][0]["outcome"];
        assert_eq!((ran.code, outcome), (Some(code), &json!("interrupted")), "{line}: {}", ran.err);
        // SAFETY: signal 0 only asks whether the process is there.
        wait_until("the command is gone", || unsafe { libc::kill(pid, 0) } != 0);
    };
    let deaf = "trap '' INT TERM HUP; echo $$ > pid; while :; do sleep 1; done";
    check("echo $$ > pid; sleep 600", &[libc::SIGINT], 130);
    check("echo $$ > pid; sleep 600", &[libc::SIGHUP], 143);
    check(deaf, &[libc::SIGTERM], 143);
    check(deaf, &[libc::SIGINT, libc::SIGINT], 130);
    check(deaf, &[libc::SIGTERM, libc::SIGTERM], 143);
    check(deaf, &[libc::SIGINT, libc::SIGINT, libc::SIGINT], 130);
}

#[test]
fn kill_nine_inside_a_tool_leaves_a_session_that_does_not_run_it_twice() {
    let home = Home::new();
    let model = home.script(json!([call("Bash", json!({"command": "echo x >> log; sleep 600"}))]));
    let live = Live::start(&home, &model, &["--allow", "Bash"]);
    let log = home.work().join("log");
    wait_until("the command has appended", || log.exists() && fs::read(&log).unwrap() == b"x\n");
    let id = live.id.clone();
    live.signal(libc::SIGKILL);
    assert_eq!(live.end().code, None);
    let model = home.script(json!([{"text": "I looked."}]));
    let ran = home.ran(&["run", "--output-format", "stream-json", "--model", &model, "--resume", &id]);
    assert_eq!((ran.code, ran.result()["answer"].as_str()), (Some(0), Some("I looked.")), "{}", ran.err);
    let note = ran.events().into_iter().find(|event| event["type"] == "note").unwrap();
    assert!(note["text"].as_str().unwrap().contains("Bash (call_0) was interrupted and may have run"), "{note}");
    let raw = home.ran(&["session", "show", &id, "--json"]).out;
    assert!(raw.contains("interrupted, may have run"), "{raw}");
    assert_eq!(fs::read(&log).unwrap(), b"x\n");
}

#[test]
fn a_second_process_on_a_live_session_is_refused() {
    let home = Home::new();
    let model = home.script(json!([{"delay_ms": 600_000}]));
    let live = Live::start(&home, &model, &[]);
    let second = home.ran(&["run", "--output-format", "stream-json", "--model", &model, "--resume", &live.id, "more"]);
    assert_eq!((second.code, second.result()["stop_reason"].as_str()), (Some(4), Some("refused")), "{}", second.err);
    assert!(second.err.contains("is open in another process"), "{}", second.err);
    assert_eq!(home.ran(&["session", "rm", &live.id]).code, Some(4));
    assert!(home.ran(&["session", "list"]).out.contains("in use"));
    live.signal(libc::SIGTERM);
    live.end();
}

/// A limit on the size of files plays the full disk.
#[test]
fn a_log_that_cannot_be_written_ends_the_run_before_the_tool() {
    let home = Home::new();
    let content = "x".repeat(200_000);
    let write = call("Write", json!({"file_path": "big.txt", "content": content}));
    let model = home.script(json!([write, {"text": "done"}]));
    let mut command = home.command("sh");
    command.args(["-c", "ulimit -f 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_cob")]);
    command.args(["run", "--allow", "Edit", "--output-format", "stream-json", "--model", &model, "go"]);
    let ran = Ran::from(command.output().unwrap());
    assert_eq!((ran.code, ran.result()["stop_reason"].as_str()), (Some(1), Some("failed")), "{}", ran.err);
    assert!(ran.err.contains("cannot write the session"), "{}", ran.err);
    assert!(!home.work().join("big.txt").exists());
    let id = ran.result()["session_id"].as_str().unwrap().to_owned();
    let model = home.script(json!([{"text": "resumed"}]));
    assert_eq!(home.ran(&["run", "--quiet", "--model", &model, "--resume", &id]).out, "resumed\n");
}

/// Neither a full disk nor a file in the way leaves anything behind, and both say what to do.
#[test]
fn a_session_that_cannot_begin_is_not_there() {
    let home = Home::new();
    let model = home.script(json!([{"text": "a"}]));
    let check = |limit: &str, cob_home: &Path, expected: &[&str]| {
        let mut command = home.command("sh");
        command.args(["-c", &format!("{limit}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_cob")]);
        command.args(["run", "--output-format", "json", "--model", &model, "go"]).env("COB_HOME", cob_home);
        let ran = Ran::from(command.output().unwrap());
        assert_eq!((ran.code, ran.json()["session_id"].clone()), (Some(1), Value::Null), "{}", ran.err);
        for part in expected {
            assert!(ran.err.contains(part) && !ran.err.contains("resume"), "{part}: {}", ran.err);
        }
    };
    // The pipe of standard output has no such limit.
    check("ulimit -f 0", &home.dir.path().join("home"), &["cannot create the session", "ulimit -f"]);
    assert_eq!(home.ran(&["session", "list", "--json"]).json(), json!([]));
    let file = home.work().join("notes.txt");
    let remedy = format!("{} is not a folder: move it away, or set COB_HOME to another one", file.display());
    check("true", &file, &["cannot make the folder of the session", &remedy]);
    check("true", &file.join("deep"), &["cannot make the folder of the session", &remedy]);
}

#[test]
fn only_regular_files_are_sessions() {
    let home = Home::new();
    let model = home.script(json!([{"text": "a"}]));
    home.ran(&["run", "--model", &model, "go"]);
    let good = home.ran(&["session", "list", "--json"]).json()[0]["id"].as_str().unwrap().to_owned();
    let pipe = "20200101-000000-aaaa";
    let file = home.sessions().join(format!("{pipe}.jsonl"));
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let said = format!("{} is not a regular file", file.display());
    let list = home.ran(&["session", "list", "--json"]).json();
    assert!(list[0]["problem"].as_str().unwrap().contains(&said), "{list}");
    for arguments in [
        &["session", "show", pipe] as &[&str],
        &["session", "rm", pipe],
        &["run", "--model", &model, "--resume", pipe, "go"],
    ] {
        let ran = home.ran(arguments);
        assert!(ran.code == Some(4) && ran.err.contains(&said), "{arguments:?}: {:?} {}", ran.code, ran.err);
    }
    // What can be removed is, whatever comes before it; the exit code is the worst.
    let ran = home.ran(&["session", "rm", "nosuch", pipe, &good, "a/b"]);
    assert_eq!((ran.code, ran.out), (Some(4), format!("removed {good}\n")));
    assert_eq!(ran.err.lines().count(), 3, "{}", ran.err);
    assert!(!home.sessions().join(format!("{good}.jsonl")).exists() && file.exists());
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let home = Home::new();
    let model = home.script(json!([read_notes(), {"text": "3"}]));
    for arguments in [&["man"] as &[&str], &["run", "--model", &model, "go"], &["completions", "bash"]] {
        let mut child = home.cob(arguments).spawn().unwrap();
        drop(child.stdout.take());
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(0), "{arguments:?}: {}", ran.err);
        assert!(!ran.err.contains("panicked"), "{}", ran.err);
    }
}

#[test]
fn a_chat_is_one_session() {
    let home = Home::new();
    let model = home.script(json!([{"text": "a"}, {"text": "b"}, {"text": "c"}]));
    let mut child = home.cob(&["chat", "--quiet", "--model", &model]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all("một\n\n/nope\nhai\n/clear\nba\n/quit\nnever\n".as_bytes()).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.out.replace("› ", "").as_str()), (Some(0), "a\nb\nc\n"), "{}", ran.err);
    assert!(ran.err.contains("there is no command /nope"), "{}", ran.err);
    let list = home.ran(&["session", "list", "--json"]).json();
    let mut turns: Vec<u64> = list.as_array().unwrap().iter().map(|s| s["turns"].as_u64().unwrap()).collect();
    turns.sort_unstable();
    assert_eq!(turns, [1, 2]);
    assert!(fs::read_to_string(home.sessions().with_file_name("history")).unwrap().contains("hai"));
}

/// Where standard output cannot hold what is written, that is no success; a reader that went away is none of ours.
#[test]
fn a_full_standard_output_is_a_failure() {
    let home = Home::new();
    let model = home.script(json!([{"text": "hi"}]));
    let run = ["run", "hi", "--model", &model];
    let json = [&run[..], &["--output-format", "json"]].concat();
    for arguments in [&run[..], &json, &["model", "list"], &["man"], &["completions", "bash"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let ran = Ran::from(home.cob(arguments).stdout(full).output().unwrap());
        assert_eq!(ran.code, Some(1), "{arguments:?}");
        assert!(ran.err.contains("cannot write to standard output"), "{arguments:?}: {}", ran.err);
    }
}

#[test]
fn wrong_flags_give_a_result_to_a_program() {
    let home = Home::new();
    for (format, kinds) in [("json", &["result"][..]), ("stream-json", &["init", "result"])] {
        let arguments: [&[&str]; 3] = [&["--max-turns", "abc"], &["--timeout", "-1"], &["--nonsense"]];
        for flags in arguments {
            let ran = home.ran(&[&["run", "hi", "--output-format", format], flags].concat());
            assert_eq!(ran.code, Some(2));
            let lines: Vec<Value> = ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines.iter().map(|line| line["type"].as_str().unwrap()).collect::<Vec<_>>(), kinds);
            let error = lines.last().unwrap()["error"].as_str().unwrap();
            assert!(error.contains(flags[0]) && !error.contains('\n'), "{error}");
        }
    }
}

#[test]
fn a_tool_that_is_left_out_is_named_where_it_is_asked_for() {
    let home = Home::new();
    let model = home.script(json!([{"text": "hi"}]));
    let file = home.work().join("tools.json");
    fs::write(&file, r#"[{"name": "f", "parameters": {"type": "objekt"}}]"#).unwrap();
    for choice in ["f", "required"] {
        let ran = home.ran(&[
            "run",
            "hi",
            "--model",
            &model,
            "--tools",
            "none",
            "--tool-file",
            "tools.json",
            "--tool-choice",
            choice,
        ]);
        assert_eq!(ran.code, Some(2));
        assert!(ran.err.contains("the tool `f` is left out: its arguments must be an object"), "{}", ran.err);
    }
}

#[test]
fn the_small_commands_answer() {
    let home = Home::new();
    let check = |arguments: &[&str], expected: &str| {
        let ran = home.ran(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {}", ran.err);
        assert!(ran.out.contains(expected), "{arguments:?}: {}", ran.out);
    };
    check(&["completions", "zsh"], "#compdef cob");
    check(&["man"], ".TH cob");
    check(&["--version"], env!("CARGO_PKG_VERSION"));
    check(&["doctor", "--offline"], "sessions");
    let doctor = home.ran(&["doctor", "--offline", "--json"]).json();
    assert!(doctor["cpu"]["cores"].as_u64().unwrap() > 0);
    assert_eq!(doctor["hub"]["state"], "offline");
    let config = home.dir.path().join("home/config.toml");
    fs::create_dir_all(config.parent().unwrap()).unwrap();
    fs::write(&config, "modle = 1\n").unwrap();
    let ran = home.ran(&["doctor", "--offline"]);
    assert!(ran.code == Some(1) && ran.out.contains("config    cannot be used: "), "{}", ran.out);
    fs::remove_file(&config).unwrap();
    let model = home.script(json!([{"text": "one two"}, {"text": "one two"}, {"text": "one two"}]));
    let bench = home.ran(&["bench", "--json", "--model", &model]).json();
    assert_eq!(bench["runs"].as_array().unwrap().len(), 3);
    for [prompt, output] in [["100000000000", "1"], [&usize::MAX.to_string(), "1"], ["1", &usize::MAX.to_string()]] {
        let ran = home.ran(&["bench", "--model", &model, "--prompt-tokens", prompt, "--output-tokens", output]);
        assert_eq!(ran.code, Some(4), "{prompt} and {output}: {}", ran.err);
        assert!(ran.err.contains(prompt) && ran.err.contains("the context of 32768 tokens"), "{}", ran.err);
    }
    // With the words around the prompt it is too much after all.
    let ran = home.ran(&["bench", "--model", &model, "--prompt-tokens", "0", "--output-tokens", "32768"]);
    assert_eq!(ran.code, Some(4), "{}", ran.err);
    let dir = home.dir.path().join("man");
    check(&["man", "--dir", &dir.display().to_string()], "");
    assert!(dir.join("cob-run.1").exists());
}
