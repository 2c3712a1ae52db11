//! The front end: the one room that prints.
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 a usage error, 3 stopped
//! by a limit, 4 refused before or instead of work, 130 interrupted, 143 terminated (SIGTERM, SIGQUIT, or SIGHUP: its
//! terminal was closed).

mod approve;
mod args;
mod bench;
mod cache;
mod chat;
mod cost;
mod doctor;
mod grid;
mod inspect;
mod interrupts;
pub mod model;
mod output;
pub mod progress;
mod run;
mod scripted;
mod session;
mod setup;
pub mod signals;
mod tool_file;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::message::StopReason;
use crate::process;

/// An AI agent on a small Qwen2.5 that lives in the same process
#[derive(Parser)]
#[command(name = "cob", version, max_term_width = 100, after_long_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run one task to its answer
    Run(run::RunArgs),
    /// Talk, task after task, in one session
    Chat(chat::ChatArgs),
    /// Model files: list, pull, verify, info, rm, path
    Model(model::ModelArgs),
    /// Sessions: list, show, path, rm
    Session(session::SessionArgs),
    /// Prefixes kept on disk: list, verify, clear
    Cache(cache::CacheArgs),
    /// The tools a model would be offered, and what each costs in tokens
    Tools(inspect::ToolsArgs),
    /// The exact prompt of a conversation: text, ids, segments
    Render(inspect::RenderArgs),
    /// The token ids of a text
    Tokenize(inspect::TokenizeArgs),
    /// What tools, skills, sessions and texts cost: tokens, prefill time, memory
    Cost(cost::CostArgs),
    /// How fast a model reads and writes on this machine
    Bench(bench::BenchArgs),
    /// What this machine and this build can do, and where things lie
    Doctor(doctor::DoctorArgs),
    /// A completion script for a shell
    Completions { shell: clap_complete::Shell },
    /// The manual page, or with --dir one for each command
    Man(ManArgs),
}

#[derive(Args)]
struct ManArgs {
    /// Write all pages into this folder
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Exit codes:
  0    done
  1    failed
  2    wrong usage
  3    stopped by a limit (turns, tokens, time, repeats)
  4    refused before or instead of work (context overflow, locked session, a model that cannot run here)
  130  interrupted
  143  terminated

Environment:
  COB_MODEL                        the model, where --model names none
  COB_HOME                         one folder for models, sessions and settings
  XDG_CACHE_HOME, XDG_STATE_HOME   models and kept prefixes, sessions
  HF_HOME, HF_TOKEN, HF_ENDPOINT   the Hugging Face hub
  NO_COLOR, COB_LOG                plain text; what is logged (error, warn, info, debug, trace)

Files:
  ~/.cache/cob/models, ~/.cache/cob/kv (kept prefixes), ~/.local/state/cob/sessions,
  ~/.config/cob/config.toml (model = \"ID\")

Examples:
  cob run \"Which file defines parse_config?\"
  cob run \"In config.ini change the port to 9090.\" --permission-mode accept-edits
  git diff | cob run - --tools none --system \"Summarise this change in one sentence.\"
  cob cost tools --turns 20
  cob chat --continue";

/// Runs the program.
pub fn main() -> ExitCode {
    let level = tracing_subscriber::EnvFilter::try_from_env("COB_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(level).with_writer(std::io::stderr).without_time().init();
    signals::outlive_the_file_limit();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return ExitCode::from(misused(&error)),
    };
    let code = match cli.command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Model(args) => model::run(args),
        Command::Session(args) => session::run(args),
        Command::Cache(args) => cache::run(args),
        Command::Tools(args) => inspect::tools(args),
        Command::Render(args) => inspect::render(args),
        Command::Tokenize(args) => inspect::tokenize(args),
        Command::Cost(args) => cost::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions { shell } => completions(shell),
        Command::Man(args) => man(args),
    };
    // A tool that did not end when it was told to is not waited for, and neither may its children stay.
    process::kill_all();
    ExitCode::from(code)
}

/// Says what is wrong with the flags, or shows the help that was asked for; the exit code. A program that reads JSON gets its one
/// result all the same.
fn misused(error: &clap::Error) -> u8 {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let format = words.iter().enumerate().find_map(|(at, word)| match word.split_once('=') {
        Some(("--output-format", format)) => Some(format),
        _ if word == "--output-format" => words.get(at + 1).map(String::as_str),
        _ => None,
    });
    let format = format.and_then(|format| <args::OutputFormat as clap::ValueEnum>::from_str(format, false).ok());
    match format {
        Some(format) if error.use_stderr() && format != args::OutputFormat::Text => {
            let text = error.render().to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            let mut front = output::Front::new(format, false);
            front.result(&output::Report::without_agent(None, None, StopReason::Refused, line), Default::default());
        }
        _ => {
            let _ = error.print();
        }
    }
    error.exit_code() as u8
}

fn completions(shell: clap_complete::Shell) -> u8 {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cob", &mut script);
    print(&String::from_utf8_lossy(&script))
}

fn man(args: ManArgs) -> u8 {
    let result = match &args.dir {
        None => {
            let mut page = Vec::new();
            let rendered = clap_mangen::Man::new(Cli::command()).render(&mut page);
            rendered.map(|()| print(&String::from_utf8_lossy(&page)))
        }
        Some(dir) => {
            std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir)).map(|()| 0)
        }
    };
    match (result, &args.dir) {
        (Ok(code), _) => code,
        (Err(error), dir) => {
            let place = dir.as_ref().map_or("standard output".into(), |dir| dir.display().to_string());
            complain(&format!("cannot write the manual to {place}: {error}"));
            1
        }
    }
}

/// The exit code that an end has.
fn exit_code(reason: StopReason) -> u8 {
    match reason {
        StopReason::Answer => 0,
        StopReason::Failed => 1,
        StopReason::MaxTurns | StopReason::MaxOutputTokens | StopReason::Timeout | StopReason::MaxRepeats => 3,
        StopReason::ContextOverflow | StopReason::Refused => 4,
        StopReason::Interrupted => 130,
        StopReason::Terminated => 143,
    }
}

/// Writes a result to standard output; the exit code.
fn print(text: &str) -> u8 {
    match put(&mut std::io::stdout(), text) {
        Ok(()) => 0,
        Err(why) => {
            complain(&why);
            1
        }
    }
}

/// A reader that has seen enough (`| head`) is no failure, a full disk is.
fn put(out: &mut dyn Write, text: &str) -> Result<(), String> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(unwritten(&error)),
        _ => Ok(()),
    }
}

fn unwritten(error: &std::io::Error) -> String {
    format!("cannot write to standard output: {error}; what stands there is not complete")
}

/// Writes a line to standard error.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "cob: {}", output::printable(text));
}

/// Shows what a command found, or why it found nothing; the exit code.
fn show(result: Result<String, setup::Fault>) -> u8 {
    match result {
        Ok(text) => print(&text),
        Err(fault) => {
            complain(&fault.text);
            fault.code
        }
    }
}

/// JSON for people and programs, with a line end.
fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

fn runtime() -> Result<tokio::runtime::Runtime, setup::Fault> {
    let built = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build();
    built.map_err(|error| setup::Fault::failed(format!("cannot start threads: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_well_formed() {
        Cli::command().debug_assert();
    }
}
