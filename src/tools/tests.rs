use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::json;

use super::*;

/// A workspace in a folder of its own.
struct Place {
    _folder: tempfile::TempDir,
    context: ToolContext,
    tools: Tools,
}

impl Place {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cwd = folder.path().canonicalize().unwrap().join("w");
        fs::create_dir(&cwd).unwrap();
        for (path, content) in files {
            let path = cwd.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let context = ToolContext {
            cwd,
            cancel: CancellationToken::new(),
            timeout: Duration::from_secs(120),
            files: Arc::default(),
            output_bytes_max: 8_000,
        };
        Place { _folder: folder, context, tools: Tools::builtin(None).unwrap() }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.context.cwd.join(path)
    }

    fn content(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap()
    }

    /// As the loop does it, but for permission.
    async fn call(&self, name: &str, arguments: Value) -> ToolOutput {
        let tool = self.tools.get(name).unwrap();
        if let Err(fault) = validate(tool.spec(), &arguments) {
            return ToolOutput::error(fault);
        }
        if let Err(fault) = tool.access(&arguments, &self.context) {
            return ToolOutput::error(fault);
        }
        let output = tool.run(arguments, &self.context).await;
        assert!(output.text.len() <= self.context.output_bytes_max, "{name}: {} bytes", output.text.len());
        output
    }

    #[track_caller]
    fn ok(&self, name: &str, arguments: Value) -> impl Future<Output = String> {
        let caller = std::panic::Location::caller();
        async move {
            let output = self.call(name, arguments).await;
            assert!(!output.is_error, "{caller}: {}", output.text);
            output.text
        }
    }

    #[track_caller]
    fn fails(&self, name: &str, arguments: Value, parts: &[&str]) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            let output = self.call(name, arguments).await;
            assert!(output.is_error, "{caller}: {}", output.text);
            for part in parts {
                assert!(output.text.contains(part), "{caller}: {part:?} is not in: {}", output.text);
            }
        }
    }
}

/// A file of this size without content, which takes no room on the disk.
fn sparse(path: &Path, start: &[u8], bytes: u64) {
    fs::write(path, start).unwrap();
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

#[test]
fn the_registry_is_ordered_and_names_what_it_lacks() {
    let names = |tools: &Tools| tools.names().join(" ");
    assert_eq!(names(&Tools::builtin(None).unwrap()), "Read Write Edit LS Glob Grep Bash");
    let some = ["Bash".to_string(), "Read".to_string(), "Bash".to_string()];
    let mut tools = Tools::builtin(Some(&some)).unwrap();
    assert_eq!(names(&tools), "Read Bash");
    let error = Tools::builtin(Some(&["read".to_string()])).err().unwrap();
    assert!(error.contains("no built-in tool read") && error.contains("Read, Write, Edit, LS, Glob, Grep, Bash"));
    let all = Tools::builtin(None).unwrap();
    assert!(tools.add(all.get("Read").unwrap().clone()).unwrap_err().contains("Read"));
    tools.add(all.get("LS").unwrap().clone()).unwrap();
    assert_eq!(names(&tools), "Read Bash LS");
    assert!(Tools::builtin(Some(&[])).unwrap().is_empty());
    let reading: Vec<&str> = all.iter().filter(|tool| tool.read_only()).map(|tool| tool.spec().name.as_str()).collect();
    assert_eq!(reading, ["Read", "LS", "Glob", "Grep"]);
}

#[tokio::test]
async fn read_counts_and_numbers_lines() {
    let long = "ộ".repeat(3_000);
    let many: String = (1..=5321).map(|line| format!("line {line}\n")).collect();
    let place = Place::new(&[
        ("two.txt", "a\nb\n"),
        ("open.txt", "a\nb"),
        ("empty.txt", ""),
        ("newlines.txt", "\n\n"),
        ("crlf.txt", "a\r\nb\r\n"),
        ("mixed.txt", "a\r\nb\n"),
        ("bom.txt", "\u{feff}a\n"),
        ("nul.txt", &format!("{}\0\n", "x\n".repeat(5_000))),
        ("việt/tiếng.txt", "Trời Hà Nội có mưa không?\n"),
        ("long.txt", &format!("{long}\nnext\n")),
        ("many.txt", &many),
    ]);
    fs::write(place.path("latin1.txt"), b"caf\xe9\nok\n").unwrap();
    let utf16: Vec<u8> = "\u{feff}xin\nchào\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    fs::write(place.path("utf16.txt"), &utf16).unwrap();
    fs::write(place.path("utf16-torn.txt"), &utf16[..5]).unwrap();
    fs::write(place.path("utf16-half.txt"), &utf16[..3]).unwrap();
    let read = |path: &str| place.ok("Read", json!({"file_path": path}));
    for (path, expected) in [
        ("two.txt", "two.txt has 2 lines\n1\ta\n2\tb\n"),
        ("./two.txt", "two.txt has 2 lines\n1\ta\n2\tb\n"),
        ("open.txt", "open.txt has 2 lines (no newline at the end of the last line)\n1\ta\n2\tb\n"),
        ("empty.txt", "empty.txt has 0 lines (the file is empty)"),
        ("newlines.txt", "newlines.txt has 2 lines\n1\t\n2\t\n"),
        ("crlf.txt", "crlf.txt has 2 lines (CRLF line ends)\n1\ta\n2\tb\n"),
        ("mixed.txt", "mixed.txt has 2 lines (some lines end in CRLF)\n1\ta\n2\tb\n"),
        ("bom.txt", "bom.txt has 1 line (UTF-8 with BOM)\n1\ta\n"),
        ("việt/tiếng.txt", "việt/tiếng.txt has 1 line\n1\tTrời Hà Nội có mưa không?\n"),
        (
            "latin1.txt",
            "latin1.txt has 2 lines (not all UTF-8: U+FFFD stands for what is not)\n1\tcaf\u{fffd}\n2\tok\n",
        ),
        ("utf16.txt", "utf16.txt has 2 lines (decoded from UTF-16)\n1\txin\n2\tchào\n"),
        (
            "utf16-torn.txt",
            "utf16-torn.txt has 1 line (decoded from UTF-16; the last byte is half a character: U+FFFD stands for it; no \
             newline at the end of the last line)\n1\tx\u{fffd}\n",
        ),
        (
            "utf16-half.txt",
            "utf16-half.txt has 1 line (decoded from UTF-16; the last byte is half a character: U+FFFD stands for it; no \
             newline at the end of the last line)\n1\t\u{fffd}\n",
        ),
    ] {
        assert_eq!(read(path).await, expected);
    }
    assert_eq!(read(&format!("file://{}", place.path("two.txt").display())).await, "two.txt has 2 lines\n1\ta\n2\tb\n");

    // A long line is cut between characters (666 of three bytes), and the next is whole.
    let text = read("long.txt").await;
    let expected = format!("long.txt has 2 lines\n1\t{} [... line cut; it has 9000 bytes]\n2\tnext\n", "ộ".repeat(666));
    assert_eq!(text, expected);

    // As much as fits, and where to go on.
    let text = read("many.txt").await;
    let header = text.lines().next().unwrap();
    let last: usize = text.lines().last().unwrap().split('\t').next().unwrap().parse().unwrap();
    let next = last + 1;
    assert_eq!(
        header,
        format!("many.txt has 5321 lines; lines 1-{last} follow, call Read with offset={next} for more")
    );
    assert!(last > 400);
    let text = place.ok("Read", json!({"file_path": "many.txt", "offset": 5320.0, "limit": 10})).await;
    assert_eq!(text, "many.txt has 5321 lines; lines 5320-5321 follow\n5320\tline 5320\n5321\tline 5321\n");
    let text = place.ok("Read", json!({"file_path": "many.txt", "offset": 0, "limit": 1})).await;
    assert_eq!(text, "many.txt has 5321 lines; lines 1-1 follow, call Read with offset=2 for more\n1\tline 1\n");
    place.fails("Read", json!({"file_path": "two.txt", "offset": 3}), &["only 2 lines", "offset 3"]).await;
    place.fails("Read", json!({"file_path": "two.txt", "offset": -1}), &["offset must be 1 or more"]).await;
    let text = place.ok("Read", json!({"file_path": "two.txt", "limit": 0})).await;
    assert_eq!(text, "two.txt has 2 lines\n1\ta\n2\tb\n", "0 means nothing by it");
    let text = place.ok("Read", json!({"file_path": "nul.txt", "offset": 5001})).await;
    assert!(text.starts_with("nul.txt has 5001 lines; lines 5001-5001 follow (contains NUL bytes)\n"), "{text}");
}

#[tokio::test]
async fn a_file_that_was_read_in_part_is_not_replaced() {
    let place = Place::new(&[("a.txt", "1\n2\n3\n")]);
    let write = json!({"file_path": "a.txt", "content": "x\n"});
    place.ok("Read", json!({"file_path": "a.txt", "limit": 1})).await;
    place.fails("Write", write.clone(), &["Only a part of a.txt was read", "Edit"]).await;
    place.ok("Edit", json!({"file_path": "a.txt", "old_string": "2", "new_string": "zwei"})).await;
    place.ok("Read", json!({"file_path": "a.txt"})).await;
    // A look at a part takes nothing away from what was seen.
    place.ok("Read", json!({"file_path": "a.txt", "offset": 2})).await;
    place.ok("Write", write).await;
}

#[tokio::test]
async fn read_says_what_to_do_where_there_is_nothing_to_show() {
    let place =
        Place::new(&[("src/config.rs", "x\n"), ("Cargo.toml", "x\n"), ("src/deep/main.rs", "x\n"), (".gitignore", "")]);
    fs::write(place.path("image.png"), b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR").unwrap();
    symlink("loop", place.path("loop")).unwrap();
    symlink("nowhere", place.path("dangling")).unwrap();
    for (path, parts) in [
        ("src", &["is a folder", "LS"][..]),
        ("src/confg.rs", &["src/confg.rs does not exist", "Did you mean src/config.rs?"]),
        ("main.rs", &["main.rs does not exist", "src/deep/main.rs"]),
        ("lib/config.rs", &["no folder lib", "src/config.rs"]),
        ("src/config.rs/x", &["is a file, not a folder"]),
        ("zzz", &["zzz does not exist", "Use LS or Glob"]),
        ("/Cargo.toml", &["/Cargo.toml does not exist", "write Cargo.toml"]),
        ("", &["path is empty"]),
        ("  ", &["path is empty"]),
        ("a\0b", &["NUL"]),
        ("image.png", &["binary file", "16 bytes"]),
        ("/dev/null", &["not a regular file"]),
        ("loop", &["symbolic links"]),
        ("dangling", &["nowhere does not exist"]),
    ] {
        place.fails("Read", json!({"file_path": path}), parts).await;
    }
    // Names outside the workspace are not given away.
    fs::write(place.path("../secret.txt"), "x").unwrap();
    let output = place.call("Read", json!({"file_path": "../secrets.txt"})).await;
    assert!(output.is_error && !output.text.contains("secret.txt?"), "{}", output.text);
    // Root reads what nobody may, so the refusal shows only for others.
    fs::set_permissions(place.path("Cargo.toml"), fs::Permissions::from_mode(0o000)).unwrap();
    let output = place.call("Read", json!({"file_path": "Cargo.toml"})).await;
    // SAFETY: reads a number.
    match unsafe { libc::geteuid() } {
        0 => assert!(!output.is_error),
        _ => assert!(output.text.contains("permission denied"), "{}", output.text),
    }
}

#[tokio::test]
async fn huge_files_are_streamed() {
    let place = Place::new(&[]);
    sparse(&place.path("zeros"), b"", 200 << 20);
    place.fails("Read", json!({"file_path": "zeros"}), &["binary", "209715200 bytes"]).await;
    // Text where one looks, and then one line of 200 MB.
    sparse(&place.path("line"), &b"text\n".repeat(4_000), 200 << 20);
    let text = place.ok("Read", json!({"file_path": "line", "offset": 4000})).await;
    assert!(
        text.starts_with("line has 4001 lines; lines 4000-4001 follow (no newline at the end of the last line"),
        "{}",
        &text[..200]
    );
    assert!(text.ends_with("[... line cut; it has 209695200 bytes]\n"), "{}", &text[text.len() - 100..]);
    let text = place.ok("Grep", json!({"pattern": "tex"})).await;
    assert!(text.contains("No match") && text.contains("[files skipped: 2 binary]"), "{text}");
}

#[tokio::test]
async fn cancelled_file_work_ends() {
    let place = Place::new(&[("a", "x\n")]);
    place.context.cancel.cancel();
    for (tool, arguments) in [
        ("Read", json!({"file_path": "a"})),
        ("Grep", json!({"pattern": "x"})),
        ("Glob", json!({"pattern": "*"})),
        ("LS", json!({})),
        ("Write", json!({"file_path": "b", "content": ""})),
        ("Bash", json!({"command": "sleep 600"})),
    ] {
        place.fails(tool, arguments, &["Interrupted"]).await;
    }
    assert!(!place.path("b").exists());
}

#[tokio::test]
async fn write_creates_and_replaces_what_was_read() {
    let place = Place::new(&[("old.txt", "old\n"), ("empty.txt", ""), ("dir/x", "")]);
    let write = |path: &str, content: &str| json!({"file_path": path, "content": content});
    let text = place.ok("Write", write("new/deeper/chào.txt", "xin\nchào\n")).await;
    assert_eq!(text, "Created new/deeper/chào.txt: 2 lines, 10 bytes.");
    assert_eq!(place.content("new/deeper/chào.txt"), "xin\nchào\n");
    // What it wrote it knows.
    let text = place.ok("Write", write("new/deeper/chào.txt", "x")).await;
    assert_eq!(text, "Replaced new/deeper/chào.txt: now 1 line, 1 byte (before: 10 bytes).");
    place.ok("Write", write("empty.txt", "x")).await;

    let adding = r#"{"file_path":"old.txt","old_string":"old","new_string":"old\nnew"}"#;
    place.fails("Write", write("old.txt", "new\n"), &["was not read yet", "call Read", "Edit", adding]).await;
    assert_eq!(place.content("old.txt"), "old\n");
    // A new version of the file is no addition to it, and where Edit would not find the place it is not shown.
    fs::write(place.path("two.txt"), "a\nb\n").unwrap();
    fs::write(place.path("same.txt"), "a\na\n").unwrap();
    for (path, content) in [("two.txt", "x\nb\n"), ("same.txt", "x"), ("two.txt", " \n"), ("two.txt", &"x".repeat(201))]
    {
        let said = place.call("Write", write(path, content)).await.text;
        assert!(said.contains("was not read yet") && !said.contains("old_string"), "{said}");
    }
    place.ok("Read", json!({"file_path": "old.txt"})).await;
    fs::write(place.path("old.txt"), "theirs\n").unwrap();
    place.fails("Write", write("old.txt", "new"), &["has changed since"]).await;
    assert_eq!(place.content("old.txt"), "theirs\n");
    place.ok("Read", json!({"file_path": "./dir/../old.txt"})).await;
    // Touched is not changed.
    File::options()
        .write(true)
        .open(place.path("old.txt"))
        .unwrap()
        .set_modified(std::time::SystemTime::now())
        .unwrap();
    fs::set_permissions(place.path("old.txt"), fs::Permissions::from_mode(0o750)).unwrap();
    place.ok("Write", write("old.txt", "mine\n")).await;
    assert_eq!(place.content("old.txt"), "mine\n");
    assert_eq!(fs::metadata(place.path("old.txt")).unwrap().permissions().mode() & 0o777, 0o750);

    for (path, parts) in [
        ("dir", &["is a folder"][..]),
        ("nodir/", &["names a folder"]),
        ("old.txt/x", &["Could not create the folder"]),
        ("/dev/null", &["not a regular file"]),
    ] {
        place.fails("Write", write(path, "x"), parts).await;
    }
    fs::set_permissions(place.path("old.txt"), fs::Permissions::from_mode(0o444)).unwrap();
    place.fails("Write", write("old.txt", "x"), &["read-only"]).await;

    // A link stays a link; its target is written.
    symlink("target.txt", place.path("link.txt")).unwrap();
    place.ok("Write", write("link.txt", "through\n")).await;
    assert!(place.path("link.txt").is_symlink());
    assert_eq!(place.content("target.txt"), "through\n");
    // Nothing half-written stays behind.
    let names: Vec<_> = fs::read_dir(&place.context.cwd).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().contains(".tmp")), "{names:?}");
}

#[tokio::test]
async fn edit_replaces_and_keeps_the_rest() {
    // content, old, new, all, expected
    for (content, old, new, all, expected) in [
        ("a\nb\nc\n", "b", "x", false, "a\nx\nc\n"),
        ("a\nb\nc\n", "b\n", "", false, "a\nc\n"),
        ("a\nb\nc\n", "a\nb", "x\ny\nz", false, "x\ny\nz\nc\n"),
        ("a b a", "a", "x", true, "x b x"),
        ("aaa", "aa", "x", true, "xa"),
        ("no newline", "newline", "end", false, "no end"),
        // CRLF: the model writes \n or \r\n, the file keeps its own.
        ("a\r\nb\r\nc\r\n", "a\nb", "x\ny", false, "x\r\ny\r\nc\r\n"),
        ("a\r\nb\r\nc\r\n", "a\r\nb", "x\r\ny", false, "x\r\ny\r\nc\r\n"),
        ("a\r\nb\r\nc\r\n", "b", "x\ny", false, "a\r\nx\r\ny\r\nc\r\n"),
        ("a\nb\n", "a\r\nb", "x\r\ny", false, "x\ny\n"),
        ("a\r\nb\nc\nd\n", "c", "x\ny", false, "a\r\nb\nx\ny\nd\n"),
        ("a\r\nb\nc\nd\n", "a\nb", "x\ny", false, "x\r\ny\nc\nd\n"),
        ("a\r\nb\r\n", "a\n", "", false, "b\r\n"),
        // Lines that are only named to find the place keep their own.
        ("a\r\nb\nc\r\nd\n", "a\nb\nc", "a\nx\nc", false, "a\r\nx\nc\r\nd\n"),
        ("a\nb\r\nc\n", "a\nb\nc\n", "b\nc\n", false, "b\r\nc\n"),
        ("a\r\nộ\nc\r\n", "ộ\nc", "ợ\nd\nc", false, "a\r\nợ\nd\nc\r\n"),
        ("\u{feff}a\nb\n", "a", "x", false, "\u{feff}x\nb\n"),
        ("\u{feff}a\r\nb\r\n", "a\nb", "x\nb", false, "\u{feff}x\r\nb\r\n"),
        ("Trời Hà Nội\n", "Hà Nội", "Huế", false, "Trời Huế\n"),
        ("😀 x 😀", "😀", "🐴", true, "🐴 x 🐴"),
    ] {
        let place = Place::new(&[("f", content)]);
        fs::set_permissions(place.path("f"), fs::Permissions::from_mode(0o755)).unwrap();
        let arguments = json!({"file_path": "f", "old_string": old, "new_string": new, "replace_all": all});
        place.ok("Edit", arguments).await;
        let now = fs::read_to_string(place.path("f")).unwrap();
        assert_eq!(now, expected, "{content:?} {old:?}");
        assert_eq!(fs::metadata(place.path("f")).unwrap().permissions().mode() & 0o777, 0o755);
    }
}

#[tokio::test]
async fn edit_shows_what_it_did() {
    let content: String = (1..=20).map(|line| format!("line {line}\n")).collect();
    let place = Place::new(&[("f", &content)]);
    let arguments = json!({"file_path": "f", "old_string": "line 10\n", "new_string": "line ten\nand more\n"});
    let text = place.ok("Edit", arguments).await;
    assert_eq!(
        text,
        "Edited f at line 10. It now reads:\n7\tline 7\n8\tline 8\n9\tline 9\n10\tline ten\n11\tand more\n12\tline 11\n13\tline 12\n14\tline 13\n15\tline 14\n"
    );
    let arguments = json!({"file_path": "f", "old_string": "line", "new_string": "row", "replace_all": true});
    assert!(place.ok("Edit", arguments).await.starts_with("Edited f in 20 places, the first at line 1."));
    // It knows what it wrote: a second edit needs no Read between.
    place.ok("Edit", json!({"file_path": "f", "old_string": "row 20", "new_string": "end"})).await;
}

#[tokio::test]
async fn edit_explains_what_it_refuses() {
    let code = "fn main() {\n\tlet total = 1;\n\tprintln!(\"{total}\");\n}\n\nfn other() {\n    let x = 2;\n    let x = 2;\n}\n";
    let place = Place::new(&[("f.rs", code), ("nfd.txt", "Tie\u{302}\u{301}ng Vie\u{323}\u{302}t\n"), ("d/x", "")]);
    fs::write(place.path("latin1.txt"), b"caf\xe9\n").unwrap();
    let edit = |path: &str, old: &str, new: &str| json!({"file_path": path, "old_string": old, "new_string": new});
    for (arguments, parts) in [
        (edit("f.rs", "", "x"), &["old_string is empty", "at the end of f.rs", "The last line is: "][..]),
        (edit("f.rs", "fn", "fn"), &["are the same"]),
        (edit("f.rs", "let x = 2;", "y"), &["occurs 2 times", "lines 7, 8", "replace_all"]),
        (edit("f.rs", "    let total = 1;", "y"), &["differs only in tabs and spaces", "2\t\tlet total = 1;"]),
        (
            edit("f.rs", "fn other() {\n  let x = 2;", "y"),
            &["differs only in indentation", "6\tfn other() {\n7\t    let x = 2;"],
        ),
        (edit("f.rs", "fn  main()  {", "y"), &["differs only in blanks"]),
        (edit("f.rs", "let totals = 1;", "y"), &["nearest lines", "2\t\tlet total = 1;"]),
        (edit("f.rs", "zzzzzzzz", "y"), &["Nothing in the file is like it", "Read"]),
        (edit("f.rs", "6\tfn other() {\n7\t    let x = 2;", "y"), &["line number", "leave the numbers out"]),
        (edit("f.rs", "fn main() {\\n\tlet total", "y"), &["written as two characters"]),
        (edit("f.rs", "fn gone() {", "fn other() {"), &["new_string is already there, at line 6"]),
        (edit("nfd.txt", "Tiếng Việt", "y"), &["NFD", "Write"]),
        (edit("latin1.txt", "caf", "y"), &["not UTF-8 (at byte 3)"]),
        (edit("d", "a", "b"), &["is a folder"]),
        (edit("none.rs", "a", "b"), &["none.rs does not exist"]),
    ] {
        place.fails("Edit", arguments, parts).await;
    }
    assert_eq!(place.content("f.rs"), code);
    place.ok("Read", json!({"file_path": "f.rs"})).await;
    fs::write(place.path("f.rs"), format!("{code}\n")).unwrap();
    place.fails("Edit", edit("f.rs", "main", "start"), &["has changed since it was last read"]).await;
    place.ok("Read", json!({"file_path": "f.rs", "limit": 1})).await;
    place.ok("Edit", edit("f.rs", "main", "start")).await;
}

#[tokio::test]
async fn ls_lists_one_folder() {
    let place = Place::new(&[("b.txt", "12345"), ("a/x", ""), ("việt.txt", ""), (".hidden", "1"), ("new\nline", "")]);
    symlink("b.txt", place.path("link")).unwrap();
    fs::create_dir(place.path("nothing")).unwrap();
    let text = place.ok("LS", json!({})).await;
    assert_eq!(
        text,
        ".hidden (1 byte)\na/\nb.txt (5 bytes)\nlink -> b.txt\n\"new\\nline\" (0 bytes)\nnothing/\nviệt.txt (0 bytes)\n[.: 2 folders, 5 files]\n"
    );
    assert_eq!(place.ok("LS", json!({"path": "a"})).await, "x (0 bytes)\n[a: 1 file]\n");
    assert_eq!(place.ok("LS", json!({"path": "nothing"})).await, "nothing: the folder is empty");
    place.fails("LS", json!({"path": "b.txt"}), &["is a file", "Read"]).await;
    place.fails("LS", json!({"path": "nothin"}), &["does not exist", "Did you mean nothing?"]).await;
    for number in 0..2_000 {
        File::create(place.path(&format!("a/{number:04}"))).unwrap();
    }
    let text = place.ok("LS", json!({"path": "a"})).await;
    assert!(text.starts_with("0000") && text.ends_with("[a: 2001 files]\n"), "{text}");
    let shown = text.lines().count() - 2;
    let note =
        format!("[... {} more not shown; use Glob with a pattern for a part of them]\n[a: 2001 files]\n", 2001 - shown);
    assert!(text.ends_with(&note), "{text}");
}

#[tokio::test]
async fn what_edit_did_is_not_lost_to_a_write() {
    let place = Place::new(&[("f", "apple\ncherry\n")]);
    let write = || json!({"file_path": "f", "content": "banana\n"});
    place.fails("Write", write(), &["was not read yet"]).await;
    place.ok("Edit", json!({"file_path": "f", "old_string": "cherry", "new_string": "cherry\nbanana"})).await;
    place.fails("Write", write(), &["was changed with Edit", "Read"]).await;
    // A second edit knows what the first did.
    place.ok("Edit", json!({"file_path": "f", "old_string": "apple", "new_string": "pear"})).await;
    place.ok("Read", json!({"file_path": "f"})).await;
    place.ok("Write", write()).await;
    assert_eq!(fs::read_to_string(place.path("f")).unwrap(), "banana\n");
}

#[tokio::test]
async fn glob_finds_by_name() {
    let place = Place::new(&[
        ("a.rs", ""),
        ("src/b.rs", ""),
        ("src/deep/c.rs", ""),
        ("src/d.md", ""),
        ("ảnh/é.rs", ""),
        (".github/x.yml", ""),
        (".git/config.rs", ""),
        ("target/e.rs", ""),
        (".gitignore", "target\n"),
        ("[x].rs", ""),
    ]);
    symlink("src", place.path("link")).unwrap();
    let root = place.context.cwd.display().to_string();
    for (pattern, path, expected) in [
        ("*.rs", "", "5 files:\n[x].rs\na.rs\nsrc/b.rs\nsrc/deep/c.rs\nảnh/é.rs\n"),
        ("**/*.rs", "", "5 files:\n[x].rs\na.rs\nsrc/b.rs\nsrc/deep/c.rs\nảnh/é.rs\n"),
        ("./src/*.rs", ".", "1 file:\nsrc/b.rs\n"),
        ("src/**", "", "3 files:\nsrc/b.rs\nsrc/d.md\nsrc/deep/c.rs\n"),
        ("*.{rs,md}", "src", "3 files:\nsrc/b.rs\nsrc/d.md\nsrc/deep/c.rs\n"),
        ("../*.rs", "src", "2 files:\n[x].rs\na.rs\n"),
        (&format!("{root}/src/*.rs"), "", "1 file:\nsrc/b.rs\n"),
        ("*.yml", "", "1 file:\n.github/x.yml\n"),
        ("a.rs", "", "1 file:\na.rs\n"),
        ("li*", "", "No file in . matches li*.\n"),
        ("*.py", "", "No file in . matches *.py.\n"),
        ("e.rs", "", "No file in . matches e.rs. 1 match that ignore files such as .gitignore exclude.\n"),
    ] {
        assert_eq!(place.ok("Glob", json!({"pattern": pattern, "path": path})).await, expected, "{pattern}");
    }
    place.fails("Glob", json!({"pattern": "a[", "path": "."}), &["not valid", "src/**/*.rs"]).await;
    place.fails("Glob", json!({"pattern": ""}), &["pattern is empty"]).await;
    place.fails("Glob", json!({"pattern": "*", "path": "srcs"}), &["does not exist", "src"]).await;
    place.fails("Glob", json!({"pattern": "*", "path": "a.rs"}), &["is a file"]).await;
    place.fails("Glob", json!({"pattern": "/*/../x"}), &["after a wildcard"]).await;
    // What a pattern reaches is declared, wherever the pattern itself leads.
    let glob = place.tools.get("Glob").unwrap();
    for (pattern, base) in
        [("*.rs", root.as_str()), ("/etc/*.conf", "/etc"), ("../*", &format!("{root}/..")), ("/etc/passwd", "/etc")]
    {
        let access = glob.access(&json!({"pattern": pattern}), &place.context).unwrap();
        assert_eq!(access, [Access::Read(base.into())], "{pattern}");
    }
}

#[tokio::test]
async fn grep_finds_by_content() {
    let long = format!("{}needle{}", "ộ".repeat(500), "x".repeat(500));
    let place = Place::new(&[
        ("a.txt", "one\ntwo Needle\nthree needle\n"),
        ("src/b.rs", "needle()\r\nend\r\n"),
        ("src/c.md", "Trời Hà Nội\n"),
        ("target/d.txt", "needle\n"),
        (".gitignore", "target\n"),
        ("long.log", &long),
    ]);
    fs::write(place.path("bin"), b"needle\n\0\0").unwrap();
    symlink("a.txt", place.path("link")).unwrap();
    let skipped = "[files skipped: 1 binary, 1 not regular (links are not followed)]\n";
    for (arguments, expected) in [
        (
            json!({"pattern": "needle", "path": "a.txt"}),
            "1 matching line in 1 file:\na.txt:3:three needle\n".to_string(),
        ),
        (
            json!({"pattern": "needle", "path": "a.txt", "-i": true}),
            "2 matching lines in 1 file:\na.txt:2:two Needle\na.txt:3:three needle\n".into(),
        ),
        (
            json!({"pattern": "needle\\(\\)$", "path": "src"}),
            "1 matching line in 1 file:\nsrc/b.rs:1:needle()\n".into(),
        ),
        (
            json!({"pattern": "hà nội", "-i": true, "path": "src", "glob": "*.md"}),
            "1 matching line in 1 file:\nsrc/c.md:1:Trời Hà Nội\n".into(),
        ),
        (
            json!({"pattern": "needle", "output_mode": "files_with_matches"}),
            format!("3 files:\na.txt\nlong.log\nsrc/b.rs\n{skipped}"),
        ),
        (
            json!({"pattern": "e", "output_mode": "count", "glob": "*.txt"}),
            "3 matching lines in 1 file:\na.txt:3\n".into(),
        ),
        (json!({"pattern": "needle", "path": "target"}), "1 matching line in 1 file:\ntarget/d.txt:1:needle\n".into()),
        (
            json!({"pattern": "NEEDLE", "glob": "src/*.rs"}),
            "No match for NEEDLE in . in files src/*.rs. Case was respected. Without path and glob the whole workspace is searched.\n"
                .into(),
        ),
    ] {
        assert_eq!(place.ok("Grep", arguments.clone()).await, expected, "{arguments}");
    }
    let text = place.ok("Grep", json!({"pattern": "needle", "path": "long.log"})).await;
    assert!(
        text.contains("long.log:1:[...] ộ") && text.contains("needlexxx") && text.ends_with("it has 2006 bytes]\n"),
        "{text}"
    );
    assert!(!text.contains('\u{fffd}'));
    place
        .fails(
            "Grep",
            json!({"pattern": "foo("}),
            &["not a valid regular expression", "unclosed group", "write foo\\("],
        )
        .await;
    place.fails("Grep", json!({"pattern": "a\nb"}), &["line by line"]).await;
    place.fails("Grep", json!({"pattern": ""}), &["pattern is empty"]).await;
    // A folder that is not there is searched for elsewhere, and that is said; wildcards may stand in the path too.
    for (arguments, expected) in [
        (
            json!({"pattern": "Hà Nội", "path": "none"}),
            format!("none does not exist; searched the whole workspace.\n1 matching line in 1 file:\nsrc/c.md:1:Trời Hà Nội\n{skipped}"),
        ),
        (json!({"pattern": "Hà Nội", "path": "src/**/*.md"}), "1 matching line in 1 file:\nsrc/c.md:1:Trời Hà Nội\n".into()),
        (json!({"pattern": "Hà Nội", "path": " src/c.md "}), "1 matching line in 1 file:\nsrc/c.md:1:Trời Hà Nội\n".into()),
        (
            json!({"pattern": "a.txt", "path": "src"}),
            "No match for a.txt in src. Case was respected. Without path and glob the whole workspace is searched.\na.txt is the name \
             of a file; to see what is in it, use Read.\n"
                .into(),
        ),
    ] {
        assert_eq!(place.ok("Grep", arguments.clone()).await, expected, "{arguments}");
    }
    let both = json!({"pattern": "Hà Nội", "path": "src/**", "glob": "*.md"});
    let text = place.ok("Grep", both).await;
    assert_eq!(
        text,
        "src/** has wildcards; searched its folder for files *.md.\n1 matching line in 1 file:\nsrc/c.md:1:Trời Hà Nội\n"
    );
    for path in ["/none/of/this", "~/none-of-this", "file:///none", " /none ", "src/../../none"] {
        place.fails("Grep", json!({"pattern": "x", "path": path}), &["does not exist"]).await;
    }
    // Whether a file outside exists is not told.
    let text = place.ok("Grep", json!({"pattern": "/etc/passwd", "path": "src"})).await;
    assert!(!text.contains("is the name of a file"), "{text}");
    // What is searched is declared, wherever the path leads.
    let grep = place.tools.get("Grep").unwrap();
    for (path, base) in [("src", "src"), ("none", ""), ("src/*.rs", "src/"), ("../none", "../none")] {
        let access = grep.access(&json!({"pattern": "x", "path": path}), &place.context).unwrap();
        assert_eq!(access, [Access::Read(place.context.cwd.join(base))], "{path}");
    }

    fs::write(place.path("many.txt"), "a match here\n".repeat(5_000)).unwrap();
    let text = place.ok("Grep", json!({"pattern": "match", "path": "many.txt"})).await;
    assert!(text.starts_with("5000 matching lines in 1 file:\nmany.txt:1:a match here\n"), "{text}");
    let shown = text.lines().count() - 2;
    assert!(
        text.ends_with(&format!("[... {} more not shown; narrow the pattern, or give a path or glob]\n", 5000 - shown)),
        "{text}"
    );
}

#[tokio::test]
async fn bash_reports_output_and_end() {
    let place = Place::new(&[("a.txt", "1\n2\n")]);
    for (command, is_error, expected) in [
        ("wc -l < a.txt", false, "2\n"),
        ("echo 'xin chào'", false, "xin chào\n"),
        ("true", false, "[no output; exit code 0]\n"),
        ("echo out; echo err >&2; exit 3", true, "out\nerr\n[exit code 3]\n"),
        ("printf x; exit 1", true, "x\n[exit code 1]\n"),
        ("kill -9 $$", true, "[killed by signal 9]\n"),
        ("printf 'a\\377\\n'", false, "a\u{fffd}\n[not all of the output was UTF-8]\n"),
        (
            "sleep 600 & echo started",
            false,
            "started\n[processes left in the background were killed: they may not outlive the call]\n",
        ),
        ("cd / && pwd; exit 0", false, "/\n"),
        ("basename \"$PWD\"", false, "w\n"),
    ] {
        let output = place.call("Bash", json!({"command": command, "description": "a test"})).await;
        assert_eq!((output.is_error, output.text.as_str()), (is_error, expected), "{command}");
    }
    let output = place.call("Bash", json!({"command": "echo before; sleep 600", "timeout": 1000})).await;
    let expected =
        "before\n[timed out after 1000 ms; the command and all of its processes that could be found were killed]\n";
    assert_eq!((output.is_error, output.text.as_str()), (true, expected));
    let text = place.ok("Bash", json!({"command": "seq 100000"})).await;
    assert!(text.starts_with("1\n2\n") && text.ends_with("\n99999\n100000\n"));
    assert!(text.contains(" of 588895 bytes of output cut here ...]\n"), "{text}");
    place.fails("Bash", json!({"command": " "}), &["command is empty"]).await;
    place.fails("Bash", json!({"command": "a\0b"}), &["NUL"]).await;
    place.fails("Bash", json!({"command": "ls", "timeout": 0}), &["timeout must be"]).await;
}

#[tokio::test]
async fn a_call_has_no_more_time_than_its_context() {
    let mut place = Place::new(&[]);
    place.context.timeout = Duration::from_millis(400);
    place
        .fails(
            "Bash",
            json!({"command": "sleep 600", "timeout": 60_000}),
            &["timed out after 380 ms, the most a call may take"],
        )
        .await;
}

#[tokio::test]
async fn results_keep_within_a_small_bound() {
    let lines = "một dòng chữ khá là dài\n".repeat(200);
    let mut place = Place::new(&[("f", &lines), ("g", &lines)]);
    for number in 0..100 {
        File::create(place.path(&format!("tệp-{number}"))).unwrap();
    }
    place.context.output_bytes_max = 700;
    place.ok("Read", json!({"file_path": "f"})).await;
    place.ok("LS", json!({})).await;
    place.ok("Glob", json!({"pattern": "*"})).await;
    place.ok("Grep", json!({"pattern": "dòng"})).await;
    place.ok("Bash", json!({"command": "cat f"})).await;
    place.ok("Edit", json!({"file_path": "f", "old_string": "dòng", "new_string": "hàng", "replace_all": true})).await;
    place.fails("Edit", json!({"file_path": "f", "old_string": "dòng chữ", "new_string": "x"}), &["not found"]).await;
}

/// What a tool declares is what it touches: a path that leads out of the workspace is refused for every tool.
#[test]
fn declared_paths_are_judged_where_they_lead() {
    use crate::permission::{Decision, Mode, Rules};
    let place = Place::new(&[("src/a.rs", ""), ("a.txt", "")]);
    fs::create_dir(place.path("../out")).unwrap();
    symlink("../out", place.path("link")).unwrap();
    symlink("../out/secret", place.path("file-link")).unwrap();
    let mut rules = Rules::new(&place.context.cwd, Mode::AcceptEdits).unwrap();
    rules.allow("Bash(wc *)").unwrap();
    let home = std::env::var("HOME").unwrap();
    for (tool, arguments, allowed) in [
        ("Read", json!({"file_path": "src/../a.txt"}), true),
        ("Read", json!({"file_path": "file-link"}), false),
        ("Read", json!({"file_path": "../out/x"}), false),
        ("Read", json!({"file_path": "~/x"}), false),
        ("Read", json!({"file_path": format!("file://{home}/x")}), false),
        ("LS", json!({}), true),
        ("LS", json!({"path": "link"}), false),
        ("LS", json!({"path": "/"}), false),
        ("Glob", json!({"pattern": "src/**/*.rs"}), true),
        ("Glob", json!({"pattern": "*", "path": "link"}), false),
        ("Glob", json!({"pattern": "/**"}), false),
        ("Glob", json!({"pattern": "../*"}), false),
        ("Glob", json!({"pattern": "src/../../*"}), false),
        ("Grep", json!({"pattern": "x"}), true),
        ("Grep", json!({"pattern": "x", "path": "link"}), false),
        ("Write", json!({"file_path": "new/x", "content": ""}), true),
        ("Write", json!({"file_path": "link/x", "content": ""}), false),
        ("Write", json!({"file_path": "file-link", "content": ""}), false),
        ("Write", json!({"file_path": ".git/hooks/x", "content": ""}), false),
        ("Edit", json!({"file_path": "a.txt", "old_string": "a", "new_string": "b"}), true),
        ("Edit", json!({"file_path": "link/a", "old_string": "a", "new_string": "b"}), false),
        ("Bash", json!({"command": "wc -l a.txt"}), true),
        ("Bash", json!({"command": "wc -l a.txt; rm a.txt"}), false),
    ] {
        let accesses = place.tools.get(tool).unwrap().access(&arguments, &place.context).unwrap();
        let decision = rules.decide(tool, &accesses);
        assert_eq!(matches!(decision, Decision::Allow { .. }), allowed, "{tool} {arguments} {decision:?}");
    }
}
