//! Asks the person at the terminal whether a call may run.

use std::io::{BufRead, Write};

use async_trait::async_trait;
use serde_json::Value;

use super::output::printable;
use crate::permission::{Access, Approval, Approver, Request};

/// Asks on standard error and reads the answer from standard input; both must be terminals.
pub struct Terminal;

#[async_trait]
impl Approver for Terminal {
    async fn approve(&self, request: &Request) -> Approval {
        let question = question(request);
        let for_session = !request.would_allow.is_empty();
        let (send, receive) = tokio::sync::oneshot::channel();
        // A thread of its own: a read from a terminal cannot be called off. It gives up when nobody waits for it any
        // more, so that it does not take the next line of a chat.
        std::thread::spawn(move || {
            let mut err = std::io::stderr();
            let _ = err.write_all(question.as_bytes()).and_then(|()| err.flush());
            while !send.is_closed() {
                if has_input() {
                    let mut line = String::new();
                    let read = std::io::stdin().lock().read_line(&mut line);
                    let _ = send.send(if read.is_ok() { line } else { String::new() });
                    return;
                }
            }
        });
        answer(&receive.await.unwrap_or_default(), for_session)
    }
}

/// Waits a moment for a line on standard input.
#[cfg(unix)]
fn has_input() -> bool {
    const WAIT_MS: i32 = 100;
    let mut input = libc::pollfd { fd: libc::STDIN_FILENO, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one pollfd that outlives the call.
    unsafe { libc::poll(&mut input, 1, WAIT_MS) != 0 }
}

#[cfg(not(unix))]
fn has_input() -> bool {
    true
}

fn question(request: &Request) -> String {
    let touches = request.accesses.iter().map(|access| match access {
        Access::Read(path) => format!("  reads {}\n", path.display()),
        Access::Write(path) => format!("  writes {}\n", path.display()),
        Access::Run(line) => format!("  runs {line}\n"),
        Access::Network(host) => format!("  talks to {host}\n"),
    });
    let touches: String = touches.chain(changes(&request.arguments)).collect();
    let session = match request.would_allow.as_slice() {
        [] => String::new(),
        rules => format!(", [s] yes, and {} for the session", rules.join(" and ")),
    };
    printable(&format!(
        "Allow {}?\n{touches}  [y] yes, once{session}, [n] no, or type what to do instead: ",
        request.tool
    ))
}

/// Of a text that would be written, in lines.
const SHOWN_LINES_MAX: usize = 20;

/// What `Edit` would take away and put in, what `Write` would write.
fn changes(arguments: &Value) -> Vec<String> {
    let parts = [("old_string", '-'), ("new_string", '+'), ("content", '+')];
    let texts = parts.iter().filter_map(|(name, sign)| Some((arguments[name].as_str()?, sign)));
    let mut shown = Vec::new();
    for (text, sign) in texts {
        shown.extend(text.lines().take(SHOWN_LINES_MAX).map(|line| format!("  {sign} {line}\n")));
        match text.lines().count().saturating_sub(SHOWN_LINES_MAX) {
            0 => {}
            more => shown.push(format!("  {sign} … {more} more lines\n")),
        }
    }
    shown
}

/// Whatever is not clearly a yes is a no, and said to the model.
fn answer(line: &str, for_session: bool) -> Approval {
    match line.trim().to_lowercase().as_str() {
        "y" | "yes" => Approval::Once,
        "s" | "session" if for_session => Approval::Session,
        "" | "n" | "no" => Approval::Deny { reason: "the user said no".into() },
        other => Approval::Deny { reason: format!("the user said: {}", printable(other)) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_yes_is_a_yes() {
        let check =
            |line: &str, for_session, expected: Approval| assert_eq!(answer(line, for_session), expected, "{line}");
        check("y\n", true, Approval::Once);
        check(" YES \n", false, Approval::Once);
        check("s\n", true, Approval::Session);
        let deny = |reason: &str| Approval::Deny { reason: reason.into() };
        check("s\n", false, deny("the user said: s"));
        check("", true, deny("the user said no"));
        check("use another file\n", true, deny("the user said: use another file"));
    }

    #[test]
    fn the_question_names_what_is_touched_and_drives_no_terminal() {
        let request = Request {
            tool: "Bash".into(),
            arguments: Value::Null,
            accesses: vec![Access::Run("rm -r x\x1b[1A".into()), Access::Write("/w/x".into())],
            why: String::new(),
            would_allow: vec!["Bash(rm *)".into()],
        };
        insta::assert_snapshot!(question(&request), @r"
        Allow Bash?
          runs rm -r x[1A
          writes /w/x
          [y] yes, once, [s] yes, and Bash(rm *) for the session, [n] no, or type what to do instead: 
        ");
        let content = (1..=22).map(|n| format!("dòng {n}\n")).collect::<String>();
        let arguments = serde_json::json!({"file_path": "x", "old_string": "a\nb", "new_string": "a\nc\x1b[2J", "content": content});
        let text = question(&Request { arguments, would_allow: Vec::new(), ..request });
        assert!(text.contains("  - a\n  - b\n  + a\n  + c[2J\n  + dòng 1\n"), "{text}");
        assert!(
            text.ends_with("  + dòng 20\n  + … 2 more lines\n  [y] yes, once, [n] no, or type what to do instead: "),
            "{text}"
        );
    }
}
