//! `cob chat`: task after task in one session.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use clap::Args;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use tokio::runtime::Runtime;

use super::args::{AgentOptions, ModelOptions, OutputFormat, SamplingOptions};
use super::interrupts::Interrupts;
use super::output::{Front, Report};
use super::setup::{Fault, Options, Prepared, prepare};
use super::{approve, complain, exit_code, show};
use crate::message::StopReason;
use crate::permission::{Approver, Headless};
use crate::session::Session;

#[derive(Args)]
pub struct ChatArgs {
    /// Show only the answers and faults
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    agent: AgentOptions,
}

const HELP: &str = "\
/help    this
/clear   begin a new session; the old one stays and can be resumed
/quit    leave (or Ctrl-D)
Ctrl-C   stops the answer; at the prompt, clears the line
";

pub fn run(args: ChatArgs) -> u8 {
    let runtime = match super::runtime() {
        Ok(runtime) => runtime,
        Err(fault) => return show(Err(fault)),
    };
    let interrupts = Interrupts::listen(runtime.handle());
    let code = match talk(&args, &runtime, &interrupts) {
        Ok(code) => code,
        Err(fault) => show(Err(fault)),
    };
    runtime.shutdown_background();
    code
}

/// What a line of the user asks for.
enum Line {
    Task(String),
    Clear,
    Nothing,
    Leave,
}

fn talk(args: &ChatArgs, runtime: &Runtime, interrupts: &Interrupts) -> Result<u8, Fault> {
    let terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let approver: Arc<dyn Approver> = if terminal { Arc::new(approve::Terminal) } else { Arc::new(Headless) };
    let options =
        Options { model: &args.model, sampling: &args.sampling, agent: &args.agent, quiet: args.quiet, no_task: false };
    let stop = interrupts.begin();
    let Prepared { agent, mut session, said, .. } = prepare(&options, approver, runtime, &stop)?;
    interrupts.end();
    restore_terminal_at_exit(interrupts);

    let mut front = Front::new(OutputFormat::Text, args.quiet);
    for text in said {
        front.note(&text);
    }
    let mut editor = DefaultEditor::new().map_err(|error| Fault::failed(format!("cannot edit lines here: {error}")))?;
    let history = session.path().parent().and_then(Path::parent).unwrap_or(Path::new(".")).join("history");
    load_history(&mut editor, &history);
    if terminal && !args.quiet {
        front.note(&format!("session {}; /help shows what else can be typed", session.id()));
    }
    loop {
        let task = match read_line(&mut editor)? {
            Line::Leave => {
                agent.model.keep();
                return Ok(0);
            }
            Line::Nothing => continue,
            Line::Clear => {
                let dir = session.path().parent().unwrap_or(Path::new(".")).to_owned();
                session = Session::create(&dir, session.run().clone())?;
                front.note(&format!("a new session begins: {}", session.id()));
                continue;
            }
            Line::Task(task) => task,
        };
        // Saved each time, so that a crash takes nothing.
        if let Err(error) = editor.save_history(&history) {
            tracing::debug!("the history is not saved: {error}");
        }
        let stop = interrupts.begin();
        let outcome = runtime.block_on(agent.run(&mut session, Some(&task), &stop, &mut |event| front.event(event)));
        interrupts.end();
        let reason = outcome.stop_reason;
        let model = Some(agent.model.info().id);
        let report = Report { session_id: Some(session.id().to_owned()), model, outcome };
        front.result(&report, args.agent.permission_mode);
        front.again();
        if let Some(reason) = interrupts.leaving().or(Some(reason).filter(|&reason| reason == StopReason::Terminated)) {
            return Ok(exit_code(reason));
        }
    }
}

fn read_line(editor: &mut DefaultEditor) -> Result<Line, Fault> {
    let line = match editor.readline("› ") {
        Ok(line) => line,
        Err(ReadlineError::Interrupted) => return Ok(Line::Nothing),
        Err(ReadlineError::Eof) => return Ok(Line::Leave),
        Err(error) => return Err(Fault::failed(format!("cannot read a line: {error}"))),
    };
    Ok(match line.trim() {
        "" => Line::Nothing,
        "/quit" | "/exit" => Line::Leave,
        "/clear" => Line::Clear,
        "/help" => {
            super::print(HELP);
            Line::Nothing
        }
        // A path is a task; a command that does not exist is a slip.
        command if command.starts_with('/') && !command[1..].contains(['/', ' ']) => {
            complain(&format!("there is no command {command}; /help shows them"));
            Line::Nothing
        }
        task => {
            let _ = editor.add_history_entry(task);
            Line::Task(task.to_owned())
        }
    })
}

fn load_history(editor: &mut DefaultEditor, path: &Path) {
    match editor.load_history(path) {
        Ok(()) => {}
        Err(ReadlineError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => complain(&format!("the history {} cannot be read and is left out: {error}", path.display())),
    }
}

/// The editor puts the terminal into raw mode while it waits; a signal that ends the process there must undo it.
#[cfg(unix)]
fn restore_terminal_at_exit(interrupts: &Interrupts) {
    // SAFETY: tcgetattr fills the struct when it returns 0, and only then is it used.
    let saved = unsafe {
        let mut state = std::mem::MaybeUninit::<libc::termios>::uninit();
        (libc::tcgetattr(libc::STDIN_FILENO, state.as_mut_ptr()) == 0).then(|| state.assume_init())
    };
    if let Some(state) = saved {
        interrupts.at_exit(move || {
            // SAFETY: the struct came from tcgetattr.
            unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &state) };
        });
    }
}

#[cfg(not(unix))]
fn restore_terminal_at_exit(_: &Interrupts) {}
