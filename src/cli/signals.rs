//! Ctrl-C and SIGTERM as a cancellation, for commands that have no runtime of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio_util::sync::CancellationToken;

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
                loop {
                    let Some(code) = next().await else { return };
                    if heard.cancel.is_cancelled() {
                        std::process::exit(i32::from(code));
                    }
                    heard.code.store(code, Ordering::SeqCst);
                    heard.cancel.cancel();
                }
            });
        });
        signals
    }

    /// 130 after Ctrl-C, 143 after SIGTERM; 130 when the cancellation came from elsewhere.
    pub fn exit_code(&self) -> u8 {
        match self.code.load(Ordering::SeqCst) {
            0 => 130,
            code => code,
        }
    }
}

/// The exit code that belongs to the next signal; `None` where there is no way to listen.
#[cfg(unix)]
async fn next() -> Option<u8> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).ok()?;
    tokio::select! {
        heard = tokio::signal::ctrl_c() => heard.ok().map(|()| 130),
        _ = terminate.recv() => Some(143),
    }
}

#[cfg(not(unix))]
async fn next() -> Option<u8> {
    tokio::signal::ctrl_c().await.ok().map(|()| 130)
}
