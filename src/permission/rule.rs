//! One allow rule: `Tool` or `Tool(what)`.

use std::path::{Path, PathBuf};

use ignore::gitignore::{Gitignore, GitignoreBuilder};

use super::{Access, shell};

/// The names that a rule may spell wrongly only by their case; a rule for a tool of this name that is written
/// otherwise would silently never match.
const KNOWN: [&str; 8] = ["Read", "Write", "Edit", "LS", "Glob", "Grep", "Bash", "WebFetch"];

/// Where the patterns of path rules start.
#[derive(Clone, Debug)]
pub(super) struct Bases {
    /// Resolved.
    pub(super) workspace: PathBuf,
    /// Resolved; none when there is no home folder.
    pub(super) home: Option<PathBuf>,
}

#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub(super) text: String,
    tool: String,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Everything,
    /// As written, with `*`.
    Command(String),
    Path(Pattern),
    Domain(String),
}

#[derive(Clone, Debug)]
struct Pattern {
    base: PathBuf,
    glob: Gitignore,
    /// The parts of the pattern between slashes, in lower case.
    parts: Vec<String>,
}

impl Rule {
    /// `Err` names the rule and says what is wrong with it.
    pub(super) fn parse(text: &str, bases: &Bases) -> Result<Rule, String> {
        let fault = |why: String| format!("the rule {text:?} {why}");
        let trimmed = text.trim();
        let (tool, what) = match trimmed.split_once('(') {
            None => (trimmed, None),
            Some((tool, what)) => match what.strip_suffix(')') {
                Some(what) => (tool, Some(what.trim())),
                None => return Err(fault("has no closing parenthesis at its end".into())),
            },
        };
        let plain = |char: char| char.is_alphanumeric() || matches!(char, '_' | '-' | '.');
        if tool.is_empty() || !tool.chars().all(plain) {
            return Err(fault("must begin with a tool's name, as in Edit or Bash(git *)".into()));
        }
        if let Some(known) = KNOWN.iter().find(|known| known.eq_ignore_ascii_case(tool) && **known != tool) {
            return Err(fault(format!("names the tool {tool}, which is written {known}")));
        }
        let what = match (tool, what) {
            (_, None) => What::Everything,
            (_, Some("")) => return Err(fault(format!("says nothing in its parentheses; for all of it write {tool}"))),
            ("Bash", Some("*")) => What::Everything,
            ("Bash", Some(pattern)) => What::Command(pattern.to_string()),
            ("WebFetch", Some(what)) => match what.strip_prefix("domain:").map(str::trim) {
                Some(domain) if !domain.is_empty() => What::Domain(domain.to_ascii_lowercase()),
                _ => return Err(fault("must have the form WebFetch(domain:example.org)".into())),
            },
            ("Read" | "Write" | "Edit" | "LS" | "Glob" | "Grep", Some(pattern)) => {
                What::Path(Pattern::parse(pattern, bases).map_err(fault)?)
            }
            (_, Some(_)) => {
                let why = format!("has parentheses, which {tool} does not understand; write {tool} alone");
                return Err(fault(why));
            }
        };
        Ok(Rule { text: trimmed.to_string(), tool: tool.to_string(), what })
    }

    /// Whether it is about this kind of access by this tool: `Read`, `Edit` and `Bash` speak of every tool that reads,
    /// edits or runs; any other name speaks of the tool of that name.
    fn concerns(&self, tool: &str, access: &Access) -> bool {
        let by_kind = match access {
            Access::Read(_) => "Read",
            Access::Write(_) => "Edit",
            Access::Run(_) => "Bash",
            Access::Network(_) => "WebFetch",
        };
        let kind = ["Read", "Edit", "Bash", "WebFetch"].contains(&self.tool.as_str());
        if kind { self.tool == by_kind } else { self.tool == tool }
    }

    /// `path`: resolved. `guarded`: the name in it that keeps a rule from matching unless the rule spells it.
    pub(super) fn allows_path(
        &self,
        tool: &str,
        access: &Access,
        path: &Path,
        workspace: &Path,
        guarded: Option<&str>,
    ) -> bool {
        if !self.concerns(tool, access) {
            return false;
        }
        match &self.what {
            // A bare name of ours means the workspace. A tool that is not ours knows what it touches, and whoever
            // names it allows that.
            What::Everything if KNOWN.contains(&self.tool.as_str()) => path.starts_with(workspace) && guarded.is_none(),
            What::Everything => true,
            What::Path(pattern) => {
                pattern.matches(path) && guarded.is_none_or(|name| pattern.parts.iter().any(|part| part == name))
            }
            What::Command(_) | What::Domain(_) => false,
        }
    }

    /// `simple`: one simple command, or a whole line.
    pub(super) fn allows_command(&self, tool: &str, access: &Access, simple: &str) -> bool {
        self.concerns(tool, access) && matches!(&self.what, What::Command(pattern) if shell::matches(pattern, simple))
    }

    /// For a line that cannot be cut: the rule has no `*` and says exactly this.
    pub(super) fn is_line(&self, tool: &str, access: &Access, line: &str) -> bool {
        let exact = |pattern: &String| !pattern.contains('*') && pattern == line.trim();
        self.concerns(tool, access) && matches!(&self.what, What::Command(pattern) if exact(pattern))
    }

    pub(super) fn allows_everything(&self, tool: &str, access: &Access) -> bool {
        self.concerns(tool, access) && matches!(self.what, What::Everything)
    }

    pub(super) fn allows_host(&self, tool: &str, access: &Access, host: &str) -> bool {
        self.concerns(tool, access)
            && matches!(&self.what, What::Domain(domain) if domain == &host.to_ascii_lowercase())
    }
}

impl Pattern {
    /// gitignore's syntax, with `//` for the root of the file system, `~/` for the home folder, and `/` or `./` for the
    /// workspace. Without one of them it is found at any depth if it has no slash, else from the workspace.
    fn parse(text: &str, bases: &Bases) -> Result<Pattern, String> {
        let parts: Vec<String> = text.split('/').map(str::to_lowercase).collect();
        if parts.iter().any(|part| part == "..") {
            return Err("goes up with `..`; write the whole path, with // before it".into());
        }
        if text.starts_with(['!', '#']) {
            return Err("begins with ! or #, which an allow rule cannot".into());
        }
        let (base, glob) = if let Some(rest) = text.strip_prefix("//") {
            (PathBuf::from("/"), format!("/{rest}"))
        } else if let Some(rest) = text.strip_prefix("~/") {
            (bases.home.clone().ok_or("begins with ~, but HOME is not set")?, format!("/{rest}"))
        } else if let Some(rest) = text.strip_prefix("./") {
            (bases.workspace.clone(), format!("/{rest}"))
        } else {
            (bases.workspace.clone(), text.to_string())
        };
        let mut builder = GitignoreBuilder::new(&base);
        builder.allow_unclosed_class(false);
        builder.add_line(None, &glob).map_err(|error| format!("has no valid pattern: {error}"))?;
        let glob = builder.build().map_err(|error| format!("has no valid pattern: {error}"))?;
        if glob.num_ignores() != 1 {
            return Err("has a pattern that matches nothing".into());
        }
        Ok(Pattern { base, glob, parts })
    }

    /// `path`: resolved. A pattern that matches a folder matches all that is in it.
    fn matches(&self, path: &Path) -> bool {
        // Strictly below: the matcher wants a path under its root.
        path.strip_prefix(&self.base).is_ok_and(|below| {
            !below.as_os_str().is_empty() && self.glob.matched_path_or_any_parents(below, path.is_dir()).is_ignore()
        })
    }
}
