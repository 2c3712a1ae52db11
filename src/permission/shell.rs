//! A shell command line cut into its simple commands, or the reason why that is not certain.
//!
//! This is no shell parser. Whatever could hide a command (substitution, redirection to a file, a comment, a group …)
//! makes the line opaque, and an opaque line needs a rule for all commands.

/// The simple commands of a line, in order, as they are written, with each run of blanks outside quotes made one
/// space and harmless redirections (`2>&1`, `>/dev/null`) taken off.
pub(super) fn simple_commands(line: &str) -> Result<Vec<String>, &'static str> {
    const SUBSTITUTION: &str = "it substitutes a command's output or a computed value";
    let mut commands = Vec::new();
    let mut now = Simple::default();
    let line = join_continued(line);
    let line = line.as_str();
    let mut rest = line;
    // Bash evaluates an array index that a builtin is given as text, quoted or not: `test -v 'a[$(rm x)]'`.
    let index = line.split_once('[').map(|(_, index)| index.replace("\\\n", "")).unwrap_or_default();
    if index.contains("$(") || index.contains('`') {
        return Err(SUBSTITUTION);
    }
    while let Some(char) = rest.chars().next() {
        let after = &rest[char.len_utf8()..];
        let next = after.chars().next();
        rest = after;
        match char {
            ' ' | '\t' => now.blank(),
            '\n' => now.end(&mut commands),
            ';' if next == Some(';') => return Err("it has a `;;`"),
            ';' => now.end(&mut commands),
            '&' if next == Some('>') => return Err("it redirects to a file"),
            '&' | '|' => {
                let double = next == Some(char) || (char == '|' && next == Some('&'));
                rest = if double { &after[1..] } else { after };
                now.end(&mut commands);
            }
            '>' | '<' => {
                rest = harmless_redirection(char, after).ok_or("it redirects to or from a file")?;
                now.drop_descriptor();
                now.blank();
            }
            '(' | ')' => return Err("it has parentheses"),
            '`' => return Err(SUBSTITUTION),
            '$' if matches!(next, Some('(' | '{' | '[' | '\'' | '"')) => return Err(SUBSTITUTION),
            '\'' => {
                let end = after.find('\'').ok_or("a quote is not closed")?;
                now.push(&line[line.len() - after.len() - 1..][..end + 2]);
                rest = &after[end + 1..];
            }
            '"' => {
                let end = end_of_double_quotes(after).ok_or("a quote is not closed")?;
                let quoted = &after[..end];
                if quoted.contains('`') || quoted.contains("$(") || quoted.contains("${") || quoted.contains("$[") {
                    return Err(SUBSTITUTION);
                }
                now.push(&line[line.len() - after.len() - 1..][..end + 2]);
                rest = &after[end + 1..];
            }
            '\\' => match next {
                None => return Err("it ends in a backslash"),
                Some(escaped) => {
                    now.push(&line[line.len() - after.len() - 1..][..1 + escaped.len_utf8()]);
                    rest = &after[escaped.len_utf8()..];
                }
            },
            // What a comment hides (a quote, say) would be read otherwise by us than by the shell.
            '#' if now.at_word_start() => return Err("it has a comment"),
            control if control.is_control() => return Err("it has a control character"),
            _ => now.push(char.encode_utf8(&mut [0; 4])),
        }
    }
    now.end(&mut commands);
    Ok(commands)
}

/// The line without the backslashes at line ends that the shell takes out before it looks for anything else, so that a
/// `$` and a `(` with one between them are a `$(`. Inside single quotes they stay.
fn join_continued(line: &str) -> String {
    let mut joined = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    let mut quote = None;
    while let Some(char) = chars.next() {
        match char {
            '\\' if quote != Some('\'') => match chars.next() {
                Some('\n') => continue,
                Some(escaped) => joined.extend([char, escaped]),
                None => joined.push(char),
            },
            _ => {
                match quote {
                    None if matches!(char, '\'' | '"') => quote = Some(char),
                    Some(open) if open == char => quote = None,
                    _ => {}
                }
                joined.push(char);
            }
        }
    }
    joined
}

#[derive(Default)]
struct Simple {
    text: String,
    /// The last thing in `text` is a blank outside quotes.
    blank: bool,
}

impl Simple {
    fn push(&mut self, raw: &str) {
        self.text.push_str(raw);
        self.blank = false;
    }

    fn blank(&mut self) {
        if !self.text.is_empty() && !self.blank {
            self.text.push(' ');
            self.blank = true;
        }
    }

    fn at_word_start(&self) -> bool {
        // After an escaped blank we are inside a word; to call that a start only makes more lines opaque.
        self.text.is_empty() || self.text.ends_with([' ', '\t'])
    }

    /// Takes the `2` of `2>` off again.
    fn drop_descriptor(&mut self) {
        let before = self.text.trim_end_matches(|digit: char| digit.is_ascii_digit()).len();
        if before == 0 || self.text[..before].ends_with(' ') {
            self.text.truncate(before);
            self.blank = before > 0;
        }
    }

    fn end(&mut self, commands: &mut Vec<String>) {
        if self.blank {
            self.text.pop();
        }
        let simple = std::mem::take(self);
        if !simple.text.is_empty() {
            commands.push(simple.text);
        }
    }
}

/// What follows a redirection that touches no file, or nothing if it may touch one. `after`: the text after `sign`.
fn harmless_redirection(sign: char, after: &str) -> Option<&str> {
    let (target, rest) = match sign {
        '>' if after.starts_with("&1") || after.starts_with("&2") => after.split_at(2),
        _ => {
            let after = if sign == '>' { after.strip_prefix('>').unwrap_or(after) } else { after };
            let after = after.trim_start_matches([' ', '\t']);
            after.split_at(after.starts_with("/dev/null").then_some("/dev/null".len())?)
        }
    };
    debug_assert!(!target.is_empty());
    // The target is a whole word: not `/dev/nullx`, not `&1x`.
    (rest.is_empty() || rest.starts_with([' ', '\t', '\n', ';', '|', '&'])).then_some(rest)
}

fn end_of_double_quotes(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.char_indices().find_map(|(at, char)| {
        let ends = char == '"' && !escaped;
        escaped = char == '\\' && !escaped;
        ends.then_some(at)
    })
}

/// Whether `text` is what `pattern` says: `*` stands for anything but an assignment before the program, and a final ` *`
/// (or `:*`) also for nothing, so that `git *` is `git` and `git status` but not `gitk`. Without a `*` they must be equal.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix(":*").or_else(|| pattern.strip_suffix(" *")) {
        Some(prefix) => wildcard(prefix, text) || wildcard(&format!("{prefix} *"), text),
        None => wildcard(pattern, text),
    }
}

fn wildcard(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    // Where a `*` took in a part of an assignment, it would take in the program after it too: `git*`, `gitx=1 rm`.
    if first.len() < assignments(text) {
        return false;
    }
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

/// The length of the assignments that a simple command begins with, each with the space after it.
fn assignments(simple: &str) -> usize {
    let mut length = 0;
    loop {
        let rest = &simple[length..];
        let word = &rest[..end_of_word(rest)];
        let after_name = word.trim_start_matches(|char: char| char.is_ascii_alphanumeric() || char == '_');
        let named = after_name.len() < word.len() && !word.starts_with(|char: char| char.is_ascii_digit());
        if named && after_name.starts_with('[') {
            // An index may hold blanks: where the word ends is not certain, so all counts as assigned.
            return simple.len();
        }
        if !named || !(after_name.starts_with('=') || after_name.starts_with("+=")) {
            return length;
        }
        length = simple.len().min(length + word.len() + 1);
    }
}

/// Where the first blank outside quotes is.
fn end_of_word(text: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    let blank = text.char_indices().find(|&(_, char)| {
        match (quote, char) {
            _ if escaped => escaped = false,
            (None | Some('"'), '\\') => escaped = true,
            (None, '\'' | '"') => quote = Some(char),
            (Some(open), _) if open == char => quote = None,
            (None, ' ') => return true,
            _ => {}
        }
        false
    });
    blank.map_or(text.len(), |(at, _)| at)
}

/// A rule that allows this simple command: every use of the program, or, where that would mean every program (shells,
/// interpreters, programs that start others) or much harm, just this.
pub(super) fn rule_for(simple: &str) -> String {
    #[rustfmt::skip]
    const NOT_ALL_OF: [&str; 45] = [
        "if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "select", "function",
        "time", "coproc", "in", "eval", "exec", "source", ".", "command", "builtin", "trap",
        "sh", "bash", "dash", "zsh", "env", "xargs", "sudo", "su", "doas", "nohup", "nice", "timeout", "setsid", "ssh",
        "node", "ruby", "perl", "php", "rm", "dd", "chmod",
    ];
    let word = simple.split(' ').next().unwrap_or_default();
    let plain = |char: char| char.is_alphanumeric() || matches!(char, '_' | '-' | '.' | '/' | '+');
    let name = word.rsplit('/').next().unwrap_or_default();
    let narrow = NOT_ALL_OF.contains(&name) || name.starts_with("python");
    if !word.is_empty() && word.chars().all(plain) && !narrow {
        format!("Bash({word} *)")
    } else if simple.contains('*') {
        // An exact rule has no way to write a star.
        "Bash".to_string()
    } else {
        format!("Bash({simple})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_into_simple_commands() {
        #[track_caller]
        fn check(line: &str, expected: &[&str]) {
            assert_eq!(simple_commands(line).as_deref(), Ok(expected.map_to_strings().as_slice()), "{line}");
        }
        trait MapToStrings {
            fn map_to_strings(&self) -> Vec<String>;
        }
        impl MapToStrings for &[&str] {
            fn map_to_strings(&self) -> Vec<String> {
                self.iter().map(|text| text.to_string()).collect()
            }
        }
        check("", &[]);
        check("git  status \t -s ", &["git status -s"]);
        check("a; b && c || d | e |& f & g\nh", &["a", "b", "c", "d", "e", "f", "g", "h"]);
        check("a;b&&c||d|e&", &["a", "b", "c", "d", "e"]);
        check("echo 'a; b'  \"c && d\" e\\;f", &["echo 'a; b' \"c && d\" e\\;f"]);
        check("echo 'chào  bạn' | cat", &["echo 'chào  bạn'", "cat"]);
        check("echo \"a \\\" ; b\"", &["echo \"a \\\" ; b\""]);
        check("echo \"a \\\\\" ; b", &["echo \"a \\\\\"", "b"]);
        check("git \\\n status", &["git status"]);
        check("git st\\\natus", &["git status"]);
        check("git a &\\\n& git b |\\\n| git c\\\n", &["git a", "git b", "git c"]);
        check("git 'a\\\nb' \"c\\\nd\" e\\\\\nf", &["git 'a\\\nb' \"cd\" e\\\\", "f"]);
        check("git a 2>\\\n&1 >/dev/\\\nnull", &["git a"]);
        check("ls $HOME *.rs {a,b} ~", &["ls $HOME *.rs {a,b} ~"]);
        check("cargo test 2>&1 | tail -3", &["cargo test", "tail -3"]);
        check("a 2>/dev/null; b >/dev/null 2>&1; c </dev/null; d > /dev/null;e>&2", &["a", "b", "c", "d", "e"]);
        check("echo a2>/dev/null x", &["echo a2 x"]);
        check("echo a#b", &["echo a#b"]);
        check("awk '{print $(NF)}' f", &["awk '{print $(NF)}' f"]);
        check("find . -exec ls {} \\;", &["find . -exec ls {} \\;"]);
        check("FOO=1 git status", &["FOO=1 git status"]);
    }

    #[test]
    fn what_could_hide_a_command_is_opaque() {
        for line in [
            "echo $(id)",
            "echo `id`",
            "echo \"$(id)\"",
            "echo \"`id`\"",
            "echo ${x:-$(id)}",
            "echo \"${x@P}\"",
            "echo $((1+1))",
            "echo $[1]",
            "echo $'\\n'",
            "echo $\"x\"",
            "(id)",
            "f() { id; }",
            "diff <(id) b",
            "a >(b)",
            "echo a > f",
            "echo a >> f",
            "cat < f",
            "cat << E\nid\nE",
            "cat <<< x",
            "a &> f",
            "a >& f",
            "a >&1x",
            "a >/dev/nullx",
            "a >/dev/null/../x",
            "a 2>&1>f",
            "echo 'a",
            "echo \"a",
            "echo \\",
            "git status # x",
            "git status # don't\nid\n# '",
            "#x",
            "case x in y) id;; esac",
            "a\u{0}b",
            "a\rb",
            "a\u{1b}b",
            "test -v 'a[$(id)]'",
            "test -v 'a[`id`]'",
            "echo \"\\\\$(id)\"",
            // The shell takes a backslash at a line end out first.
            "git \"$\\\n(id)\"",
            "git $\\\n(id)",
            "git $\\\n\\\n(id)",
            "git $\\\n'\\'' ; id #'",
            "git $\\\n{x}",
            "git \"$\\\n{x}\"",
            "git <\\\n(id)",
            "git <\\\n<E",
            "git &\\\n>f",
            "git >&1\\\nx",
            "git ;\\\n;",
            "git \\\n# '",
            "git \\\\\\\n$(id)",
            "test -v 'a[$\\\n(id)]'",
            "git \\\n\\",
        ] {
            assert!(simple_commands(line).is_err(), "{line:?} {:?}", simple_commands(line));
        }
    }

    #[test]
    fn patterns() {
        for (pattern, yes, no) in [
            ("git *", &["git", "git status", "git push -f"][..], &["gitk", "agit x", "GIT x", " git"][..]),
            ("git:*", &["git", "git status"], &["gitk"]),
            ("git*", &["git", "gitk", "git status"], &["agit"]),
            ("cargo test", &["cargo test"], &["cargo test x", "cargo", "cargo tests"]),
            ("git * main", &["git push main", "git a b main"], &["git main", "git push main2"]),
            ("* --version", &["ls --version"], &["ls --versions"]),
            ("a*b*a", &["aba", "axbya"], &["ab", "aa", "a"]),
            ("*", &["", "x y"], &[]),
            ("ls *.rs", &["ls a.rs", "ls .rs"], &["ls", "ls a.rsx"]),
            ("echo chào *", &["echo chào", "echo chào bạn"], &["echo chàobạn"]),
            (
                "git*",
                &["git x=1", "git-x=1", "git.x[0]=1 y", "git\"x\"=1", "git"],
                &["gitx=1 id", "gitx=1", "gitx+=1 id", "gitx[0]=1 id", "gitx[a b]+=1 id", "git=' ' id", "_git=1 git"],
            ),
            ("A=1 git*", &["A=1 git", "A=1 gitk x"], &["A=1 gitx=1 id", "A=1 B=1 git", "A=12 git", "git"]),
            ("A='x y' git *", &["A='x y' git a"], &["A='x z' git a", "A='x y' B=1 git a"]),
            ("A=\"x \\\" y\" git *", &["A=\"x \\\" y\" git"], &["A=\"x \\\" y\" B=1 git"]),
            ("A=1 *", &["A=1 git", "A=1"], &["A=1 B=2 git", "A=1x git"]),
            ("A=* git", &[], &["A=1 git", "A=1 id git"]),
            ("A=1", &["A=1"], &["A=1 git"]),
            ("a[0]=1 git", &["a[0]=1 git"], &["a[0]=1 id"]),
            ("* --version", &[], &["A=1 git --version"]),
        ] {
            yes.iter().for_each(|text| assert!(matches(pattern, text), "{pattern} {text}"));
            no.iter().for_each(|text| assert!(!matches(pattern, text), "{pattern} {text}"));
        }
    }

    #[test]
    fn rules_to_suggest() {
        for (simple, rule) in [
            ("git status", "Bash(git *)"),
            ("./run.sh", "Bash(./run.sh *)"),
            ("FOO=1 git status", "Bash(FOO=1 git status)"),
            ("if true", "Bash(if true)"),
            ("/usr/bin/python3.11 -c 'x'", "Bash(/usr/bin/python3.11 -c 'x')"),
            ("sudo ls", "Bash(sudo ls)"),
            ("$X *", "Bash"),
        ] {
            assert_eq!(rule_for(simple), rule);
        }
    }
}
