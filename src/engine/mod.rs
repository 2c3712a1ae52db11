//! The thread that owns the model: prefill, decode, sampling, prefix cache. Token ids → token ids; it knows
//! constraints only as a [`Mask`].

mod draft;
mod prefix;
mod sampler;
pub mod store;

use std::sync::mpsc;
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

use self::draft::Drafter;
pub use self::prefix::CacheStats;
use self::prefix::PrefixCache;
use self::sampler::Sampler;
use self::store::{PrefixStore, StoreSettings};
use crate::message::{FinishReason, Sampling, Usage};
use crate::model::{Error as ModelError, Kv, Logits, Model};

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
    /// Bytes that the prefix cache may hold.
    pub cache_bytes: usize,
    /// Where pinned prefixes are kept for the next process.
    pub store: Option<StoreSettings>,
    /// Whether what stood there before is guessed to come again; the output is the same with and without.
    pub drafts: bool,
}

/// A session's end is kept on disk when it has so many tokens more than what is kept there anyway: the file holds all of them.
pub const KEPT_TOKENS_MIN: usize = 512;

/// Rows of one forward pass of a prefill: progress is reported, and a cancelled one given up, no less often.
pub const CHUNK: usize = 256;

/// The way to the engine's thread. Requests run one after another.
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
            .spawn(move || {
                let (cache, store) =
                    (PrefixCache::new(of_worker.cache_bytes), of_worker.store.clone().map(PrefixStore::new));
                Worker { model, cache, store, last: None, settings: of_worker, broken: None }.serve(queue)
            })
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

struct Last {
    ids: Vec<u32>,
    kv: Kv,
    /// Of the ids: what is kept on disk by itself.
    pinned: usize,
}

struct Worker {
    model: Model,
    cache: PrefixCache,
    store: Option<PrefixStore>,
    /// What the last request computed, while there is a store that could keep it.
    last: Option<Last>,
    settings: Settings,
    /// Why no further request can be served.
    broken: Option<String>,
}

impl Worker {
    fn serve(mut self, queue: mpsc::Receiver<Job>) {
        for job in queue {
            match job {
                Job::Run(request, events) => {
                    let run = std::panic::AssertUnwindSafe(|| self.run(request, &events));
                    let last = match std::panic::catch_unwind(run) {
                        Ok(Ok(report)) => Event::Finished(report),
                        Ok(Err(failure)) => Event::Failed(failure),
                        Err(panic) => {
                            let why = panic_text(&panic);
                            let why = format!("the engine panicked ({why}); start cob again, and please report this");
                            self.broken = Some(why.clone());
                            Event::Failed(Failure::Failed(why))
                        }
                    };
                    let _ = events.send(last);
                }
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
    }

    fn run(&mut self, request: Request, events: &UnboundedSender<Event>) -> Result<Report, Failure> {
        if let Some(why) = &self.broken {
            return Err(Failure::Failed(why.clone()));
        }
        let (prompt_tokens, reserved_tokens) = (request.prompt.len(), request.max_output_tokens);
        let context_tokens = self.settings.context_tokens;
        if prompt_tokens == 0 {
            return Err(Failure::Failed("the prompt is empty".into()));
        }
        if prompt_tokens.saturating_add(reserved_tokens) > context_tokens {
            return Err(Failure::Overflow { prompt_tokens, reserved_tokens, context_tokens });
        }
        let start = Instant::now();
        let mut kv = self.cache.lookup(&request.prompt, prompt_tokens - 1).unwrap_or_else(|| self.model.new_kv());
        let mut restored_tokens = 0;
        // What this process has computed of the prompt is in memory; only what stands before all of that can be on disk alone.
        if let Some(store) = &mut self.store
            && kv.len() < request.pinned.max(1)
            && let Some(found) = store.lookup(self.model.kv_shape(), &request.prompt, prompt_tokens - 1, kv.len())
        {
            restored_tokens = found.len() - kv.len();
            let pinned = found.len() <= request.pinned;
            self.cache.insert(&request.prompt[..found.len()], &found, pinned);
            kv = found;
        }
        let mut run = Run {
            kv,
            sampler: Sampler::new(request.sampling, &request.prompt),
            output: Vec::new(),
            logits: Vec::new(),
            drafter: self.settings.drafts.then(Drafter::new),
            ahead: None,
            usage: Usage { prompt_tokens, ..Usage::default() },
            request,
            events,
        };
        run.usage.cached_tokens = run.kv.len();
        run.usage.restored_tokens = restored_tokens;
        let result = match run.prefill(&mut self.model, &mut self.cache) {
            Ok(true) => {
                run.usage.prefill_ms = ms(start);
                if let Some(store) = &mut self.store {
                    let mut pinned = run.kv.clone();
                    pinned.truncate(run.request.pinned);
                    store.save(&run.request.prompt[..pinned.len()], pinned);
                }
                let decode = Instant::now();
                let result = run.decode(&mut self.model);
                run.usage.decode_ms = ms(decode);
                result
            }
            Ok(false) => {
                run.usage.prefill_ms = ms(start);
                Ok(FinishReason::Cancelled)
            }
            Err(why) => Err(why),
        };
        run.usage.kv_bytes = run.usage.kv_bytes.max(run.kv.bytes() as u64);
        // What was computed is worth keeping, whatever ended the run.
        run.settle();
        let held: Vec<u32> = run.request.prompt.iter().chain(&run.output).copied().take(run.kv.len()).collect();
        self.cache.insert(&held, &run.kv, false);
        let finish = result.map_err(Failure::Failed)?;
        run.usage.total_ms = ms(start);
        let notes = self.store.as_mut().map(PrefixStore::take_notes).unwrap_or_default();
        self.last = self.store.is_some().then_some(Last { ids: held, kv: run.kv, pinned: run.request.pinned });
        Ok(Report { ids: run.output, finish, usage: run.usage, notes })
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn panic_text(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}

/// One request on its way. The tokens are `prompt` then `output`; the KV holds a prefix of them.
struct Run<'a> {
    request: Request,
    events: &'a UnboundedSender<Event>,
    kv: Kv,
    sampler: Sampler,
    output: Vec<u32>,
    /// Of the position after the output; empty when they are not known.
    logits: Vec<f32>,
    /// `None`: no drafts are made.
    drafter: Option<Drafter>,
    /// A draft that was evaluated with the last token.
    ahead: Option<Ahead>,
    usage: Usage,
}

/// What was evaluated beyond the tokens that are certain. The KV holds them and the draft.
struct Ahead {
    /// How many tokens were certain then.
    certain: usize,
    draft: Vec<u32>,
    /// The logits after the last certain token and after each of the draft: [draft + 1, vocab].
    rows: Vec<f32>,
}

impl Run<'_> {
    /// Evaluates the prompt; `false` when cancelled.
    fn prefill(&mut self, model: &mut Model, cache: &mut PrefixCache) -> Result<bool, String> {
        let total = self.request.prompt.len() - self.kv.len();
        let mut done = 0;
        self.send(Event::Prefill { done, total });
        while self.kv.len() < self.request.prompt.len() {
            let at = self.kv.len();
            let mut end = self.request.prompt.len().min(at + CHUNK);
            // A chunk ends where the pinned prefix does, so that exactly this can be kept.
            if at < self.request.pinned && self.request.pinned < end {
                end = self.request.pinned;
            }
            let logits = if end == self.request.prompt.len() { Logits::Last } else { Logits::None };
            let cancel = self.request.cancel.clone();
            match model.forward(&mut self.kv, &self.request.prompt[at..end], logits, &|| cancel.is_cancelled()) {
                Ok(logits) => self.logits = logits,
                Err(ModelError::Cancelled) => return Ok(false),
                Err(ModelError::Failed(why)) => return Err(why),
            }
            done += end - at;
            self.usage.prefilled_tokens = done;
            if end == self.request.pinned {
                cache.insert(&self.request.prompt[..end], &self.kv, true);
            }
            self.send(Event::Prefill { done, total });
        }
        Ok(true)
    }

    fn decode(&mut self, model: &mut Model) -> Result<FinishReason, String> {
        loop {
            if self.request.cancel.is_cancelled() {
                return Ok(FinishReason::Cancelled);
            }
            if self.output.len() >= self.request.max_output_tokens {
                return Ok(FinishReason::Length);
            }
            let forced = self.request.mask.forced();
            if !forced.is_empty() {
                if self.push_forced(forced)? == Verdict::Stop {
                    return Ok(FinishReason::Stop);
                }
                continue;
            }
            if !self.evaluate(model)? {
                return Ok(FinishReason::Cancelled);
            }
            self.request.mask.allow(&mut self.logits)?;
            let structured = self.request.mask.structured();
            let id = self.sampler.sample(&mut self.logits, structured).ok_or("no token is allowed here")?;
            if self.request.stop_ids.contains(&id) {
                return Ok(FinishReason::Stop);
            }
            self.usage.sampled_tokens += 1;
            if self.push(id, false)? == Verdict::Stop {
                return Ok(FinishReason::Stop);
            }
        }
    }

    /// Takes forced tokens into the output as far as the limit allows; they are evaluated with the next batch.
    fn push_forced(&mut self, forced: Vec<u32>) -> Result<Verdict, String> {
        for id in forced {
            if self.output.len() >= self.request.max_output_tokens {
                break;
            }
            self.usage.forced_tokens += 1;
            match self.push(id, true)? {
                Verdict::Continue => {}
                other => return Ok(other),
            }
        }
        Ok(Verdict::Continue)
    }

    fn push(&mut self, id: u32, forced: bool) -> Result<Verdict, String> {
        self.output.push(id);
        self.logits.clear();
        self.sampler.note(id);
        self.send(Event::Token { id, forced });
        let verdict = self.request.mask.accept(id)?;
        if let Verdict::Rewind { keep } = verdict {
            if keep > self.output.len() {
                return Err(format!("the mask wants to keep {keep} of {} tokens", self.output.len()));
            }
            self.settle();
            self.output.truncate(keep);
            self.kv.truncate(self.request.prompt.len() + keep);
            self.send(Event::Rewind { keep });
        }
        Ok(verdict)
    }

    /// Brings the KV up to the output and the logits with it; `false` when cancelled. All tokens that are missing (a
    /// sampled one, and those forced after it) go in one batch.
    fn evaluate(&mut self, model: &mut Model) -> Result<bool, String> {
        if !self.logits.is_empty() {
            return Ok(true);
        }
        let total = self.request.prompt.len() + self.output.len();
        if let Some(ahead) = &self.ahead {
            let vocab = ahead.rows.len() / (ahead.draft.len() + 1);
            let known = total - ahead.certain;
            if known <= ahead.draft.len() && self.came_true(ahead) == known {
                self.logits = ahead.rows[known * vocab..(known + 1) * vocab].to_vec();
                return Ok(true);
            }
            self.settle();
        }
        // After a rewind the KV may already hold everything; the last token is then evaluated again for its logits.
        self.kv.truncate(total - 1);
        let at = self.kv.len();
        let missing: Vec<u32> = self.request.prompt.iter().chain(&self.output).copied().skip(at).collect();
        // The rows of a draft stand in one pass with the last certain token.
        let draft = if missing.len() <= CHUNK / 2 { self.draft(total) } else { Vec::new() };
        let rows: Vec<u32> = missing.iter().chain(&draft).copied().collect();
        let cancel = self.request.cancel.clone();
        let mut logits = Vec::new();
        for chunk in rows.chunks(CHUNK) {
            let wanted = Logits::Tail(draft.len() + 1);
            match model.forward(&mut self.kv, chunk, wanted, &|| cancel.is_cancelled()) {
                Ok(tail) => logits = tail,
                Err(ModelError::Cancelled) => return Ok(false),
                Err(ModelError::Failed(why)) => return Err(why),
            }
        }
        if draft.is_empty() {
            self.logits = logits;
        } else {
            self.usage.drafted_tokens += draft.len();
            self.logits = logits[..logits.len() / (draft.len() + 1)].to_vec();
            self.ahead = Some(Ahead { certain: total, draft, rows: logits });
        }
        self.usage.kv_bytes = self.usage.kv_bytes.max(self.kv.bytes() as u64);
        Ok(true)
    }

    /// A guess at what follows the `total` tokens that are certain, as far as the mask lets it and the limit has room for it.
    fn draft(&mut self, total: usize) -> Vec<u32> {
        let Some(drafter) = &mut self.drafter else { return Vec::new() };
        let (prompt, output) = (&self.request.prompt, &self.output);
        let token = |i: usize| if i < prompt.len() { prompt[i] } else { output[i - prompt.len()] };
        let room = self.request.max_output_tokens.saturating_sub(output.len() + 1).min(CHUNK / 2);
        let mut draft = drafter.draft(total, token, room);
        if !draft.is_empty() {
            let fits = self.request.mask.fits(&draft);
            draft.truncate(fits);
        }
        draft
    }

    /// How many tokens of a draft stand in the output by now.
    fn came_true(&self, ahead: &Ahead) -> usize {
        let since = self.output[ahead.certain - self.request.prompt.len()..].iter();
        since.zip(&ahead.draft).take_while(|(a, b)| a == b).count()
    }

    /// Takes what did not come true of a draft out of the KV.
    fn settle(&mut self) {
        let Some(ahead) = self.ahead.take() else { return };
        let came_true = self.came_true(&ahead);
        self.usage.accepted_tokens += came_true;
        if let Some(drafter) = &mut self.drafter {
            drafter.judge(ahead.draft.len(), came_true);
        }
        self.kv.truncate(ahead.certain + came_true);
    }

    fn send(&self, event: Event) {
        // No one listens any more: the run goes on to its end or its cancellation all the same.
        let _ = self.events.send(event);
    }
}
