use super::*;

fn command(line: &str) -> Command {
    let mut command = Command::shell(line, std::env::temp_dir());
    command.output_bytes_max = 4096;
    command.timeout = Duration::from_secs(60);
    command
}

async fn output(line: &str) -> Finished {
    run(command(line), &CancellationToken::new()).await.unwrap()
}

/// Whether the process still runs (one that is dead and not collected does not).
#[cfg(target_os = "linux")]
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    !matches!(stat.rsplit(") ").next().and_then(|rest| rest.chars().next()), None | Some('Z' | 'X'))
}

#[cfg(target_os = "linux")]
async fn gone(pid: &str) -> bool {
    for _ in 0..200 {
        if !runs(pid) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    false
}

#[tokio::test]
async fn output_status_and_order() {
    #[track_caller]
    fn check(finished: Finished, status: Status, text: &str) {
        assert_eq!((finished.status, finished.stdout.text.as_str()), (status, text));
        assert_eq!(finished.ended, Ended::Itself);
        assert!(!finished.background_killed);
    }
    check(output("echo xin chào").await, Status::Code(0), "xin chào\n");
    check(output("echo 1; echo 2 >&2; echo 3; echo 4 >&2; exit 7").await, Status::Code(7), "1\n2\n3\n4\n");
    check(output("kill -9 $$").await, Status::Signal(9), "");
    check(output("no-such-program-here 2>/dev/null").await, Status::Code(127), "");
    // Standard input is closed: a program that asks gets the end, not a wait.
    check(output("cat; read line; echo \"<$line>\"").await, Status::Code(0), "<>\n");
    check(
        output("echo $PAGER $GIT_PAGER $GIT_TERMINAL_PROMPT $TERM $NO_COLOR").await,
        Status::Code(0),
        "cat cat 0 dumb 1\n",
    );
    check(output("yes | head -2").await, Status::Code(0), "y\ny\n");
    let lossy = output("printf 'a\\377b'").await;
    assert_eq!((lossy.stdout.text.as_str(), lossy.stdout.lossy), ("a\u{fffd}b", true));
}

#[tokio::test]
async fn streams_apart() {
    let spec = Command { streams: Streams::Apart, ..command("echo out; echo err >&2") };
    let finished = run(spec, &CancellationToken::new()).await.unwrap();
    assert_eq!((finished.stdout.text.as_str(), finished.stderr.text.as_str()), ("out\n", "err\n"));
}

#[tokio::test]
async fn arguments_are_not_read_by_a_shell() {
    let program = Program::Direct { path: "echo".into(), arguments: vec!["$HOME; ls".into()] };
    let finished = run(Command { program, ..command("") }, &CancellationToken::new()).await.unwrap();
    assert_eq!(finished.stdout.text, "$HOME; ls\n");
}

#[tokio::test]
async fn what_cannot_start_is_named() {
    let program = Program::Direct { path: "/no/such/program".into(), arguments: Vec::new() };
    let error = run(Command { program, ..command("") }, &CancellationToken::new()).await.unwrap_err();
    assert!(error.to_string().contains("could not start /no/such/program"), "{error}");
    let error = run(Command { cwd: "/no/such/folder".into(), ..command("true") }, &CancellationToken::new()).await;
    assert!(error.unwrap_err().to_string().contains("/no/such/folder is not a folder"));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_timeout_kills_the_whole_group() {
    // The grandchild ignores the polite signal, and so does the shell.
    let line = "trap '' TERM; (trap '' TERM; sleep 600) & echo $!; sleep 600";
    let spec = Command { timeout: Duration::from_millis(1500), ..command(line) };
    let finished = run(spec, &CancellationToken::new()).await.unwrap();
    assert_eq!((finished.ended, finished.status), (Ended::TimedOut, Status::Signal(9)));
    assert!(gone(&finished.stdout.text).await);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn cancelling_and_dropping_kill_the_whole_group() {
    let cancel = CancellationToken::new();
    let folder = tempfile::tempdir().unwrap();
    for dropped in [false, true] {
        let file = folder.path().join(format!("pid-{dropped}"));
        let spec = command(&format!("sleep 600 & echo $! > {}; wait", file.display()));
        let token = cancel.child_token();
        let task = tokio::spawn({
            let token = token.clone();
            async move { run(spec, &token).await }
        });
        let pid = loop {
            match std::fs::read_to_string(&file) {
                Ok(pid) if pid.ends_with('\n') => break pid,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        assert!(runs(&pid));
        if dropped {
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        } else {
            token.cancel();
            assert_eq!(task.await.unwrap().unwrap().ended, Ended::Cancelled);
        }
        assert!(gone(&pid).await, "dropped: {dropped}");
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_background_child_neither_hangs_the_call_nor_outlives_it() {
    // One holds the pipe; the other does not.
    for line in ["sleep 600 & echo $!", "sleep 600 >/dev/null 2>&1 & echo $!"] {
        let finished = output(line).await;
        assert_eq!((finished.ended, finished.status), (Ended::Itself, Status::Code(0)), "{line}");
        assert!(finished.background_killed, "{line}");
        assert!(gone(&finished.stdout.text).await, "{line}");
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn what_left_the_group_does_not_outlive_the_call_either() {
    async fn check(line: &str, ended: Ended) {
        let spec = Command { timeout: Duration::from_millis(1500), ..command(line) };
        let finished = run(spec, &CancellationToken::new()).await.unwrap();
        assert_eq!((finished.ended, finished.background_killed), (ended, ended == Ended::Itself), "{line}");
        assert!(gone(&finished.stdout.text).await, "{line}");
    }
    check("setsid sh -c 'echo $$; exec sleep 600' & sleep 0.1", Ended::Itself).await;
    check("setsid sh -c 'echo $$; exec sleep 600 >/dev/null 2>&1' & sleep 0.1", Ended::Itself).await;
    // Its parent has ended, and it ignores the polite signal.
    check("(setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 600' &); sleep 600", Ended::TimedOut).await;
}

#[tokio::test]
async fn a_process_that_cannot_be_found_does_not_hang_the_call() {
    let finished = output("setsid env -i sleep 5 & sleep 0.1; echo done").await;
    assert_eq!(finished.stdout.text, "done\n");
}

#[tokio::test]
async fn a_flood_is_bounded() {
    let finished = output("yes 'chào' | head -c 60000000").await;
    assert!(finished.stdout.text.len() <= 4096 + 64);
    assert_eq!(finished.stdout.bytes_total, 60_000_000);
    let cut =
        format!("[... {} of {} bytes of output cut here ...]", finished.stdout.bytes_cut, finished.stdout.bytes_total);
    assert!(finished.stdout.text.lines().all(|line| line == "chào" || line == cut));
    assert!(finished.stdout.text.contains(&cut) && !finished.stdout.lossy);
    // One that does not end by itself ends with its time.
    let spec = Command { timeout: Duration::from_millis(300), ..command("yes") };
    let finished = run(spec, &CancellationToken::new()).await.unwrap();
    assert_eq!(finished.ended, Ended::TimedOut);
    assert!(finished.stdout.text.len() <= 4096 + 64);
}

#[tokio::test]
async fn given_variables_stand_whatever_the_policy() {
    let mut spec = command("echo \"$EXTRA_TOKEN\"");
    spec.variables.push(("EXTRA_TOKEN".into(), "given".into()));
    let finished = run(spec, &CancellationToken::new()).await.unwrap();
    assert_eq!(finished.stdout.text, "given\n");
}

#[test]
fn run_to_end_runs_waits_and_stops() {
    let dir = std::env::temp_dir();
    let cancel = CancellationToken::new();
    let output = run_to_end("sh", &["-c", "echo out; echo err >&2; exit 3"], &dir, &cancel).unwrap();
    assert_eq!((output.status.code(), output.stdout, output.stderr), (Some(3), b"out\n".to_vec(), b"err\n".to_vec()));
    let error = run_to_end("no-such-program-here", &["x"], &dir, &cancel).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert!(error.to_string().contains("no-such-program-here"));
    // A child left behind does not hold the reader.
    let output = run_to_end("sh", &["-c", "sleep 600 & echo on"], &dir, &cancel).unwrap();
    assert_eq!(output.stdout, b"on\n");
    cancel.cancel();
    let error = run_to_end("sleep", &["600"], &dir, &cancel).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Interrupted);
}
