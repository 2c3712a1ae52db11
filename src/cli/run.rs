//! `cob run`: one task, headless or watched.

use std::io::{IsTerminal, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::runtime::Runtime;

use super::args::{AgentOptions, ModelOptions, OutputFormat, SamplingOptions};
use super::interrupts::Interrupts;
use super::output::{Front, Report};
use super::setup::{Fault, Options, Prepared, prepare};
use super::{approve, exit_code, show};
use crate::agent::Stop;
use crate::message::StopReason;
use crate::permission::{Approver, Headless};

#[derive(Args)]
pub struct RunArgs {
    /// What is to be done; `-`, or nothing without --resume or --continue, reads it from standard input
    task: Option<String>,
    /// What is shown
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    output_format: OutputFormat,
    /// Show only the answer and faults
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    agent: AgentOptions,
}

pub fn run(args: RunArgs) -> u8 {
    let runtime = match super::runtime() {
        Ok(runtime) => runtime,
        Err(fault) => return show(Err(fault)),
    };
    let interrupts = Interrupts::listen(runtime.handle());
    let stop = interrupts.begin();
    let mut front = Front::new(args.output_format, args.quiet);
    let code = watched(&args, &mut front, &runtime, &stop);
    let code = front.exit_code(code);
    // A thread that still waits for standard input, or loads a model that nobody wants, is not waited for.
    runtime.shutdown_background();
    code
}

/// Whatever happens, panics included, ends in one result.
fn watched(args: &RunArgs, front: &mut Front, runtime: &Runtime, stop: &Stop) -> u8 {
    let mode = args.agent.permission_mode;
    let ran = catch_unwind(AssertUnwindSafe(|| attempt(args, front, runtime, stop)));
    let fault = match ran {
        Ok(Ok(code)) => return code,
        Ok(Err(fault)) => fault,
        Err(_) => Fault::failed("a fault in the program; what it said stands above"),
    };
    let session = args.agent.resume.clone();
    front.result(&Report::without_agent(session, args.model.model.clone(), fault.reason, fault.text), mode);
    fault.code
}

fn attempt(args: &RunArgs, front: &mut Front, runtime: &Runtime, stop: &Stop) -> Result<u8, Fault> {
    let task = task(args, runtime, stop)?;
    let options = Options {
        model: &args.model,
        sampling: &args.sampling,
        agent: &args.agent,
        quiet: args.quiet,
        no_task: task.is_none(),
    };
    let Prepared { agent, mut session, resumed, said } = prepare(&options, approver(args), runtime, stop)?;
    front.init(Some((session.id(), session.run())), resumed, args.agent.permission_mode);
    for text in said {
        front.note(&text);
    }
    if args.task.as_deref().is_some_and(|task| task != "-") && input_waits() {
        front.note(
            "standard input is not read: the task is given; put it into the task, or use `-` and give the task there",
        );
    }
    let outcome = runtime.block_on(agent.run(&mut session, task.as_deref(), stop, &mut |event| front.event(event)));
    agent.model.keep();
    let code = exit_code(outcome.stop_reason);
    let report = Report { session_id: Some(session.id().to_owned()), model: Some(agent.model.info().id), outcome };
    let resumable =
        matches!(report.outcome.stop_reason, StopReason::Interrupted | StopReason::Terminated | StopReason::Timeout);
    front.result(&report, args.agent.permission_mode);
    if resumable && args.output_format == OutputFormat::Text {
        front.note(&format!("to go on: cob run --resume {}", session.id()));
    }
    Ok(code)
}

/// `None` where a session is to go on without a new task.
fn task(args: &RunArgs, runtime: &Runtime, stop: &Stop) -> Result<Option<String>, Fault> {
    let text = match args.task.as_deref() {
        Some("-") => read_stdin(runtime, stop)?,
        Some(text) => text.to_owned(),
        None if args.agent.resumes() => return Ok(None),
        None if std::io::stdin().is_terminal() => {
            return Err(Fault::usage("there is no task; give it as an argument, or `-` to type it"));
        }
        None => read_stdin(runtime, stop)?,
    };
    if text.trim().is_empty() { Err(Fault::usage("the task is empty")) } else { Ok(Some(text)) }
}

fn read_stdin(runtime: &Runtime, stop: &Stop) -> Result<String, Fault> {
    let reading = runtime.spawn_blocking(|| {
        let mut text = String::new();
        std::io::stdin().lock().read_to_string(&mut text).map(|_| text)
    });
    let read = runtime.block_on(async {
        tokio::select! {
            read = reading => read.map_err(std::io::Error::other).flatten().map_err(|error| {
                Fault::usage(format!("cannot read the task from standard input: {error}"))
            }),
            reason = stop.requested(Duration::ZERO) => Err(Fault::stopped(reason)),
        }
    })?;
    Ok(read.strip_suffix('\n').unwrap_or(&read).to_owned())
}

/// Whether something waits on standard input that is no terminal.
#[cfg(unix)]
fn input_waits() -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    !std::io::stdin().is_terminal()
        && unsafe { libc::ioctl(libc::STDIN_FILENO, libc::FIONREAD, &mut bytes) } == 0
        && bytes > 0
}

#[cfg(not(unix))]
fn input_waits() -> bool {
    false
}

/// A person is asked only when one reads along and can answer.
fn approver(args: &RunArgs) -> Arc<dyn Approver> {
    let terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if terminal && args.output_format == OutputFormat::Text && !args.quiet {
        Arc::new(approve::Terminal)
    } else {
        Arc::new(Headless)
    }
}
