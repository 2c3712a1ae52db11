//! The one place that starts a child.
//!
//! Every child gets a process group of its own, a closed standard input and a pager that does not wait. When it ends,
//! is cancelled, runs out of time, or its future is dropped, the whole group goes with it: nothing that a call started
//! in the background outlives the call. On Linux neither does what left its group (`setsid`): a variable in its
//! environment gives it away. Two limits of that, until the sandbox: what has left its group and also sheds its
//! environment (`setsid env -i`; elsewhere than on Linux all that left) is not found, and when cob itself dies by
//! SIGKILL only the direct child dies with it (Linux).

// This is the one place where children are started.
#![allow(clippy::disallowed_methods)]

mod capture;
mod environment;
mod group;

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::ChildStdout;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use capture::Capture;
pub use capture::Captured;
pub use environment::is_secret;
use group::Group;
pub use group::kill_all;

/// Between the polite signal and SIGKILL. Ctrl-C must be over within a second.
const TERM_GRACE: Duration = Duration::from_millis(300);
/// How long the pipes are still read after the child ended, when something else holds them open.
const DRAIN_GRACE: Duration = Duration::from_millis(200);
/// How long a process that is already on its way out may stay in the group before it counts as left behind.
const LINGER_GRACE: Duration = Duration::from_millis(100);

/// What to start, where, and within which bounds.
#[derive(Clone, Debug)]
pub struct Command {
    pub program: Program,
    pub cwd: PathBuf,
    pub environment: Environment,
    /// Set last, whatever the policy took away.
    pub variables: Vec<(OsString, OsString)>,
    pub timeout: Duration,
    /// Each stream keeps this many bytes: the first half and the last half of what was written.
    pub output_bytes_max: usize,
    pub streams: Streams,
}

impl Command {
    /// A shell command line with a scrubbed environment and both streams in one.
    pub fn shell(line: impl Into<String>, cwd: impl Into<PathBuf>) -> Self {
        Command {
            program: Program::Shell(line.into()),
            cwd: cwd.into(),
            environment: Environment::Scrubbed,
            variables: Vec::new(),
            timeout: Duration::from_secs(120),
            output_bytes_max: 64 * 1024,
            streams: Streams::Merged,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// Run by `bash -c`, or by `sh -c` where there is no bash.
    Shell(String),
    Direct {
        path: OsString,
        arguments: Vec<OsString>,
    },
}

/// Which of our own variables a child sees. Both policies add what keeps programs from waiting for a person
/// (`PAGER=cat`, `GIT_TERMINAL_PROMPT=0` …).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Environment {
    /// All but those that carry secrets: see [`is_secret`].
    Scrubbed,
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// One pipe for both, so that the order is the order of writing; all of it is in [`Finished::stdout`].
    Merged,
    Apart,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    pub status: Status,
    pub ended: Ended,
    pub stdout: Captured,
    pub stderr: Captured,
    /// The child ended by itself and left processes running; those that were found were killed.
    pub background_killed: bool,
}

impl Finished {
    pub fn success(&self) -> bool {
        self.ended == Ended::Itself && self.status == Status::Code(0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Code(i32),
    Signal(i32),
    /// It did not even obey SIGKILL in time (stuck in the kernel).
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Itself,
    TimedOut,
    Cancelled,
}

/// Runs a child to its end, its timeout, or `cancel`, whichever is first. `Err` only when it could not be started, and
/// then it names what was to be started.
///
/// Dropping the future kills the group at once.
pub async fn run(spec: Command, cancel: &CancellationToken) -> io::Result<Finished> {
    let name = spec.program.name();
    let mut command = tokio::process::Command::from(prepare(&spec.program, &spec.cwd, spec.environment)?);
    let mark = group::mark();
    command.envs(spec.variables).env(group::MARK, &mark).kill_on_drop(true);
    let (stdout, stderr) = match spec.streams {
        Streams::Merged => {
            let (reader, writer) = io::pipe()?;
            command.stdout(writer.try_clone()?).stderr(writer);
            (reader, None)
        }
        Streams::Apart => {
            let (reader, writer) = io::pipe()?;
            let (error_reader, error_writer) = io::pipe()?;
            command.stdout(writer).stderr(error_writer);
            (reader, Some(error_reader))
        }
    };
    let runtime = tokio::runtime::Handle::current();
    let (sender, started) = tokio::sync::oneshot::channel();
    on_spawner(move || {
        let _context = runtime.enter();
        // The guard is made beside the child, so that a future dropped right now still kills the group.
        let child = command.spawn().map(|child| {
            let group = Group::new(child.id(), mark);
            (child, group)
        });
        drop(command); // Our copies of the write ends: the pipes must close with the children.
        let _ = sender.send(child);
    });
    let (mut child, mut group) = started
        .await
        .map_err(|_| io::Error::other("the thread that starts children is gone"))?
        .map_err(|error| could_not_start(&name, error))?;

    let mut out = Stream::new(Some(stdout.into()), spec.output_bytes_max)?;
    let mut err = Stream::new(stderr.map(OwnedFd::from), spec.output_bytes_max)?;
    let mut ended = Ended::Itself;
    let mut status = None;
    let mut stage = Stage::Running;
    let mut deadline = Instant::now() + spec.timeout.min(Duration::from_secs(365 * 24 * 3600));
    while status.is_none() || out.open() || err.open() {
        tokio::select! {
            () = out.read(), if out.open() => {}
            () = err.read(), if err.open() => {}
            exit = child.wait(), if status.is_none() => {
                status = Some(exit?);
                if stage == Stage::Running {
                    stage = Stage::Draining;
                    deadline = Instant::now() + DRAIN_GRACE;
                }
            }
            () = cancel.cancelled(), if stage == Stage::Running => {
                ended = Ended::Cancelled;
                group.terminate();
                stage = Stage::Terminating;
                deadline = Instant::now() + TERM_GRACE;
            }
            () = tokio::time::sleep_until(deadline) => match stage {
                Stage::Running => {
                    ended = Ended::TimedOut;
                    group.terminate();
                    stage = Stage::Terminating;
                    deadline = Instant::now() + TERM_GRACE;
                }
                Stage::Draining | Stage::Terminating => {
                    if ended == Ended::Itself {
                        // Whatever holds the pipe is still there, or it would be closed.
                        group.left_behind = true;
                    }
                    group.kill();
                    stage = Stage::Killed;
                    deadline = Instant::now() + DRAIN_GRACE;
                }
                // A process that was not found holds the pipe, or one sits in the kernel. Waiting would not end.
                Stage::Killed => break,
            }
        }
    }
    let background_killed = group.finish(ended == Ended::Itself).await;
    Ok(Finished {
        status: status.map_or(Status::Unknown, Status::from),
        ended,
        stdout: out.capture.finish(),
        stderr: err.capture.finish(),
        background_killed,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    Draining,
    Terminating,
    Killed,
}

/// Runs `program` to its end with its whole environment and both streams apart, without a runtime: for `pip` and its
/// like. The middle of a stream of more than 1 MiB is dropped. A cancelled run is `Err` of kind `Interrupted`.
pub fn run_to_end(
    program: impl AsRef<OsStr>,
    arguments: &[impl AsRef<OsStr>],
    dir: &Path,
    cancel: &CancellationToken,
) -> io::Result<Output> {
    const STREAM_BYTES_MAX: usize = 1 << 20;
    let program = Program::Direct {
        path: program.as_ref().to_owned(),
        arguments: arguments.iter().map(|argument| argument.as_ref().to_owned()).collect(),
    };
    let name = program.name();
    let mut command = prepare(&program, dir, Environment::Full)?;
    let mark = group::mark();
    command.env(group::MARK, &mark).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (sender, started) = mpsc::channel();
    on_spawner(move || {
        let child = command.spawn().map(|child| {
            let group = Group::new(Some(child.id()), mark);
            (child, group)
        });
        let _ = sender.send(child);
    });
    let (mut child, group) = started
        .recv()
        .map_err(|_| io::Error::other("the thread that starts children is gone"))?
        .map_err(|error| could_not_start(&name, error))?;

    fn collect(mut from: impl Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut capture = Capture::new(STREAM_BYTES_MAX);
            let mut chunk = vec![0; 16 * 1024];
            while let Ok(count @ 1..) = from.read(&mut chunk) {
                capture.push(&chunk[..count]);
            }
            let _ = sender.send(capture.into_bytes());
        });
        receiver
    }
    let stdout = child.stdout.take().map(collect);
    let stderr = child.stderr.take().map(collect);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if cancel.is_cancelled() {
            group.terminate();
            std::thread::sleep(TERM_GRACE);
            group.kill();
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::Interrupted, format!("{name} was interrupted")));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // Before the readers: a process left behind would hold their pipes.
    group.kill();
    let take = |stream: Option<mpsc::Receiver<Vec<u8>>>| {
        stream.and_then(|receiver| receiver.recv_timeout(Duration::from_secs(2)).ok()).unwrap_or_default()
    };
    Ok(Output { status, stdout: take(stdout), stderr: take(stderr) })
}

impl Program {
    fn name(&self) -> String {
        match self {
            Program::Shell(_) => shell().to_string(),
            Program::Direct { path, .. } => path.to_string_lossy().into_owned(),
        }
    }
}

impl From<std::process::ExitStatus> for Status {
    fn from(status: std::process::ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Status::Code(code),
            (None, Some(signal)) => Status::Signal(signal),
            (None, None) => Status::Unknown,
        }
    }
}

/// What all children share: group, closed input, environment, and that they die with us.
fn prepare(program: &Program, cwd: &Path, policy: Environment) -> io::Result<std::process::Command> {
    use std::os::unix::process::CommandExt;
    if !cwd.is_dir() {
        let why = format!("{} is not a folder, so {} was not started there", cwd.display(), program.name());
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    }
    let mut command = match program {
        Program::Shell(line) => {
            let mut command = std::process::Command::new(shell());
            command.arg("-c").arg(line);
            command
        }
        Program::Direct { path, arguments } => {
            let mut command = std::process::Command::new(path);
            command.args(arguments);
            command
        }
    };
    command.current_dir(cwd).stdin(Stdio::null()).process_group(0);
    environment::apply(&mut command, policy, std::env::vars_os());
    die_with_parent(&mut command);
    Ok(command)
}

fn shell() -> &'static str {
    static SHELL: OnceLock<&str> = OnceLock::new();
    SHELL.get_or_init(|| {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let bash = std::env::split_paths(&folders).any(|folder| folder.join("bash").is_file());
        if bash { "bash" } else { "sh" }
    })
}

#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt;
    let parent = std::process::id();
    // SAFETY: only prctl, getppid and _exit run between fork and exec; all are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() as u32 != parent {
                libc::_exit(1); // The parent died between the fork and the line above.
            }
            Ok(())
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent(_: &mut std::process::Command) {}

/// Runs `job` on a thread that lives as long as the process. PR_SET_PDEATHSIG fires when the *thread* that forked
/// ends, and runtime threads come and go.
fn on_spawner(job: impl FnOnce() + Send + 'static) {
    type Job = Box<dyn FnOnce() + Send>;
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || jobs.into_iter().for_each(|job| job()))
            .expect("a thread can be started");
        sender
    });
    // The receiver only goes when its thread panicked; the caller then sees its own channel closed.
    let _ = spawner.send(Box::new(job));
}

fn could_not_start(name: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("could not start {name}: {error}"))
}

/// One pipe and what came out of it.
struct Stream {
    pipe: Option<ChildStdout>,
    chunk: Vec<u8>,
    capture: Capture,
}

impl Stream {
    fn new(pipe: Option<OwnedFd>, bytes_max: usize) -> io::Result<Self> {
        let pipe = pipe.map(|fd| ChildStdout::from_std(std::process::ChildStdout::from(fd))).transpose()?;
        Ok(Stream { pipe, chunk: vec![0; 16 * 1024], capture: Capture::new(bytes_max) })
    }

    fn open(&self) -> bool {
        self.pipe.is_some()
    }

    /// Reads one chunk, or notes the end. Nothing is lost when the future is dropped.
    async fn read(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        match pipe.read(&mut self.chunk).await {
            Ok(count @ 1..) => self.capture.push(&self.chunk[..count]),
            Ok(0) | Err(_) => self.pipe = None,
        }
    }
}

#[cfg(test)]
mod tests;
