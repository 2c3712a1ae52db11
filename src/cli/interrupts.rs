//! Ctrl-C, SIGTERM, SIGQUIT and SIGHUP, for commands that run an agent: the first stops the task, a second one ends the process.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;

use super::signals::Listener;
use crate::agent::Stop;
use crate::message::StopReason;
use crate::process;

/// How long a task that lost its children to a second signal may take to write its result: what the loop itself grants
/// a completion or a tool, and a bit.
const RESULT_GRACE: Duration = Duration::from_secs(1);

/// What is left to do before the process ends at once.
type Tidy = Box<dyn FnOnce() + Send>;

/// Listens as long as the process lives. Clones share the task.
#[derive(Clone, Default)]
pub struct Interrupts {
    /// The task that a signal stops; without one it ends the process.
    current: Arc<Mutex<Option<Stop>>>,
    /// Called before the process ends at once.
    at_exit: Arc<Mutex<Option<Tidy>>>,
    /// A second signal came: the process ends, with the result of the task or without it.
    leaving: Arc<OnceLock<StopReason>>,
}

impl Interrupts {
    /// Begins to listen on `runtime`.
    pub fn listen(runtime: &Handle) -> Interrupts {
        let interrupts = Interrupts::default();
        let heard = interrupts.clone();
        // Registered before anything runs, so that no signal falls between.
        let _guard = runtime.enter();
        let Some(mut signals) = Listener::new() else { return interrupts };
        runtime.spawn(async move {
            loop {
                heard.signalled(signals.next().await);
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

    /// Why nothing more is to begin, once a second signal came.
    pub fn leaving(&self) -> Option<StopReason> {
        self.leaving.get().copied()
    }

    fn signalled(&self, reason: StopReason) {
        let current = self.current.lock().unwrap_or_else(|e| e.into_inner()).clone();
        match current {
            Some(stop) if stop.reason().is_none() => stop.request(reason),
            Some(_) => {
                let _ = self.leaving.set(reason);
                process::kill_all();
                let interrupts = self.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(RESULT_GRACE);
                    interrupts.leave(reason);
                });
            }
            None => self.leave(reason),
        }
    }

    fn leave(&self, reason: StopReason) -> ! {
        if let Some(tidy) = self.at_exit.lock().unwrap_or_else(|e| e.into_inner()).take() {
            tidy();
        }
        std::process::exit(i32::from(super::exit_code(reason)))
    }
}
