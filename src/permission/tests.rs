use super::*;
use std::os::unix::fs::symlink;
use std::sync::Mutex;

/// A workspace `w` with a few files and links, and a folder `out` beside it.
struct Place {
    _folder: tempfile::TempDir,
    root: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for dir in ["w/src/deep", "w/.git", "w/ảnh", "out"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        std::fs::write(root.join("out/secret"), "x").unwrap();
        symlink("../out", root.join("w/link")).unwrap();
        symlink("../out/secret", root.join("w/file-link")).unwrap();
        symlink("../out/new", root.join("w/dangling")).unwrap();
        symlink("src", root.join("w/inner")).unwrap();
        symlink(".git", root.join("w/plain")).unwrap();
        Place { _folder: folder, root }
    }

    fn rules(&self, mode: Mode, allow: &[&str]) -> Rules {
        let mut rules = Rules::new(&self.root.join("w"), mode).unwrap();
        rules.bases.home = Some(self.root.join("out"));
        allow.iter().for_each(|rule| rules.allow(&rule.replace("ROOT", self.root.to_str().unwrap())).unwrap());
        rules
    }

    fn allowed(&self, mode: Mode, allow: &[&str], tool: &str, access: Access) -> bool {
        matches!(self.rules(mode, allow).decide(tool, &[access]), Decision::Allow { .. })
    }
}

#[test]
fn paths_are_judged_where_they_lead() {
    let place = Place::new();
    // mode, rules, tool, reads allowed, writes allowed, neither allowed
    type Row<'a> = (Mode, &'a [&'a str], &'a str, &'a [&'a str], &'a [&'a str]);
    let escapes =
        ["link/secret", "file-link", "dangling", "../out/secret", "src/../../out/secret", "link/../x", "/etc/passwd"];
    let rows: [Row; 16] = [
        (Mode::Default, &[], "Edit", &[], &["src/a.rs", "new.txt", "."]),
        (Mode::DontAsk, &[], "Edit", &[], &["src/a.rs"]),
        (
            Mode::AcceptEdits,
            &[],
            "Write",
            &["src/a.rs", "new/deeper.txt", "inner/a.rs", "ảnh/à.png", "link/../w/a"],
            &[
                ".git/hooks/pre-commit",
                "plain/config",
                ".mcp.json",
                ".claude/settings.json",
                ".cob/x",
                ".bashrc",
                "sub/.GIT/x",
                "src/.envrc",
            ],
        ),
        (Mode::Plan, &["Edit", "Edit(//**)"], "Edit", &[], &["src/a.rs"]),
        (Mode::Default, &["Edit"], "Edit", &["src/a.rs", "new.txt"], &[".git/config", "plain/config"]),
        (Mode::Default, &["Edit"], "Write", &["src/a.rs"], &[]),
        (Mode::Default, &["Write"], "Write", &["src/a.rs"], &[".git/config"]),
        (Mode::Default, &["Write"], "Edit", &[], &["src/a.rs"]),
        (
            Mode::Default,
            &["Edit(src/**)"],
            "Edit",
            &["src/a.rs", "src/deep/b", "inner/a.rs"],
            &["a.rs", "src", "x/src/a.rs"],
        ),
        (Mode::Default, &["Edit(src)"], "Edit", &["src/a.rs", "x/src/a.rs"], &["srcs/a"]),
        (Mode::Default, &["Edit(/src/)", "Edit(./x.md)"], "Edit", &["src/a.rs", "x.md"], &["x/src/a.rs", "y/x.md"]),
        (Mode::Default, &["Edit(*.md)"], "Edit", &["a.md", "src/deep/b.md"], &["a.mdx", "link/a.md"]),
        (Mode::Default, &["Edit(**)"], "Edit", &["a", "src/b"], &[".git/config", ".bashrc"]),
        (
            Mode::Default,
            &["Edit(.git/**)", "Edit(.bashrc)"],
            "Edit",
            &[".git/config", "plain/config", ".bashrc"],
            &["a"],
        ),
        (Mode::Default, &["Read"], "Edit", &[], &["a"]),
        (Mode::Default, &["Bash"], "Edit", &[], &["a"]),
    ];
    for (mode, rules, tool, yes, no) in rows {
        for path in yes {
            assert!(place.allowed(mode, rules, tool, Access::Write(path.into())), "{mode} {rules:?} {tool} {path}");
        }
        for path in no.iter().chain(&escapes) {
            assert!(!place.allowed(mode, rules, tool, Access::Write(path.into())), "{mode} {rules:?} {tool} {path}");
        }
    }
    for mode in [Mode::Default, Mode::AcceptEdits, Mode::Plan, Mode::DontAsk] {
        for path in ["src/a.rs", "none", ".git/config", "inner/x", ".", "src/../a"] {
            assert!(place.allowed(mode, &[], "Read", Access::Read(path.into())), "{mode} {path}");
        }
        for path in escapes {
            assert!(!place.allowed(mode, &[], "Read", Access::Read(path.into())), "{mode} {path}");
            assert!(!place.allowed(mode, &["Read", "Read(**)"], "Read", Access::Read(path.into())), "{mode} {path}");
            assert!(place.allowed(Mode::Bypass, &[], "Read", Access::Read(path.into())));
        }
    }
}

#[test]
fn rules_reach_outside_only_when_they_say_so() {
    let place = Place::new();
    for (rule, access, yes) in [
        ("Read(//ROOT/out/**)", Access::Read("link/secret".into()), true),
        ("Read(//ROOT/out/**)", Access::Read("../out/secret".into()), true),
        ("Read(//ROOT/out)", Access::Read("file-link".into()), true),
        ("Read(~/secret)", Access::Read("file-link".into()), true),
        ("Read(~/secret)", Access::Read("link/other".into()), false),
        ("Read(~/**)", Access::Write("link/other".into()), false),
        ("Edit(~/**)", Access::Write("dangling".into()), true),
        ("Edit(~/**)", Access::Write("link/.bashrc".into()), false),
        ("Edit(~/.bashrc)", Access::Write("link/.bashrc".into()), true),
        ("Grep(//ROOT/out)", Access::Read("link/secret".into()), false),
    ] {
        // `//ROOT` would be three slashes.
        let rule = rule.replace("//ROOT", "/ROOT");
        assert_eq!(place.allowed(Mode::Default, &[&rule], "Read", access.clone()), yes, "{rule} {access:?}");
    }
    let rule = ["Grep(/ROOT/out)"];
    assert!(place.allowed(Mode::Default, &rule, "Grep", Access::Read("link".into())));
}

#[test]
fn commands_are_allowed_when_every_part_is() {
    let place = Place::new();
    for (rules, yes, no) in [
        (&[][..], &[][..], &["ls", "true"][..]),
        (&["Bash"], &["ls", "a | b > c", "echo $(id)", ""], &[]),
        (&["Bash(*)"], &["ls", "echo $(id)"], &[]),
        (
            &["Bash(git *)"],
            &["git", "git status", "git add . && git commit -m 'x; y'", "git log 2>&1", "git\tstatus", " git status "],
            &[
                "gitk",
                "git status; rm x",
                "git status && ls",
                "git status | sh",
                "git status & rm x",
                "git status\nrm x",
                "git $(rm x)",
                "git `rm x`",
                "git log > f",
                "git log < f",
                "git diff <(rm x)",
                "FOO=1 git status",
                "sudo git status",
                "(git status)",
                "git status # '\nrm x\n# '",
                "git --version \"$\\\n(touch x)\"",
                "git --version $\\\n'\\'' ; id #'",
                "/bin/git status",
                "if git status; then rm x; fi",
                "",
                " ; ",
            ],
        ),
        (&["Bash(git:*)"], &["git status"], &["gitk"]),
        (&["Bash(git*)"], &["gitk", "git status"], &["ls", "gitx=1 ls", "2>/dev/null gitx=1 ls"]),
        (&["Bash(cargo test)"], &["cargo test", "cargo  test"], &["cargo test x", "cargo test; ls"]),
        (&["Bash(git *)", "Bash(wc *)"], &["git log | wc -l"], &["git log | sort"]),
        (&["Bash(echo $(date) > f)"], &["echo $(date) > f"], &["echo $(date) > g"]),
        (&["Edit", "Read"], &[], &["ls"]),
    ] {
        for line in yes {
            assert!(place.allowed(Mode::Default, rules, "Bash", Access::Run(line.to_string())), "{rules:?} {line:?}");
        }
        for line in no {
            assert!(!place.allowed(Mode::Default, rules, "Bash", Access::Run(line.to_string())), "{rules:?} {line:?}");
        }
    }
    assert!(!place.allowed(Mode::AcceptEdits, &[], "Bash", Access::Run("ls".into())));
    assert!(!place.allowed(Mode::Plan, &["Bash"], "Bash", Access::Run("ls".into())));
    assert!(place.allowed(Mode::Bypass, &[], "Bash", Access::Run("ls > $(x)".into())));
}

#[test]
fn other_tools_and_hosts() {
    let place = Place::new();
    let outside = Access::Write("/somewhere/else".into());
    assert!(place.allowed(Mode::Default, &["Deploy"], "Deploy", outside.clone()));
    assert!(!place.allowed(Mode::Default, &["Deploy"], "Destroy", outside));
    assert!(place.allowed(Mode::Default, &["Deploy"], "Deploy", Access::Run("x > y".into())));
    assert!(place.allowed(
        Mode::Default,
        &["WebFetch(domain:Example.org)"],
        "Any",
        Access::Network("example.org".into())
    ));
    assert!(!place.allowed(
        Mode::Default,
        &["WebFetch(domain:example.org)"],
        "Any",
        Access::Network("b.example.org".into())
    ));
    let rules = place.rules(Mode::Default, &[]);
    assert_eq!(rules.decide("Think", &[]), Decision::Allow { by: "it touches nothing".into() });
}

#[test]
fn bad_rules_are_named() {
    let place = Place::new();
    for (rule, fault) in [
        ("", "must begin with a tool's name"),
        ("(x)", "must begin with a tool's name"),
        ("Ba sh", "must begin with a tool's name"),
        ("Bash(git *", "no closing parenthesis"),
        ("Bash()", "says nothing"),
        ("bash(git *)", "which is written Bash"),
        ("edit", "which is written Edit"),
        ("Edit(../x)", "goes up"),
        ("Edit(!x)", "begins with !"),
        ("Edit(a[)", "no valid pattern"),
        ("WebFetch(example.org)", "domain:"),
        ("Deploy(x)", "does not understand"),
    ] {
        let error = place.rules(Mode::Default, &[]).allow(rule).unwrap_err();
        assert!(error.contains(fault) && error.contains(&format!("{rule:?}")), "{rule}: {error}");
    }
}

#[test]
fn modes_by_name() {
    for (text, mode) in [
        ("default", Mode::Default),
        ("accept-edits", Mode::AcceptEdits),
        ("acceptEdits", Mode::AcceptEdits),
        ("plan", Mode::Plan),
        ("dontAsk", Mode::DontAsk),
        ("dont-ask", Mode::DontAsk),
        ("bypass", Mode::Bypass),
        ("bypassPermissions", Mode::Bypass),
    ] {
        assert_eq!(text.parse(), Ok(mode));
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    assert!("yolo".parse::<Mode>().unwrap_err().contains("accept-edits"));
}

/// A refusal's advice is true: with the rules it names, the same call is allowed.
#[tokio::test]
async fn a_refusal_says_what_would_allow_it() {
    let place = Place::new();
    let out = place.root.join("out");
    let out = out.to_str().unwrap();
    for (tool, access, advice) in [
        ("Edit", Access::Write("src/a.rs".into()), "--allow Edit.".to_string()),
        ("Write", Access::Write("new.txt".into()), "--allow Edit.".to_string()),
        ("Write", Access::Write(".git/config".into()), "--allow 'Edit(/.git/config)'.".to_string()),
        ("Write", Access::Write("link/it's [1].md".into()), format!("--allow 'Edit(/{out}/it'\\''s \\[1\\].md)'.")),
        ("Read", Access::Read("file-link".into()), format!("--allow 'Read(/{out}/secret)'.")),
        ("Bash", Access::Run("git status".into()), "--allow 'Bash(git *)'.".to_string()),
        (
            "Bash",
            Access::Run("FOO='a b' git status".into()),
            "--allow 'Bash(FOO='\\''a b'\\'' git status)'.".to_string(),
        ),
        ("Bash", Access::Run("ls > f".into()), "--allow Bash.".to_string()),
        ("Bash", Access::Run("ls; wc x | ls".into()), "--allow 'Bash(ls *)' --allow 'Bash(wc *)'.".to_string()),
        ("Bash", Access::Run("python3 x.py".into()), "--allow 'Bash(python3 x.py)'.".to_string()),
        ("Bash", Access::Run("ls; rm *".into()), "--allow Bash.".to_string()),
        ("Fetch", Access::Network("example.org".into()), "--allow 'WebFetch(domain:example.org)'.".to_string()),
    ] {
        let rules = place.rules(Mode::Default, &[]);
        let permissions = Permissions::new(rules, Arc::new(Headless));
        let Settled::Refused { would_allow, text, .. } =
            permissions.settle(tool, &Value::Null, std::slice::from_ref(&access)).await
        else {
            panic!("{access:?} was allowed");
        };
        assert!(text.contains(&format!("The user can allow it with {advice}")), "{text}");
        let rules: Vec<&str> = would_allow.iter().map(String::as_str).collect();
        assert!(place.allowed(Mode::Default, &rules, tool, access.clone()), "{access:?} {rules:?}");
    }
    let plan = Permissions::new(place.rules(Mode::Plan, &[]), Arc::new(Headless));
    let Settled::Refused { would_allow, text, .. } =
        plan.settle("Edit", &Value::Null, &[Access::Write("a".into())]).await
    else {
        panic!("allowed");
    };
    assert!(would_allow.is_empty() && text.contains("plan") && !text.contains("--allow"), "{text}");
}

#[tokio::test]
async fn a_person_is_asked_and_remembered() {
    struct Answers(Mutex<Vec<Approval>>, Mutex<Vec<Request>>);
    #[async_trait]
    impl Approver for Answers {
        async fn approve(&self, request: &Request) -> Approval {
            self.1.lock().unwrap().push(request.clone());
            self.0.lock().unwrap().remove(0)
        }
    }
    let place = Place::new();
    let answers = vec![Approval::Once, Approval::Deny { reason: "not today".into() }, Approval::Session];
    let approver = Arc::new(Answers(Mutex::new(answers), Mutex::default()));
    let permissions = Permissions::new(place.rules(Mode::Default, &[]), approver.clone());
    let git = [Access::Run("git status".into())];
    assert_eq!(permissions.settle("Bash", &Value::Null, &git).await, Settled::Allowed { by: "the user, once".into() });
    let Settled::Refused { text, .. } = permissions.settle("Bash", &Value::Null, &git).await else { panic!("allowed") };
    assert!(text.contains("not today"), "{text}");
    let by = "the user, for the session: Bash(git *)".to_string();
    assert_eq!(permissions.settle("Bash", &Value::Null, &git).await, Settled::Allowed { by });
    // No more questions about git.
    let push = [Access::Run("git push".into())];
    assert_eq!(
        permissions.settle("Bash", &Value::Null, &push).await,
        Settled::Allowed { by: "rule Bash(git *)".into() }
    );
    assert_eq!(approver.1.lock().unwrap().len(), 3);
}

/// Lines of pieces that mean something to a shell: where a rule for `git` allows one, bash runs no other program.
#[test]
#[allow(clippy::disallowed_methods)]
fn a_rule_for_one_program_lets_no_other_run() {
    use proptest::strategy::{Strategy, ValueTree};
    use std::process::{Command, Stdio};
    #[rustfmt::skip]
    const PIECES: [&str; 27] = [
        "git ", "git", "id ", "id", "(id)", "\"$\\\n(id", "{id;}", "x=1 id", "x+=1 ", "x[0]=1 ", "\\\n", "\\\n", "\\", "\n", "$",
        ")\"", "}", "`", "'", "\"", ";", "&", "|", "<", ">", " ", "#",
    ];
    // Whatever is no function ends in the handler: nothing is in PATH.
    const SCRIPT: &str = r#"
        PATH=/nowhere
        git() { :; }
        command_not_found_handle() { case $1 in git*) ;; *) echo "$1" >&3 ;; esac; }
        while IFS= read -r -d '' line; do
            ran=$(eval "$line" 3>&1 >/dev/null 2>&1 </dev/null)
            [[ -z $ran ]] || printf '%q ran %q\n' "$line" "$ran"
        done
    "#;
    let place = Place::new();
    let rules = place.rules(Mode::Default, &["Bash(git *)", "Bash(git*)"]);
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let lines = proptest::collection::vec(proptest::sample::select(&PIECES), 1..10)
        .prop_map(|pieces| format!("git{}", pieces.concat()))
        .prop_filter("refused", |line| {
            matches!(rules.decide("Bash", &[Access::Run(line.clone())]), Decision::Allow { .. })
        });
    let file = place.root.join("lines");
    let allowed: Vec<u8> =
        (0..2000).flat_map(|_| (lines.new_tree(&mut runner).unwrap().current() + "\0").into_bytes()).collect();
    std::fs::write(&file, allowed).unwrap();
    let mut bash = Command::new("bash");
    bash.args(["-c", SCRIPT]).current_dir(place.root.join("out")).stdin(std::fs::File::open(&file).unwrap());
    let Ok(output) = bash.stderr(Stdio::inherit()).output() else { return };
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert_eq!(std::fs::read_dir(place.root.join("out")).unwrap().count(), 1, "a file was written");
}
