//! The signals that end the program: which they are, and a cancellation for commands that have no runtime of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio_util::sync::CancellationToken;

use crate::message::StopReason;
use crate::process;

/// Fires at the first signal; a second one ends the process at once.
#[derive(Clone, Default)]
pub struct Signals {
    pub cancel: CancellationToken,
    code: Arc<AtomicU8>,
}

impl Signals {
    /// Begins to listen. A child in a process group of its own gets no Ctrl-C from the terminal, so without this it would
    /// outlive us.
    pub fn listen() -> Signals {
        let signals = Signals::default();
        let heard = signals.clone();
        std::thread::spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
            runtime.block_on(async {
                let Some(mut listener) = Listener::new() else { return };
                loop {
                    let code = super::exit_code(listener.next().await);
                    if heard.cancel.is_cancelled() {
                        process::kill_all();
                        std::process::exit(i32::from(code));
                    }
                    heard.code.store(code, Ordering::SeqCst);
                    heard.cancel.cancel();
                }
            });
        });
        signals
    }

    /// 130 after Ctrl-C, 143 after SIGTERM, SIGQUIT and SIGHUP; 130 when the cancellation came from elsewhere.
    pub fn exit_code(&self) -> u8 {
        match self.code.load(Ordering::SeqCst) {
            0 => 130,
            code => code,
        }
    }
}

/// Hears Ctrl-C, SIGTERM, and what means the same as that: SIGQUIT (Ctrl-\\) and SIGHUP (the terminal was closed).
#[cfg(unix)]
pub(super) struct Listener {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    /// None where whoever started us had it ignored (`nohup`): then we go on without a terminal.
    hangup: Option<tokio::signal::unix::Signal>,
}

#[cfg(unix)]
impl Listener {
    /// To be called within a runtime.
    pub(super) fn new() -> Option<Listener> {
        use tokio::signal::unix::{SignalKind, signal};
        Some(Listener {
            interrupt: signal(SignalKind::interrupt()).ok()?,
            terminate: signal(SignalKind::terminate()).ok()?,
            quit: signal(SignalKind::quit()).ok()?,
            hangup: if hangup_is_ignored() { None } else { Some(signal(SignalKind::hangup()).ok()?) },
        })
    }

    pub(super) async fn next(&mut self) -> StopReason {
        let hung_up = async {
            match &mut self.hangup {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => StopReason::Interrupted,
            _ = self.terminate.recv() => StopReason::Terminated,
            _ = self.quit.recv() => StopReason::Terminated,
            _ = hung_up => StopReason::Terminated,
        }
    }
}

#[cfg(unix)]
fn hangup_is_ignored() -> bool {
    // SAFETY: sigaction fills the struct when it returns 0, and only then is it read; with no new action it sets none.
    unsafe {
        let mut now = std::mem::MaybeUninit::<libc::sigaction>::uninit();
        libc::sigaction(libc::SIGHUP, std::ptr::null(), now.as_mut_ptr()) == 0
            && now.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(not(unix))]
pub(super) struct Listener;

#[cfg(not(unix))]
impl Listener {
    pub(super) fn new() -> Option<Listener> {
        Some(Listener)
    }

    pub(super) async fn next(&mut self) -> StopReason {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        StopReason::Interrupted
    }
}

/// A write beyond the limit on the size of files (`ulimit -f`) shall fail as any other, and not kill us without a word. A
/// handler does that, and unlike a signal that is ignored it is not handed down to children.
#[cfg(unix)]
pub(super) fn outlive_the_file_limit() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing, so it may run at any point.
    unsafe { libc::signal(libc::SIGXFSZ, nothing as *const () as libc::sighandler_t) };
}

#[cfg(not(unix))]
pub(super) fn outlive_the_file_limit() {}
