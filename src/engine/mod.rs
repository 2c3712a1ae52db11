//! The thread that owns the model: prefill, decode, sampling, prefix cache. Token ids → token ids; it knows
//! constraints only as a [`Mask`].

mod draft;
mod prefix;
mod run;
mod sampler;
pub mod store;
mod worker;

use std::sync::mpsc;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

pub use self::prefix::CacheStats;
use self::store::StoreSettings;
use self::worker::Worker;
use crate::message::{FinishReason, Sampling, Usage};
use crate::model::Model;

/// What a constraint says after a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Continue,
    /// Nothing may follow: end the output here (the token just accepted included).
    Stop,
    /// Forget the generated tokens from index `keep` on (0 = all of them), in the KV cache too, and go on from there.
    /// The mask has already put its own state back.
    Rewind {
        keep: usize,
    },
}

/// A constraint on the output. The engine calls, in a loop: `forced` → (if empty) `allow` → sample → `accept`.
/// For forced tokens `accept` is called too, once a token, in order. It runs on the engine's thread.
pub trait Mask: Send {
    /// The tokens that must come next, in order; empty when there is a choice. They are evaluated as one batch.
    fn forced(&mut self) -> Vec<u32>;
    /// Sets every logit that may not come next to negative infinity and leaves the others as they are.
    /// `logits`: `[vocab]`. At least one stays finite, or `Err` names the fault.
    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String>;
    /// Takes note of one token that was sampled or forced (stop ids are not passed on).
    fn accept(&mut self, token: u32) -> Result<Verdict, String>;
    /// How many of these tokens, from the first on, could be accepted one after the other; a guess is enough. Changes nothing.
    fn fits(&mut self, draft: &[u32]) -> usize {
        draft.len()
    }
    /// Whether the next token is inside a structure (a call), which has a temperature of its own and no repetition penalty.
    fn structured(&self) -> bool {
        false
    }
}

/// Everything is allowed.
pub struct Unmasked;

impl Mask for Unmasked {
    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }
    fn allow(&mut self, _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }
    fn accept(&mut self, _: u32) -> Result<Verdict, String> {
        Ok(Verdict::Continue)
    }
}

pub struct Request {
    /// At least one.
    pub prompt: Vec<u32>,
    /// How many leading ids of the prompt are kept in the cache as long as the budget allows (system prompt and tools).
    pub pinned: usize,
    pub mask: Box<dyn Mask>,
    pub sampling: Sampling,
    /// End the output; not part of it.
    pub stop_ids: Vec<u32>,
    pub max_output_tokens: usize,
    pub cancel: CancellationToken,
}

impl Request {
    /// Greedy, unconstrained, without stop ids, nothing pinned.
    pub fn greedy(prompt: Vec<u32>, max_output_tokens: usize) -> Self {
        Request {
            prompt,
            pinned: 0,
            mask: Box::new(Unmasked),
            sampling: Sampling::default(),
            stop_ids: Vec::new(),
            max_output_tokens,
            cancel: CancellationToken::new(),
        }
    }
}

#[derive(Debug)]
pub enum Event {
    /// Prompt tokens evaluated, of those that were not cached.
    Prefill {
        done: usize,
        total: usize,
    },
    Token {
        id: u32,
        forced: bool,
    },
    /// The tokens from index `keep` on are taken back.
    Rewind {
        keep: usize,
    },
    /// Always the last.
    Finished(Report),
    /// Always the last.
    Failed(Failure),
}

#[derive(Clone, Debug)]
pub struct Report {
    pub ids: Vec<u32>,
    pub finish: FinishReason,
    pub usage: Usage,
    /// What did not stop the request but must be said.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Refused before any work.
    Overflow {
        prompt_tokens: usize,
        reserved_tokens: usize,
        context_tokens: usize,
    },
    Failed(String),
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// Of prompt and output together.
    pub context_tokens: usize,
    /// Bytes that the prefix cache may hold, and the sequences that run beside the first.
    pub cache_bytes: usize,
    /// Where pinned prefixes are kept for the next process.
    pub store: Option<StoreSettings>,
    /// Whether what stood there before is guessed to come again; the output is the same with and without.
    pub drafts: bool,
}

/// A session's end is kept on disk when it has so many tokens more than what is kept there anyway: the file holds all of them.
pub const KEPT_TOKENS_MIN: usize = 512;

/// Rows of one forward pass: progress is reported, and a cancelled one given up, no less often.
pub const CHUNK: usize = 256;

/// Requests that decode together; more wait.
pub const SEQUENCES_MAX: usize = 8;

/// The way to the engine's thread. Requests that are there at the same time share their forward passes, up to [`SEQUENCES_MAX`] of them and
/// as far as [`Settings::cache_bytes`] has room for their keys and values; each has the output that it would have alone. They are prefilled
/// in the order in which they came. One that begins as another does, a live one included, takes over its keys and values: that is a fork.
pub struct Engine {
    jobs: mpsc::Sender<Job>,
    settings: Settings,
    thread: Option<std::thread::JoinHandle<()>>,
}

enum Job {
    Run(Request, UnboundedSender<Event>),
    Stats(mpsc::Sender<CacheStats>),
    ClearCache,
    Keep,
}

impl Engine {
    /// Takes the model to a thread of its own. Fails where the system starts no thread.
    pub fn start(model: Model, settings: Settings) -> Result<Self, String> {
        let (jobs, queue) = mpsc::channel();
        let of_worker = settings.clone();
        let thread = std::thread::Builder::new()
            .name("cob-engine".into())
            .spawn(move || Worker::new(model, of_worker).serve(queue))
            .map_err(|error| format!("cannot start the engine's thread: {error}"))?;
        Ok(Engine { jobs, settings, thread: Some(thread) })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Keeps on disk what the last request computed, once the requests before are done: a session that goes on in another process
    /// begins there.
    pub fn keep(&self) {
        let _ = self.jobs.send(Job::Keep);
    }

    /// Queues a request. Its events end with `Finished` or `Failed`.
    pub fn submit(&self, request: Request) -> UnboundedReceiver<Event> {
        let (events, receiver) = unbounded_channel();
        if self.jobs.send(Job::Run(request, events.clone())).is_err() {
            let _ = events.send(Event::Failed(Failure::Failed("the engine's thread has ended".into())));
        }
        receiver
    }

    /// Runs a request to its end. Blocks the thread, so it is not for asynchronous code.
    pub fn run(&self, request: Request) -> Result<Report, Failure> {
        let mut events = self.submit(request);
        loop {
            match events.blocking_recv() {
                Some(Event::Finished(report)) => return Ok(report),
                Some(Event::Failed(failure)) => return Err(failure),
                Some(_) => {}
                None => return Err(Failure::Failed("the engine's thread has ended".into())),
            }
        }
    }

    /// Forgets all prefixes, once the requests before it are done.
    pub fn clear_cache(&self) {
        let _ = self.jobs.send(Job::ClearCache);
    }

    /// Waits for the requests before it.
    pub fn cache_stats(&self) -> CacheStats {
        let (reply, stats) = mpsc::channel();
        let _ = self.jobs.send(Job::Stats(reply));
        stats.recv().unwrap_or_default()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Closing the channel ends the thread, after the request that it is at.
        (self.jobs, _) = mpsc::channel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
