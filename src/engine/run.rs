//! One request on its way, from its first row to its end.

use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::draft::Drafter;
use super::sampler::Sampler;
use super::{CHUNK, Event, Report, Request, Verdict};
use crate::message::{FinishReason, Usage};
use crate::model::{Kv, Logits};

/// What a run has to do next.
pub(super) enum Step {
    /// Nothing in this pass.
    Wait,
    /// These ids are evaluated at the end of its KV.
    Rows(Vec<u32>, Logits),
    Done(Result<FinishReason, String>),
}

/// The tokens are `prompt` then `output`; the KV holds a prefix of them, and behind it at times a draft.
pub(super) struct Run {
    pub request: Request,
    pub kv: Kv,
    events: UnboundedSender<Event>,
    sampler: Sampler,
    output: Vec<u32>,
    /// Of the position after the output; empty when they are not known.
    logits: Vec<f32>,
    /// `None`: no drafts are made.
    drafter: Option<Drafter>,
    /// A draft that was evaluated with the last token.
    ahead: Option<Ahead>,
    /// The draft at the end of the rows that are being evaluated.
    drafted: Vec<u32>,
    usage: Usage,
    begun: Option<Instant>,
    /// When the prompt had been evaluated.
    prefilled: Option<Instant>,
}

/// What was evaluated beyond the tokens that are certain. The KV holds them and the draft.
struct Ahead {
    /// How many tokens were certain then.
    certain: usize,
    draft: Vec<u32>,
    /// The logits after the last certain token and after each of the draft: [draft + 1, vocab].
    rows: Vec<f32>,
}

impl Run {
    /// `kv`: empty; it has its place until the prefill begins.
    pub fn new(request: Request, kv: Kv, events: UnboundedSender<Event>, drafts: bool) -> Self {
        Run {
            kv,
            events,
            sampler: Sampler::new(request.sampling, &request.prompt),
            output: Vec::new(),
            logits: Vec::new(),
            drafter: drafts.then(Drafter::new),
            ahead: None,
            drafted: Vec::new(),
            usage: Usage { prompt_tokens: request.prompt.len(), ..Usage::default() },
            begun: None,
            prefilled: None,
            request,
        }
    }

    pub fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// `kv`: what is known of the prompt, `restored` positions of it from disk.
    pub fn begin(&mut self, started: Instant, kv: Kv, restored: usize) {
        self.begun = Some(started);
        (self.usage.cached_tokens, self.usage.restored_tokens) = (kv.len(), restored);
        self.kv = kv;
        self.send_progress();
    }

    /// Whether the prompt is still being evaluated, or waits to be.
    pub fn prefilling(&self) -> bool {
        self.prefilled.is_none()
    }

    /// The tokens whose keys and values are there for good.
    pub fn known(&self) -> impl Iterator<Item = &u32> {
        let len = self.ahead.as_ref().map_or(self.kv.len(), |ahead| ahead.certain.min(self.kv.len()));
        self.request.prompt.iter().chain(&self.output).take(len)
    }

    /// Goes on until something must be evaluated, at most `rows` rows, or to the end. `drafts`: whether a draft may be added to them.
    pub fn step(&mut self, rows: usize, drafts: bool) -> Step {
        if self.request.cancel.is_cancelled() {
            return Step::Done(Ok(FinishReason::Cancelled));
        }
        if self.prefilling() {
            return self.prefill(rows);
        }
        self.decode(rows, drafts).unwrap_or_else(|why| Step::Done(Err(why)))
    }

    fn prefill(&self, rows: usize) -> Step {
        let (prompt, at, pinned) = (&self.request.prompt, self.kv.len(), self.request.pinned);
        let mut end = prompt.len().min(at + rows);
        // A chunk ends where the pinned prefix does, so that exactly this can be kept.
        if at < pinned && pinned < end {
            end = pinned;
        }
        let logits = if end == prompt.len() { Logits::Last } else { Logits::None };
        Step::Rows(prompt[at..end].to_vec(), logits)
    }

    fn decode(&mut self, rows: usize, drafts: bool) -> Result<Step, String> {
        loop {
            if self.output.len() >= self.request.max_output_tokens {
                return Ok(Step::Done(Ok(FinishReason::Length)));
            }
            let forced = self.request.mask.forced();
            if !forced.is_empty() {
                if self.push_forced(forced)? == Verdict::Stop {
                    return Ok(Step::Done(Ok(FinishReason::Stop)));
                }
                continue;
            }
            if let Some(step) = self.missing(rows, drafts) {
                return Ok(step);
            }
            self.request.mask.allow(&mut self.logits)?;
            let structured = self.request.mask.structured();
            let id = self.sampler.sample(&mut self.logits, structured).ok_or("no token is allowed here")?;
            if self.request.stop_ids.contains(&id) {
                return Ok(Step::Done(Ok(FinishReason::Stop)));
            }
            self.usage.sampled_tokens += 1;
            if self.push(id, false)? == Verdict::Stop {
                return Ok(Step::Done(Ok(FinishReason::Stop)));
            }
            if self.request.cancel.is_cancelled() {
                return Ok(Step::Done(Ok(FinishReason::Cancelled)));
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

    /// What must be evaluated before the logits after the output are known; `None` when they are. All tokens that are missing (a sampled
    /// one, and those forced after it) go in one pass, as far as there is room.
    fn missing(&mut self, rows: usize, drafts: bool) -> Option<Step> {
        if !self.logits.is_empty() {
            return None;
        }
        let total = self.request.prompt.len() + self.output.len();
        if let Some(ahead) = &self.ahead {
            let vocab = ahead.rows.len() / (ahead.draft.len() + 1);
            let known = total - ahead.certain;
            if known <= ahead.draft.len() && self.came_true(ahead) == known {
                self.logits = ahead.rows[known * vocab..(known + 1) * vocab].to_vec();
                return None;
            }
            self.settle();
        }
        // After a rewind the KV may already hold everything; the last token is then evaluated again for its logits.
        self.kv.truncate(total - 1);
        let at = self.kv.len();
        let mut ids: Vec<u32> = self.request.prompt.iter().chain(&self.output).copied().skip(at).take(rows).collect();
        if at + ids.len() < total {
            return Some(Step::Rows(ids, Logits::None));
        }
        if drafts && ids.len() <= CHUNK / 2 {
            self.drafted = self.draft(total, rows - ids.len());
            ids.extend(&self.drafted);
        }
        Some(Step::Rows(ids, Logits::Tail(self.drafted.len() + 1)))
    }

    /// The logits of the rows that were asked for; the KV holds them.
    pub fn take(&mut self, logits: Vec<f32>) {
        self.usage.kv_bytes = self.usage.kv_bytes.max(self.kv.bytes() as u64);
        let draft = std::mem::take(&mut self.drafted);
        if draft.is_empty() {
            self.logits = logits;
        } else {
            self.usage.drafted_tokens += draft.len();
            self.logits = logits[..logits.len() / (draft.len() + 1)].to_vec();
            self.ahead = Some(Ahead { certain: self.kv.len() - draft.len(), draft, rows: logits });
        }
        if self.prefilling() {
            self.usage.prefilled_tokens = self.kv.len() - self.usage.cached_tokens;
            if self.kv.len() == self.request.prompt.len() {
                self.prefilled = Some(Instant::now());
            }
            self.send_progress();
        }
    }

    /// A guess at what follows the `total` tokens that are certain, as far as the mask lets it and there is room for it.
    fn draft(&mut self, total: usize, rows: usize) -> Vec<u32> {
        let Some(drafter) = &mut self.drafter else { return Vec::new() };
        let (prompt, output) = (&self.request.prompt, &self.output);
        let token = |i: usize| if i < prompt.len() { prompt[i] } else { output[i - prompt.len()] };
        let room = self.request.max_output_tokens.saturating_sub(output.len() + 1).min(rows);
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

    /// The tokens whose keys and values the KV holds, once no draft stands behind them.
    pub fn settled(&mut self) -> Vec<u32> {
        self.settle();
        self.known().copied().collect()
    }

    pub fn report(&mut self, finish: FinishReason, notes: Vec<String>) -> Report {
        let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let end = Instant::now();
        let (begun, prefilled) = (self.begun.unwrap_or(end), self.prefilled.unwrap_or(end));
        self.usage.prefill_ms = ms(begun, prefilled);
        self.usage.decode_ms = ms(prefilled, end);
        self.usage.total_ms = ms(begun, end);
        Report { ids: std::mem::take(&mut self.output), finish, usage: self.usage, notes }
    }

    fn send_progress(&self) {
        let total = self.request.prompt.len() - self.usage.cached_tokens;
        self.send(Event::Prefill { done: self.usage.prefilled_tokens, total });
    }

    pub fn send(&self, event: Event) {
        // No one listens any more: the run goes on to its end or its cancellation all the same.
        let _ = self.events.send(event);
    }
}
