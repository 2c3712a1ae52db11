//! What a call touches, the rules, and the one decision.
//!
//! A tool declares its [`Access`]es before it runs; [`Rules::decide`] judges them; [`Permissions::settle`] also asks,
//! where the decision is to ask. Without anybody to ask and without rules, a call may read inside the workspace and
//! nothing else.
//!
//! Rules are written as in Claude Code:
//!
//! | rule | allows |
//! |---|---|
//! | `Edit` | every tool that writes files, inside the workspace |
//! | `Edit(src/**)`, `Edit(*.md)` | the same, for paths that gitignore's syntax matches; `/x` and `./x` start at the workspace, `~/x` at the home folder, `//x` at the root |
//! | `Write`, `Write(…)` | only the tool of that name |
//! | `Read(//etc/hosts)` | every tool that reads |
//! | `Bash(git *)` | `git` and `git` with arguments; `Bash(git:*)` is the same, `Bash(git*)` is `gitk` too |
//! | `Bash(cargo test)` | exactly this |
//! | `Bash` | every command |
//! | `WebFetch(domain:example.org)` | this host |
//! | `MyTool` | whatever a tool that is not built in does |
//!
//! A command line of several commands is allowed when each of them is. One that cannot be cut into simple commands with
//! certainty (`$(…)`, a redirection to a file, a comment …) needs `Bash`, or a rule that says exactly this line. An
//! assignment before the program (`FOO=1 git status`) is taken in by no `*`: the rule must spell it (`Bash(FOO=1 git *)`).

mod path;
mod rule;
mod shell;

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use async_trait::async_trait;
use serde_json::Value;

pub use path::resolve;
use rule::{Bases, Rule};

/// One thing that a call is going to touch, declared by its tool before it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    Read(PathBuf),
    Write(PathBuf),
    /// A shell command line.
    Run(String),
    /// A host.
    Network(String),
}

/// What is allowed without a rule, and what happens to the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Reads inside the workspace; the rest is asked for.
    #[default]
    Default,
    /// Also writes inside the workspace, but not to [guarded](Rules) names.
    AcceptEdits,
    /// Reads only, whatever the rules say.
    Plan,
    /// As `Default`, but the rest is refused instead of asked for.
    DontAsk,
    /// Everything.
    Bypass,
}

impl Mode {
    const ALL: [Mode; 5] = [Mode::Default, Mode::AcceptEdits, Mode::Plan, Mode::DontAsk, Mode::Bypass];

    pub fn name(self) -> &'static str {
        match self {
            Mode::Default => "default",
            Mode::AcceptEdits => "accept-edits",
            Mode::Plan => "plan",
            Mode::DontAsk => "dont-ask",
            Mode::Bypass => "bypass",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    /// Also takes Claude Code's spellings (`acceptEdits`, `bypassPermissions` …).
    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |name: &str| name.replace('-', "").to_ascii_lowercase();
        let wanted = plain(text);
        let wanted = if wanted == "bypasspermissions" { "bypass" } else { &wanted };
        Mode::ALL.into_iter().find(|mode| plain(mode.name()) == wanted).ok_or_else(|| {
            let names: Vec<&str> = Mode::ALL.iter().map(|mode| mode.name()).collect();
            format!("there is no permission mode {text:?}; the modes are {}", names.join(", "))
        })
    }
}

/// The allow rules, the mode and the workspace.
///
/// Some names are guarded, because a program runs or trusts what is written there: `.git`, `.cob` and `.claude` folders,
/// `.mcp.json`, the files that shells read at their start, and a few of their kind. Writing there needs
/// a rule that spells the name (`Edit(.git/**)`) or the mode `bypass`.
#[derive(Clone, Debug)]
pub struct Rules {
    bases: Bases,
    mode: Mode,
    allow: Vec<Rule>,
}

/// What becomes of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// `by`: the rules or the mode that allowed it, for the log.
    Allow {
        by: String,
    },
    /// `would_allow`: rules that together would allow it; empty when none can.
    Ask {
        why: String,
        would_allow: Vec<String>,
    },
    Deny {
        why: String,
        would_allow: Vec<String>,
    },
}

/// Why one access is not allowed.
struct Objection {
    why: String,
    /// They would allow it; empty when none can.
    rules: Vec<String>,
}

const GUARDED_FOLDERS: [&str; 5] = [".git", ".cob", ".claude", ".vscode", ".idea"];
const GUARDED_FILES: [&str; 16] = [
    ".mcp.json",
    ".gitconfig",
    ".gitmodules",
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".zlogin",
    ".zlogout",
    ".envrc",
    ".ripgreprc",
    ".npmrc",
];

impl Rules {
    /// `workspace` must be absolute; it is resolved.
    pub fn new(workspace: &Path, mode: Mode) -> std::io::Result<Self> {
        let home = std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
        let bases = Bases { workspace: resolve(workspace)?, home: home.and_then(|home| resolve(&home).ok()) };
        Ok(Rules { bases, mode, allow: Vec::new() })
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Adds an allow rule. `Err` names the rule and its fault.
    pub fn allow(&mut self, rule: &str) -> Result<(), String> {
        self.allow.push(Rule::parse(rule, &self.bases)?);
        Ok(())
    }

    /// Judges all that one call of `tool` touches: it is allowed when each access is.
    pub fn decide(&self, tool: &str, accesses: &[Access]) -> Decision {
        if self.mode == Mode::Bypass {
            return Decision::Allow { by: "permission mode bypass".into() };
        }
        let mut by: Vec<String> = Vec::new();
        let mut objections: Vec<Objection> = Vec::new();
        for access in accesses {
            match self.judge(tool, access) {
                Ok(reason) if by.contains(&reason) => {}
                Ok(reason) => by.push(reason),
                Err(objection) => objections.push(objection),
            }
        }
        if objections.is_empty() {
            let nothing = by.is_empty().then(|| "it touches nothing".to_string());
            return Decision::Allow { by: nothing.unwrap_or_else(|| by.join(", ")) };
        }
        let why = objections.iter().map(|objection| objection.why.as_str()).collect::<Vec<_>>().join("; ");
        // Rules for a part of what is needed would promise too much.
        let mut would_allow: Vec<String> = Vec::new();
        if objections.iter().all(|objection| !objection.rules.is_empty()) {
            would_allow.extend(objections.into_iter().flat_map(|objection| objection.rules));
            would_allow.sort();
            would_allow.dedup();
        }
        match self.mode {
            Mode::Plan | Mode::DontAsk => Decision::Deny { why, would_allow },
            Mode::Default | Mode::AcceptEdits | Mode::Bypass => Decision::Ask { why, would_allow },
        }
    }

    fn judge(&self, tool: &str, access: &Access) -> Result<String, Objection> {
        match access {
            Access::Read(path) => self.judge_path(tool, access, path, false),
            Access::Write(_) | Access::Run(_) | Access::Network(_) if self.mode == Mode::Plan => {
                let why = "the permission mode plan allows only reading".to_string();
                Err(Objection { why, rules: Vec::new() })
            }
            Access::Write(path) => self.judge_path(tool, access, path, true),
            Access::Run(line) => self.judge_line(tool, access, line),
            Access::Network(host) => match self
                .allow
                .iter()
                .find(|rule| rule.allows_everything(tool, access) || rule.allows_host(tool, access, host))
            {
                Some(rule) => Ok(format!("rule {}", rule.text)),
                None => Err(Objection {
                    why: format!("no rule allows to reach {host}"),
                    rules: vec![format!("WebFetch(domain:{host})")],
                }),
            },
        }
    }

    fn judge_path(&self, tool: &str, access: &Access, path: &Path, write: bool) -> Result<String, Objection> {
        let workspace = &self.bases.workspace;
        let verb = if write { "write" } else { "read" };
        let real = resolve(&workspace.join(path)).map_err(|error| Objection {
            why: format!("where {} leads cannot be told: {error}", path.display()),
            rules: Vec::new(),
        })?;
        let inside = real.strip_prefix(workspace).ok();
        let guarded = if write { guarded_name(inside.unwrap_or(&real)) } else { None };
        if inside.is_some() && !write {
            return Ok("reading inside the workspace".into());
        }
        if inside.is_some() && guarded.is_none() && self.mode == Mode::AcceptEdits {
            return Ok("permission mode accept-edits".into());
        }
        if let Some(rule) =
            self.allow.iter().find(|rule| rule.allows_path(tool, access, &real, workspace, guarded.as_deref()))
        {
            return Ok(format!("rule {}", rule.text));
        }
        let shown = inside.filter(|inside| !inside.as_os_str().is_empty()).unwrap_or(&real).display();
        let led = if workspace.join(path) == real { String::new() } else { format!(" (from {})", path.display()) };
        let kind = if write { "Edit" } else { "Read" };
        let (why, rule) = match (inside, &guarded) {
            (None, _) => (
                format!("{shown}{led} is outside the workspace {}", workspace.display()),
                path_rule(kind, "//", real.strip_prefix("/").unwrap_or(&real)),
            ),
            (Some(inside), Some(name)) => (
                format!("to {verb} {shown}{led} needs a rule that spells {name}, because programs trust what is there"),
                path_rule(kind, "/", inside),
            ),
            (Some(_), None) => (format!("no rule allows to {verb} {shown}{led}"), Some(kind.to_string())),
        };
        Err(Objection { why, rules: rule.into_iter().collect() })
    }

    fn judge_line(&self, tool: &str, access: &Access, line: &str) -> Result<String, Objection> {
        if let Some(rule) =
            self.allow.iter().find(|rule| rule.allows_everything(tool, access) || rule.is_line(tool, access, line))
        {
            return Ok(format!("rule {}", rule.text));
        }
        let simple = shell::simple_commands(line).map_err(|why| Objection {
            why: format!("no rule allows to run any command, and this line cannot be judged by its parts: {why}"),
            rules: vec!["Bash".into()],
        })?;
        let mut by: Vec<&str> = Vec::new();
        let mut refused: Vec<&str> = Vec::new();
        for command in &simple {
            match self.allow.iter().find(|rule| rule.allows_command(tool, access, command)) {
                Some(rule) if by.contains(&rule.text.as_str()) => {}
                Some(rule) => by.push(&rule.text),
                None => refused.push(command),
            }
        }
        if simple.is_empty() {
            return Err(Objection { why: "the command is empty".into(), rules: Vec::new() });
        }
        if refused.is_empty() {
            return Ok(format!("rule {}", by.join(", ")));
        }
        let shown: Vec<String> = refused.iter().map(|command| format!("`{}`", shorten(command))).collect();
        let mut rules: Vec<String> = refused.iter().map(|command| shell::rule_for(command)).collect();
        if rules.iter().any(|rule| rule == "Bash") {
            rules = vec!["Bash".into()];
        }
        Err(Objection { why: format!("no rule allows to run {}", shown.join(", ")), rules })
    }
}

fn guarded_name(path: &Path) -> Option<String> {
    let names = path.components().map(|component| component.as_os_str().to_string_lossy().to_lowercase());
    let names: Vec<String> = names.collect();
    let file = names.last().filter(|name| GUARDED_FILES.contains(&name.as_str()));
    names.iter().find(|name| GUARDED_FOLDERS.contains(&name.as_str())).or(file).cloned()
}

/// A rule for just this path; none where its name cannot be written in a pattern.
fn path_rule(kind: &str, start: &str, path: &Path) -> Option<String> {
    let text = path.to_str().filter(|text| !text.chars().any(char::is_control) && !text.ends_with(' '))?;
    let escaped: String = text
        .chars()
        .flat_map(|char| ['*', '?', '[', ']', '{', '}', '\\'].contains(&char).then_some('\\').into_iter().chain([char]))
        .collect();
    Some(format!("{kind}({start}{escaped})"))
}

fn shorten(command: &str) -> String {
    const CHARS_MAX: usize = 120;
    match command.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}...", &command[..at]),
        None => command.to_string(),
    }
}

/// The words for a call that was refused: to the model, which must not try the same by another way, and to the user.
pub fn refusal(why: &str, would_allow: &[String]) -> String {
    let allow = match would_allow {
        [] => String::new(),
        rules => {
            let flags: Vec<String> = rules.iter().map(|rule| format!("--allow {}", quoted(rule))).collect();
            format!(" The user can allow it with {}.", flags.join(" "))
        }
    };
    format!(
        "Not allowed: {why}.{allow} Do not try this call again or another way to the same end; do what is possible without it, or say what you need."
    )
}

/// For a POSIX shell.
fn quoted(text: &str) -> String {
    let plain = |char: char| char.is_ascii_alphanumeric() || matches!(char, '_' | '-' | '.');
    match text.chars().all(plain) {
        true => text.to_string(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// What a person is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub tool: String,
    /// As the model gave them, so that a person can be shown what would be written.
    pub arguments: Value,
    pub accesses: Vec<Access>,
    pub why: String,
    /// The rules that [`Approval::Session`] would add; when empty, "for the session" means once.
    pub would_allow: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Approval {
    Once,
    /// And whatever the request's rules allow, until the process ends.
    Session,
    Deny {
        reason: String,
    },
}

/// Answers when the rules say: ask. Called for one call at a time; may take as long as a person takes, and its future
/// may be dropped when the run is stopped.
#[async_trait]
pub trait Approver: Send + Sync {
    async fn approve(&self, request: &Request) -> Approval;
}

/// Nobody is there: denies.
pub struct Headless;

#[async_trait]
impl Approver for Headless {
    async fn approve(&self, _: &Request) -> Approval {
        Approval::Deny { reason: String::new() }
    }
}

/// The rules of a run and whoever answers for them.
pub struct Permissions {
    rules: RwLock<Rules>,
    approver: Arc<dyn Approver>,
}

/// The end of the matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    Allowed {
        by: String,
    },
    /// `text`: for the model; says also what the user can do.
    Refused {
        why: String,
        would_allow: Vec<String>,
        text: String,
    },
}

impl Permissions {
    pub fn new(rules: Rules, approver: Arc<dyn Approver>) -> Self {
        Permissions { rules: RwLock::new(rules), approver }
    }

    /// Decides, and asks when the decision is to ask. The caller settles one call at a time, so that a person sees one
    /// question at a time.
    pub async fn settle(&self, tool: &str, arguments: &Value, accesses: &[Access]) -> Settled {
        let decision = self.rules.read().unwrap_or_else(|poisoned| poisoned.into_inner()).decide(tool, accesses);
        let (why, would_allow) = match decision {
            Decision::Allow { by } => return Settled::Allowed { by },
            Decision::Deny { why, would_allow } => (why, would_allow),
            Decision::Ask { why, would_allow } => {
                let (arguments, accesses) = (arguments.clone(), accesses.to_vec());
                let request = Request { tool: tool.into(), arguments, accesses, why, would_allow };
                match self.approver.approve(&request).await {
                    Approval::Once => return Settled::Allowed { by: "the user, once".into() },
                    Approval::Session => {
                        let mut rules = self.rules.write().unwrap_or_else(|poisoned| poisoned.into_inner());
                        let mut added = Vec::new();
                        for rule in &request.would_allow {
                            match rules.allow(rule) {
                                Ok(()) => added.push(rule.as_str()),
                                Err(fault) => tracing::warn!("not kept for the session: {fault}"),
                            }
                        }
                        let by = match added.as_slice() {
                            [] => "the user, once".to_string(),
                            added => format!("the user, for the session: {}", added.join(", ")),
                        };
                        return Settled::Allowed { by };
                    }
                    Approval::Deny { reason } if reason.is_empty() => (request.why, request.would_allow),
                    Approval::Deny { reason } => {
                        let text = format!(
                            "Not allowed: the user refused: {reason}. Do not try this call again or another way to the same end."
                        );
                        return Settled::Refused { why: reason, would_allow: request.would_allow, text };
                    }
                }
            }
        };
        let text = refusal(&why, &would_allow);
        Settled::Refused { why, would_allow, text }
    }
}

#[cfg(test)]
mod tests;
