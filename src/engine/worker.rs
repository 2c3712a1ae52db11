//! What runs on the engine's thread: requests come in, share forward passes, and leave.

use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::prefix::PrefixCache;
use super::run::{Run, Step};
use super::store::PrefixStore;
use super::{CHUNK, Event, Failure, Job, KEPT_TOKENS_MIN, Request, SEQUENCES_MAX, Settings};
use crate::message::FinishReason;
use crate::model::{Error as ModelError, Kv, Model, Part};

pub(super) struct Worker {
    model: Model,
    cache: PrefixCache,
    store: Option<PrefixStore>,
    /// What the last request computed, while there is a store that could keep it.
    last: Option<Last>,
    settings: Settings,
    /// The requests on their way, in the order in which they came.
    runs: Vec<Run>,
    /// The job that waits until there is room for it, or until the requests before it are done.
    waiting: Option<Job>,
    /// Why no further request can be served.
    broken: Option<String>,
}

struct Last {
    ids: Vec<u32>,
    kv: Kv,
    /// Of the ids: what is kept on disk by itself.
    pinned: usize,
}

impl Worker {
    pub fn new(model: Model, settings: Settings) -> Self {
        Worker {
            model,
            cache: PrefixCache::new(settings.cache_bytes),
            store: settings.store.clone().map(PrefixStore::new),
            last: None,
            settings,
            runs: Vec::new(),
            waiting: None,
            broken: None,
        }
    }

    /// Until the other side hangs up and all requests are done.
    pub fn serve(mut self, queue: Receiver<Job>) {
        loop {
            while self.waiting.is_none() {
                // With nothing to do there is time to wait.
                let job = if self.runs.is_empty() { queue.recv().ok() } else { queue.try_recv().ok() };
                let Some(job) = job else { break };
                self.waiting = Some(job);
                self.take_waiting();
            }
            if self.runs.is_empty() && self.waiting.is_none() {
                return;
            }
            let pass = std::panic::AssertUnwindSafe(|| self.pass());
            if let Err(panic) = std::panic::catch_unwind(pass) {
                let why = panic_text(&panic);
                let why = format!("the engine panicked ({why}); start cob again, and please report this");
                for run in self.runs.drain(..) {
                    run.send(Event::Failed(Failure::Failed(why.clone())));
                }
                self.broken = Some(why);
            }
            self.take_waiting();
        }
    }

    /// Does the job that waits, if its time has come.
    fn take_waiting(&mut self) {
        let Some(job) = self.waiting.take() else { return };
        match job {
            // It does not wait for its turn to be told so.
            Job::Run(request, events) if request.cancel.is_cancelled() && self.refusal(&request).is_none() => {
                let run = Run::new(request, self.model.new_kv(), events, false);
                self.end(run, Ok(FinishReason::Cancelled));
            }
            Job::Run(request, events) => match self.refusal(&request) {
                Some(failure) => {
                    let _ = events.send(Event::Failed(failure));
                }
                None if self.has_room_for(&request) => {
                    self.runs.push(Run::new(request, self.model.new_kv(), events, self.settings.drafts));
                }
                None => self.waiting = Some(Job::Run(request, events)),
            },
            // The others are about what was computed before them.
            job if !self.runs.is_empty() => self.waiting = Some(job),
            Job::ClearCache => self.cache = PrefixCache::new(self.settings.cache_bytes),
            Job::Keep => {
                if let (Some(store), Some(last)) = (&mut self.store, self.last.take())
                    && last.ids.len() >= last.pinned + KEPT_TOKENS_MIN
                {
                    store.save(&last.ids, last.kv);
                }
            }
            Job::Stats(reply) => {
                let _ = reply.send(self.cache.stats());
            }
        }
    }

    /// Why a request is not begun.
    fn refusal(&self, request: &Request) -> Option<Failure> {
        let (prompt_tokens, reserved_tokens) = (request.prompt.len(), request.max_output_tokens);
        let context_tokens = self.settings.context_tokens;
        if let Some(why) = &self.broken {
            return Some(Failure::Failed(why.clone()));
        }
        if prompt_tokens == 0 {
            return Some(Failure::Failed("the prompt is empty".into()));
        }
        let vocab = self.model.config().vocab;
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            return Some(Failure::Failed(format!("token id {id} of the prompt is outside the vocabulary of {vocab}")));
        }
        (prompt_tokens.saturating_add(reserved_tokens) > context_tokens).then_some(Failure::Overflow {
            prompt_tokens,
            reserved_tokens,
            context_tokens,
        })
    }

    /// Whether it can run beside those that do. One always can.
    fn has_room_for(&self, request: &Request) -> bool {
        let requests = self.runs.iter().map(|run| &run.request).chain([request]);
        let tokens = requests.map(|request| request.prompt.len() + request.max_output_tokens);
        let bytes: usize = tokens.map(|tokens| self.model.kv_shape().bytes(tokens)).sum();
        self.runs.is_empty() || (self.runs.len() < SEQUENCES_MAX && bytes <= self.settings.cache_bytes)
    }

    /// One forward pass for all that are on their way.
    fn pass(&mut self) {
        let steps = self.steps();
        let mut parts = Vec::new();
        let mut cancels = Vec::new();
        for (run, step) in self.runs.iter_mut().zip(&steps) {
            let Step::Rows(ids, logits) = step else { continue };
            cancels.push(run.request.cancel.clone());
            parts.push(Part { kv: &mut run.kv, ids, logits: *logits });
        }
        // A pass is given up when nobody waits for it any more.
        let cancelled = || cancels.iter().all(|cancel| cancel.is_cancelled());
        let results: Vec<Result<Vec<f32>, ModelError>> = match parts.len() {
            0 => Vec::new(),
            n => match self.model.forward_batch(&mut parts, &cancelled) {
                Ok(logits) => logits.into_iter().map(Ok).collect(),
                // One of them cannot be evaluated, and nothing was: each alone says which.
                Err(ModelError::Failed(_)) if n > 1 => {
                    let alone = |part| Ok(self.model.forward_batch(std::slice::from_mut(part), &cancelled)?.remove(0));
                    parts.iter_mut().map(alone).collect()
                }
                Err(error) => (0..n).map(|_| Err(error.clone())).collect(),
            },
        };
        let mut results = results.into_iter();
        for (mut run, step) in std::mem::take(&mut self.runs).into_iter().zip(steps) {
            let end = match step {
                Step::Wait => None,
                Step::Done(end) => Some(end),
                Step::Rows(..) => match results.next().expect("a result for each part") {
                    Ok(logits) => {
                        self.take(&mut run, logits);
                        None
                    }
                    Err(ModelError::Cancelled) => Some(Ok(FinishReason::Cancelled)),
                    Err(ModelError::Failed(why)) => Some(Err(why)),
                },
            };
            match end {
                None => self.runs.push(run),
                Some(result) => self.end(run, result),
            }
        }
    }

    /// What each of the runs has to do next. Those that decode come first, and what room they leave in the pass goes to one prefill, the
    /// first of those that have come: the next then finds what they have in common.
    fn steps(&mut self) -> Vec<Step> {
        let alone = self.runs.len() == 1;
        let mut room = CHUNK;
        let waits = |run: &Run| match run.request.cancel.is_cancelled() {
            true => Step::Done(Ok(FinishReason::Cancelled)),
            false => Step::Wait,
        };
        let mut steps: Vec<Step> = self.runs.iter().map(waits).collect();
        let decoding = (0..self.runs.len()).filter(|&i| !self.runs[i].prefilling());
        let prefilling = (0..self.runs.len()).find(|&i| self.runs[i].prefilling());
        for i in decoding.chain(prefilling).collect::<Vec<_>>() {
            self.begin(i);
            // Each gets on, if only by one row.
            steps[i] = self.runs[i].step(room.max(1), alone);
            if let Step::Rows(ids, _) = &steps[i] {
                room = room.saturating_sub(ids.len());
            }
        }
        steps
    }

    /// What a pass found for a run.
    fn take(&mut self, run: &mut Run, logits: Vec<f32>) {
        let prefilling = run.prefilling();
        run.take(logits);
        if !prefilling {
            return;
        }
        let (prompt, pinned) = (&run.request.prompt, run.request.pinned);
        if run.kv.len() == pinned {
            self.cache.insert(&prompt[..pinned], &run.kv, true);
        }
        if !run.prefilling()
            && let Some(store) = &mut self.store
        {
            let mut kv = run.kv.clone();
            kv.truncate(pinned);
            store.save(&prompt[..kv.len()], kv);
        }
    }

    /// Looks for what is known of a prompt, once, when its prefill begins.
    fn begin(&mut self, i: usize) {
        if self.runs[i].has_begun() {
            return;
        }
        let started = Instant::now();
        let (prompt, pinned) = (&self.runs[i].request.prompt, self.runs[i].request.pinned);
        let limit = prompt.len() - 1;
        let mut kv = self.cache.lookup(prompt, limit).unwrap_or_else(|| self.model.new_kv());
        // A fork of a live sequence.
        for other in &self.runs {
            let common = other.known().zip(prompt).take_while(|(a, b)| a == b).count().min(limit);
            if common > kv.len() {
                kv = other.kv.clone();
                kv.truncate(common);
            }
        }
        let mut restored = 0;
        // What this process has computed of the prompt is in memory; only what stands before all of that can be on disk alone.
        if let Some(store) = &mut self.store
            && kv.len() < pinned.max(1)
            && let Some(found) = store.lookup(self.model.kv_shape(), prompt, limit, kv.len())
            && let Some(found) = taken_in(&self.model, found, store)
        {
            restored = found.len() - kv.len();
            self.cache.insert(&prompt[..found.len()], &found, found.len() <= pinned);
            kv = found;
        }
        // What is known beyond the pinned prefix may be dropped as a whole; the prefix stays.
        if 0 < pinned && pinned <= kv.len() {
            let mut prefix = kv.clone();
            prefix.truncate(pinned);
            self.cache.insert(&prompt[..pinned], &prefix, true);
        }
        self.runs[i].begin(started, kv, restored);
    }

    fn end(&mut self, mut run: Run, result: Result<FinishReason, String>) {
        // What was computed is worth keeping, whatever ended the run.
        let held = run.settled();
        self.cache.insert(&held, &run.kv, false);
        let last = match result {
            Ok(finish) => {
                let notes = self.store.as_mut().map(PrefixStore::take_notes).unwrap_or_default();
                Event::Finished(run.report(finish, notes))
            }
            Err(why) => Event::Failed(Failure::Failed(why)),
        };
        run.send(last);
        if self.store.is_some() && !held.is_empty() {
            self.last = Some(Last { ids: held, kv: run.kv, pinned: run.request.pinned });
        }
    }
}

/// What was on disk, where the model computes.
fn taken_in(model: &Model, found: Kv, store: &mut PrefixStore) -> Option<Kv> {
    match model.take_in(found) {
        Ok(kv) => Some(kv),
        Err(why) => {
            store.note(format!("a prefix on disk is passed over: it does not go to the device: {why}"));
            None
        }
    }
}

fn panic_text(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}
