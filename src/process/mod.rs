//! The one place that starts a child.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Runs a program to its end in `dir`, in its own process group, with standard input closed, and returns its output.
/// When `cancel` fires the whole group is killed and the error's kind is [`io::ErrorKind::Interrupted`].
pub fn run_to_end(program: &OsStr, args: &[String], dir: &Path, cancel: &CancellationToken) -> io::Result<Output> {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn()?;
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if cancel.is_cancelled() {
            #[cfg(unix)]
            // SAFETY: a plain system call; the group is that of our own child, which has not been waited for.
            unsafe {
                libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL);
            }
            let _ = child.kill();
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::Interrupted, "cancelled"));
        }
        thread::sleep(Duration::from_millis(20));
    };
    let collect = |reader: thread::JoinHandle<Vec<u8>>| reader.join().unwrap_or_default();
    Ok(Output { status, stdout: collect(stdout), stderr: collect(stderr) })
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}
