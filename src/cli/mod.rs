//! The front end: the one room that prints.
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 a usage error, 3 stopped
//! by a limit, 4 refused before or instead of work, 130 interrupted, 143 terminated.

mod approve;
mod args;
mod bench;
mod chat;
mod doctor;
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

/// An AI agent on a small Qwen2.5 that lives in the same process
#[derive(Parser)]
#[command(name = "cob", version, max_term_width = 100)]
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
    /// The tools a model would be offered, and what each costs in tokens
    Tools(inspect::ToolsArgs),
    /// The exact prompt of a conversation: text, ids, segments
    Render(inspect::RenderArgs),
    /// The token ids of a text
    Tokenize(inspect::TokenizeArgs),
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

/// Runs the program.
pub fn main() -> ExitCode {
    let level = tracing_subscriber::EnvFilter::try_from_env("COB_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(level).with_writer(std::io::stderr).without_time().init();
    ExitCode::from(match Cli::parse().command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Model(args) => model::run(args),
        Command::Session(args) => session::run(args),
        Command::Tools(args) => inspect::tools(args),
        Command::Render(args) => inspect::render(args),
        Command::Tokenize(args) => inspect::tokenize(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions { shell } => completions(shell),
        Command::Man(args) => man(args),
    })
}

fn completions(shell: clap_complete::Shell) -> u8 {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cob", &mut script);
    print(&String::from_utf8_lossy(&script));
    0
}

fn man(args: ManArgs) -> u8 {
    let result = match &args.dir {
        None => {
            let mut page = Vec::new();
            let rendered = clap_mangen::Man::new(Cli::command()).render(&mut page);
            rendered.map(|()| print(&String::from_utf8_lossy(&page)))
        }
        Some(dir) => std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir)),
    };
    match (result, &args.dir) {
        (Ok(()), _) => 0,
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

/// Writes a result to standard output. A reader that has seen enough (`| head`) is no failure.
fn print(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a line to standard error.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "cob: {text}");
}

/// Shows what a command found, or why it found nothing; the exit code.
fn show(result: Result<String, setup::Fault>) -> u8 {
    match result {
        Ok(text) => {
            print(&text);
            0
        }
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
