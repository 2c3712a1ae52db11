//! `cob model`: list, pull, verify, info, rm, path.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::output::printable;
use super::progress::Progress;
use super::signals::Signals;
use crate::chat::qwen::ChatFormat;
use crate::hub::{DEFAULT_MODEL, Hub, HubError, HubSettings, Kind, Record, human_bytes};
use crate::model::config::Config;
use crate::model::kv::BLOCK;
use crate::model::{KvType, Source};

#[derive(Args, Debug)]
pub struct ModelArgs {
    #[command(subcommand)]
    pub command: ModelCommand,
    /// One JSON value on standard output
    #[arg(long, global = true)]
    pub json: bool,
    /// Fetch nothing; use what is here
    #[arg(long, global = true)]
    pub offline: bool,
}

#[derive(Subcommand, Debug)]
pub enum ModelCommand {
    /// List the known models and which of them are installed
    List,
    /// Fetch a model; an interrupted fetch goes on where it stopped
    Pull {
        /// As `cob model list` names it
        id: String,
        /// Take it from this file (or folder of files) instead; it is checked all the same
        #[arg(long, value_name = "PATH")]
        from: Option<PathBuf>,
    },
    /// Hash installed models again and compare
    Verify {
        /// All installed ones if not given
        id: Option<String>,
    },
    /// Say what is known of a model
    Info {
        /// An id, a GGUF file, or a safetensors folder
        #[arg(value_name = "ID|FILE", value_parser = NonEmptyStringValueParser::new())]
        model: String,
    },
    /// Remove an installed model
    Rm { id: String },
    /// Print the path of an installed model
    Path { id: String },
}

/// Runs the command on the real surroundings and returns the exit code.
pub fn run(args: ModelArgs) -> u8 {
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    let terminal = err.is_terminal();
    let settings = match HubSettings::from_env() {
        Ok(settings) => HubSettings { offline: settings.offline || args.offline, ..settings },
        Err(e) => return report(&e, args.json, &mut out, &mut err, 130),
    };
    let hub = Hub::new(settings);
    execute(&hub, args.command, args.json, terminal, &Signals::listen(), &mut out, &mut err)
}

/// The exit code of a failure: 2 for a name that means nothing, 4 for what was refused before any work, else 1.
/// `interrupted` is that of a cancellation.
pub fn exit_code(kind: Kind, interrupted: u8) -> u8 {
    match kind {
        Kind::Unknown => 2,
        Kind::Offline | Kind::Busy | Kind::NoMemory => 4,
        Kind::Cancelled => interrupted,
        Kind::NotInstalled | Kind::Unreachable | Kind::WrongDigest | Kind::DiskFull | Kind::Failed => 1,
    }
}

/// Runs a command on `hub`: results to `out`, everything else to `err`; `terminal` says whether a bar may be drawn on
/// standard error. Returns the exit code.
pub fn execute(
    hub: &Hub,
    command: ModelCommand,
    json: bool,
    terminal: bool,
    signals: &Signals,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let result = {
        let mut progress = Progress::new(err, terminal);
        answer(hub, command, signals, &mut progress)
    };
    match result {
        Ok(answer) => {
            let text = if json { pretty(&answer.json) } else { answer.text };
            match super::put(out, &text) {
                Ok(()) => answer.code,
                Err(why) => {
                    let _ = writeln!(err, "cob: {why}");
                    answer.code.max(1)
                }
            }
        }
        Err(e) => report(&e, json, out, err, signals.exit_code()),
    }
}

fn report(e: &HubError, json: bool, out: &mut dyn Write, err: &mut dyn Write, interrupted: u8) -> u8 {
    if json {
        let kind = format!("{:?}", e.kind);
        let _ = out.write_all(pretty(&json!({ "error": { "kind": kind, "message": e.to_string() } })).as_bytes());
    }
    let _ = writeln!(err, "cob: {}", printable(&e.to_string()));
    exit_code(e.kind, interrupted)
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

struct Answer {
    text: String,
    json: Value,
    code: u8,
}

impl Answer {
    fn new(text: String, json: Value) -> Answer {
        Answer { text, json, code: 0 }
    }
}

fn answer(hub: &Hub, command: ModelCommand, signals: &Signals, progress: &mut Progress) -> Result<Answer, HubError> {
    let mut events = |event: crate::hub::HubEvent| progress.event(event);
    let cancel = &signals.cancel;
    match command {
        ModelCommand::List => Ok(list(hub)),
        ModelCommand::Pull { id, from } => {
            let pulled = hub.pull(&id, from.as_deref(), cancel, &mut events)?;
            let checked: Vec<Value> = pulled
                .files
                .iter()
                .map(|f| json!({ "name": f.name, "sha256": f.sha256, "bytes": f.stamp.bytes, "checked": f.checked }))
                .collect();
            for file in pulled.files.iter().filter(|_| !pulled.already) {
                if !matches!(file.checked, crate::hub::Checked::Manifest | crate::hub::Checked::Hub) {
                    let note =
                        format!("{}: no digest is known for it; checked against {}", file.name, file.checked.as_str());
                    events(crate::hub::HubEvent::Note(note));
                }
            }
            let done = if pulled.already { "is already here" } else { "is installed" };
            let text = format!(
                "{} {done} ({}, from {}): {}\n",
                pulled.id,
                human_bytes(pulled.bytes),
                pulled.source,
                pulled.path.display()
            );
            let json = json!({
                "id": pulled.id,
                "path": pulled.path,
                "bytes": pulled.bytes,
                "sha256": pulled.digest,
                "source": pulled.source,
                "revision": pulled.revision,
                "already": pulled.already,
                "files": checked,
            });
            Ok(Answer::new(text, json))
        }
        ModelCommand::Verify { id } => {
            let ids = match id {
                Some(id) => vec![id],
                None => hub.manifests().iter().filter(|m| hub.is_present(m)).map(|m| m.id.clone()).collect(),
            };
            let mut text = String::new();
            let mut all = Vec::new();
            let mut code = 0;
            for id in ids {
                for file in hub.verify(&id, cancel, &mut events)? {
                    let verdict = match (&file.expected, file.ok) {
                        (Some(_), true) => "ok".to_string(),
                        (None, _) => format!("sha256 {}; nothing to compare it with yet, so it is kept", file.sha256),
                        (Some(expected), false) => {
                            code = 1;
                            format!(
                                "WRONG: sha256 {}, expected {expected}; `cob model rm {id}` and `cob model pull {id}`",
                                file.sha256
                            )
                        }
                    };
                    text.push_str(&format!("{}: {verdict}\n", file.path.display()));
                    all.push(json!({
                        "id": id,
                        "path": file.path,
                        "sha256": file.sha256,
                        "expected": file.expected,
                        "ok": file.ok,
                    }));
                }
            }
            if all.is_empty() {
                text = "no model is installed; `cob model list` shows what can be fetched\n".to_string();
            }
            Ok(Answer { text, json: Value::Array(all), code })
        }
        ModelCommand::Info { model } => {
            let mut lines = hub.info_lines(&model, cancel, &mut events)?;
            let path = lines.iter().find(|(label, _)| *label == "path").and_then(|(_, path)| path.as_str());
            if let Some(path) = path.map(PathBuf::from) {
                lines.extend(inside(&path));
            }
            let width = lines.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
            let text = lines.iter().map(|(label, value)| format!("{label:width$}  {}\n", in_words(value))).collect();
            let json = lines.into_iter().map(|(label, value)| (label.replace(' ', "_"), value)).collect();
            Ok(Answer::new(text, Value::Object(json)))
        }
        ModelCommand::Rm { id } => {
            let (paths, bytes) = hub.remove(&id)?;
            let unfinished = hub.settings().folders.models.join(".pull");
            let partial =
                if paths.iter().all(|path| path.starts_with(&unfinished)) { "the partial download of " } else { "" };
            let text = format!("removed {partial}`{id}` ({})\n", human_bytes(bytes));
            Ok(Answer::new(text, json!({ "id": id, "removed": paths, "bytes": bytes })))
        }
        ModelCommand::Path { id } => {
            let path = hub.path(&id)?;
            Ok(Answer::new(format!("{}\n", path.display()), json!({ "id": id, "path": path })))
        }
    }
}

/// A value of `info` for people, in one line.
fn in_words(value: &Value) -> String {
    match value {
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.into(),
        Value::Array(all) => all.iter().map(in_words).collect::<Vec<_>>().join(", "),
        Value::String(text) => printable(text).replace('\n', " "),
        other => other.to_string(),
    }
}

/// What the file itself says, and whether it can be run.
fn inside(path: &Path) -> Vec<(&'static str, Value)> {
    let source = match Source::open(path) {
        Ok(source) => source,
        Err(why) => return vec![("runs here", format!("no: {why}").into())],
    };
    let types = source.tensor_types();
    let tensors = types.iter().map(|t| format!("{} {}", t.tensors, t.name)).collect::<Vec<_>>().join(", ");
    let parameters: usize = types.iter().map(|t| t.elements).sum();
    let mut lines = vec![("tensors", tensors.into()), ("parameters", parameters.into())];
    match source.config() {
        Err(why) => lines.push(("runs here", format!("no: {why}").into())),
        Ok(config) => {
            let Config { layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, context, rope_theta, .. } =
                config;
            lines.extend([
                ("architecture", "qwen2".into()),
                ("layers", layers.into()),
                ("hidden size", format!("{hidden}, {intermediate} inside the MLP").into()),
                ("attention heads", format!("{heads} of {head_dim}, {kv_heads} for keys and values").into()),
                ("vocabulary", vocab.into()),
                ("trained context", format!("{context} tokens, RoPE base {rope_theta}").into()),
                ("kv bytes a token", config.kv_shape(KvType::F16).bytes(BLOCK).div_euclid(BLOCK).into()),
            ]);
            lines.extend(match ChatFormat::open(path, Some(vocab)) {
                Ok(format) if format.template.is_repaired() => {
                    vec![(
                        "chat template",
                        "shows calls with doubled braces, a known fault; single ones are used".into(),
                    )]
                }
                Ok(_) => vec![],
                Err(why) => vec![("runs here", format!("no chat: {why}").into())],
            });
            if lines.iter().all(|(label, _)| *label != "runs here") {
                lines.push(("runs here", "yes".into()));
            }
        }
    }
    lines
}

fn list(hub: &Hub) -> Answer {
    let models = &hub.settings().folders.models;
    let width = hub.manifests().iter().map(|m| m.id.len()).max().unwrap_or(0);
    let mut text =
        format!("  {:width$}  {:>9}  {:9}  {:13}  {:7}  tested\n", "id", "size", "installed", "licence", "sources");
    let mut all = Vec::new();
    for m in hub.manifests() {
        let installed = hub.is_installed(m);
        let (known, complete) = m.bytes();
        let path = m.path_in(models);
        let recorded = || Record::load(&PathBuf::from(format!("{}.json", path.display())));
        let bytes = match installed.then(recorded).flatten() {
            Some(record) => Some(record.files.iter().map(|f| f.stamp.bytes).sum()),
            None => complete.then_some(known),
        };
        let size = match bytes {
            Some(bytes) => human_bytes(bytes),
            None => format!("~{}", human_bytes(known)),
        };
        let sources: Vec<String> = m.sources.iter().map(ToString::to_string).collect();
        let mark = if m.id == DEFAULT_MODEL { '*' } else { ' ' };
        let yes = |b: bool| if b { "yes" } else { "no" };
        text.push_str(&format!(
            "{mark} {:width$}  {size:>9}  {:9}  {:13}  {:7}  {}\n",
            m.id,
            yes(installed),
            m.licence,
            sources.join(","),
            yes(m.tested)
        ));
        all.push(json!({
            "id": m.id,
            "default": m.id == DEFAULT_MODEL,
            "installed": installed,
            "path": installed.then_some(&path),
            "bytes": bytes,
            "repository": m.repository,
            "revision": m.revision,
            "licence": m.licence,
            "context_tokens": m.context_tokens,
            "sources": sources,
            "tested": m.tested,
        }));
    }
    text.push_str("\n* is used when no model is named. Any GGUF file or safetensors folder of the qwen2 architecture runs with --model PATH.\n");
    Answer::new(text, Value::Array(all))
}
