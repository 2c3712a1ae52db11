//! Ctrl-C and SIGTERM, for commands that run an agent: the first stops the task, a second one ends the process.

use std::sync::{Arc, Mutex};

use tokio::runtime::Handle;

use crate::agent::Stop;
use crate::message::StopReason;

/// What is left to do before the process ends at once.
type Tidy = Box<dyn FnOnce() + Send>;

/// Listens as long as the process lives. Clones share the task.
#[derive(Clone, Default)]
pub struct Interrupts {
    /// The task that a signal stops; without one it ends the process.
    current: Arc<Mutex<Option<Stop>>>,
    /// Called before the process ends at once.
    at_exit: Arc<Mutex<Option<Tidy>>>,
}

impl Interrupts {
    /// Begins to listen on `runtime`.
    pub fn listen(runtime: &Handle) -> Interrupts {
        let interrupts = Interrupts::default();
        let heard = interrupts.clone();
        // Registered before anything runs, so that no signal falls between.
        let _guard = runtime.enter();
        let Some(mut signals) = Signals::new() else { return interrupts };
        runtime.spawn(async move {
            loop {
                let reason = signals.next().await;
                heard.signalled(reason);
            }
        });
        interrupts
    }

    /// A task begins: the next signal stops it.
    pub fn begin(&self) -> Stop {
        let stop = Stop::new();
        *self.current.lock().unwrap_or_else(|e| e.into_inner()) = Some(stop.clone());
        stop
    }

    /// The task is over: the next signal ends the process.
    pub fn end(&self) {
        *self.current.lock().unwrap_or_else(|e| e.into_inner()) = None;
    }

    /// `tidy` is called before a signal ends the process.
    pub fn at_exit(&self, tidy: impl FnOnce() + Send + 'static) {
        *self.at_exit.lock().unwrap_or_else(|e| e.into_inner()) = Some(Box::new(tidy));
    }

    fn signalled(&self, reason: StopReason) {
        let current = self.current.lock().unwrap_or_else(|e| e.into_inner()).clone();
        match current {
            Some(stop) if stop.reason().is_none() => stop.request(reason),
            _ => {
                if let Some(tidy) = self.at_exit.lock().unwrap_or_else(|e| e.into_inner()).take() {
                    tidy();
                }
                std::process::exit(i32::from(super::exit_code(reason)));
            }
        }
    }
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> Option<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Some(Signals {
            interrupt: signal(SignalKind::interrupt()).ok()?,
            terminate: signal(SignalKind::terminate()).ok()?,
        })
    }

    async fn next(&mut self) -> StopReason {
        tokio::select! {
            _ = self.interrupt.recv() => StopReason::Interrupted,
            _ = self.terminate.recv() => StopReason::Terminated,
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> Option<Signals> {
        Some(Signals)
    }

    async fn next(&mut self) -> StopReason {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        StopReason::Interrupted
    }
}
