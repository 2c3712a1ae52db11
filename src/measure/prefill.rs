//! How long the engine reads a prompt.

use std::path::Path;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::chat::template::Prompt;
use crate::engine::{Engine, Event, Failure, Report, Request, store};
use crate::message::FinishReason;

/// How long a prefix may take to be written to disk.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);

/// What reading one prompt took.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefill {
    pub prompt_tokens: usize,
    /// What is read anew where the prefix is known: all behind the system turn.
    pub fresh_tokens: usize,
    pub cold_ms: f64,
    /// The prefix is in memory, what follows it is new.
    pub cached_ms: f64,
    /// The prefix is on disk, in a file that was just written. `None` where none is kept: it is too short.
    pub disk_ms: Option<f64>,
    pub kv_bytes: u64,
    /// (tokens read, milliseconds since the start) of the cold pass, chunk by chunk.
    pub progress: Vec<(usize, f64)>,
}

impl Prefill {
    /// How long the cold pass took to its first `tokens` tokens, between two chunks in proportion.
    pub fn cold_ms_at(&self, tokens: usize) -> f64 {
        let (mut before, mut ms_before) = (0, 0.0);
        for &(after, ms_after) in &self.progress {
            if tokens <= after {
                let share = if after > before { (tokens - before) as f64 / (after - before) as f64 } else { 1.0 };
                return ms_before + share * (ms_after - ms_before);
            }
            (before, ms_before) = (after, ms_after);
        }
        ms_before
    }
}

/// Why there is no time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmeasured {
    Overflow { prompt_tokens: usize, context_tokens: usize },
    Cancelled,
    Failed(String),
}

impl std::fmt::Display for Unmeasured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unmeasured::Overflow { prompt_tokens, context_tokens } => {
                write!(
                    f,
                    "{prompt_tokens} tokens do not fit the context of {context_tokens}, so there is no time of them"
                )
            }
            Unmeasured::Cancelled => f.write_str("cancelled"),
            Unmeasured::Failed(why) => f.write_str(why),
        }
    }
}

/// Measures on one engine, which nobody else may use meanwhile.
pub struct Stopwatch<'a> {
    engine: &'a Engine,
    store: &'a Path,
    cancel: CancellationToken,
}

impl<'a> Stopwatch<'a> {
    /// `store` is the folder of the engine's prefix store. It is emptied again and again, so it must be one of our own.
    pub fn new(engine: &'a Engine, store: &'a Path, cancel: CancellationToken) -> Self {
        Stopwatch { engine, store, cancel }
    }

    /// Reads a prompt cold, then with its system turn in memory, then with it on disk. The second and third time what follows is as
    /// long and begins with another token, as a new question would. Costs one cold pass and a little.
    pub fn measure(&self, prompt: &Prompt) -> Result<Prefill, Unmeasured> {
        self.forget()?;
        let (cold, progress) = self.read(prompt.ids.clone(), prompt.pinned)?;
        if cold.usage.cached_tokens > 0 {
            return Err(Unmeasured::Failed(format!(
                "{} tokens of a cold prompt were known already: someone else uses the engine",
                cold.usage.cached_tokens
            )));
        }
        let is_kept = self.is_written(prompt.pinned)?;
        let (cached, _) = self.read(another_question(prompt, 1), prompt.pinned)?;
        self.engine.clear_cache();
        let disk = if is_kept { Some(self.read(another_question(prompt, 2), prompt.pinned)?.0) } else { None };
        let disk = disk.filter(|disk| disk.usage.restored_tokens == prompt.pinned);
        self.forget()?;
        Ok(Prefill {
            prompt_tokens: prompt.ids.len(),
            fresh_tokens: cached.usage.prefilled_tokens,
            cold_ms: cold.usage.prefill_ms,
            cached_ms: cached.usage.prefill_ms,
            disk_ms: disk.map(|disk| disk.usage.prefill_ms),
            kv_bytes: cold.usage.kv_bytes,
            progress,
        })
    }

    fn forget(&self) -> Result<(), Unmeasured> {
        self.engine.clear_cache();
        // Waits for what is running.
        self.engine.cache_stats();
        let cleared = store::clear(self.store);
        cleared
            .map(|_| ())
            .map_err(|error| Unmeasured::Failed(format!("cannot empty {}: {error}", self.store.display())))
    }

    fn read(&self, ids: Vec<u32>, pinned: usize) -> Result<(Report, Vec<(usize, f64)>), Unmeasured> {
        let start = Instant::now();
        let mut events = self.engine.submit(Request { pinned, cancel: self.cancel.clone(), ..Request::greedy(ids, 0) });
        let mut progress = Vec::new();
        loop {
            match events.blocking_recv() {
                Some(Event::Finished(report)) if report.finish == FinishReason::Cancelled => {
                    return Err(Unmeasured::Cancelled);
                }
                Some(Event::Finished(report)) => return Ok((report, progress)),
                Some(Event::Prefill { done, .. }) => progress.push((done, start.elapsed().as_secs_f64() * 1e3)),
                Some(Event::Failed(Failure::Overflow { prompt_tokens, context_tokens, .. })) => {
                    return Err(Unmeasured::Overflow { prompt_tokens, context_tokens });
                }
                Some(Event::Failed(Failure::Failed(why))) => return Err(Unmeasured::Failed(why)),
                Some(_) => {}
                None => return Err(Unmeasured::Failed("the engine's thread has ended".into())),
            }
        }
    }

    /// Waits until the prefix of so many tokens is on disk; `false` where it is not going to be.
    fn is_written(&self, tokens: usize) -> Result<bool, Unmeasured> {
        let settings = self.engine.settings().store.as_ref();
        if settings.is_none_or(|settings| tokens < settings.tokens_min) {
            return Ok(false);
        }
        let start = Instant::now();
        while start.elapsed() < WRITTEN_WITHIN {
            let (entries, _) = store::list(self.store)
                .map_err(|error| Unmeasured::Failed(format!("cannot read {}: {error}", self.store.display())))?;
            if entries.iter().any(|entry| entry.tokens == tokens) {
                return Ok(true);
            }
            if self.cancel.is_cancelled() {
                return Err(Unmeasured::Cancelled);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(false)
    }
}

/// The prompt with another first token behind its system turn, unlike that of every other `number`.
fn another_question(prompt: &Prompt, number: u32) -> Vec<u32> {
    let mut ids = prompt.ids.clone();
    if let Some(first) = ids.get_mut(prompt.pinned) {
        // The first ids are the bytes: each of them is a token of any prompt's.
        *first = if *first < 3 { *first + 3 * number } else { number };
    }
    ids
}
