//! The engine on a small random model: what the cache, forced tokens, rewinds and cancellation do to the result.

use std::collections::VecDeque;

use candle_core::quantized::GgmlDType;
use cob::engine::{Engine, Event, Failure, Mask, Report, Request, Settings, Unmasked, Verdict};
use cob::message::{FinishReason, Sampling};
use cob::model::{Backend, KvType, Model};

use crate::tiny::{SMALL, write_gguf};

fn engine(context_tokens: usize) -> Engine {
    engine_with(context_tokens, true)
}

fn engine_with(context_tokens: usize, drafts: bool) -> Engine {
    let folder = tempfile::tempdir().unwrap();
    let path = write_gguf(&folder.path().join("tiny.gguf"), &SMALL, 11, GgmlDType::Q8_0);
    let model = Model::open(&path, Backend::cpu(), KvType::F16).unwrap();
    Engine::start(model, Settings { context_tokens, cache_bytes: 64 << 20, store: None, drafts }).unwrap()
}

fn request(prompt: Vec<u32>, mask: impl Mask + 'static) -> Request {
    Request { mask: Box::new(mask), ..Request::greedy(prompt, 20) }
}

fn run(engine: &Engine, request: Request) -> Result<Report, Failure> {
    engine.run(request)
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + 11) % 300).collect()
}

#[test]
fn a_shared_prefix_is_prefilled_once_and_changes_nothing() {
    let engine = engine(2048);
    let first = run(&engine, request(prompt(500), Unmasked)).unwrap();
    assert_eq!((first.usage.cached_tokens, first.usage.prefilled_tokens), (0, 500));
    // The same again: all but one token is there, and the output is the same.
    let again = run(&engine, request(prompt(500), Unmasked)).unwrap();
    assert_eq!((again.usage.cached_tokens, again.usage.prefilled_tokens), (499, 1));
    assert_eq!(again.ids, first.ids);
    // The next turn: the output of the first is part of the prompt, and it is there but for its last token.
    let next: Vec<u32> = prompt(500).into_iter().chain(first.ids.clone()).chain([5, 6, 7]).collect();
    let cached = run(&engine, request(next.clone(), Unmasked)).unwrap();
    assert_eq!(cached.usage.cached_tokens, 519);
    engine.clear_cache();
    let cold = run(&engine, request(next, Unmasked)).unwrap();
    assert_eq!(cold.usage.cached_tokens, 0);
    assert_eq!(cached.ids, cold.ids);
}

/// Forces a list of tokens at some place of the output.
struct Forcing {
    at: usize,
    tokens: Vec<u32>,
    seen: usize,
}

impl Mask for Forcing {
    fn forced(&mut self) -> Vec<u32> {
        if self.seen == self.at { self.tokens.clone() } else { Vec::new() }
    }
    fn allow(&mut self, _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }
    fn accept(&mut self, _: u32) -> Result<Verdict, String> {
        self.seen += 1;
        Ok(Verdict::Continue)
    }
}

#[test]
fn forced_tokens_go_in_a_batch_and_the_rest_follows_from_them() {
    let engine = engine(2048);
    for at in [0, 1, 7] {
        let forcing = Forcing { at, tokens: vec![9, 8, 7, 6], seen: 0 };
        let report = run(&engine, request(prompt(70), forcing)).unwrap();
        assert_eq!(report.ids[at..at + 4], [9, 8, 7, 6]);
        assert_eq!((report.usage.forced_tokens, report.usage.sampled_tokens), (4, 16));
        // As if they had been in the prompt.
        let whole: Vec<u32> = prompt(70).into_iter().chain(report.ids[..at + 4].to_vec()).collect();
        engine.clear_cache();
        let follow = run(&engine, request(whole, Unmasked)).unwrap();
        assert_eq!(report.ids[at + 4..], follow.ids[..16 - at]);
    }
}

/// Takes back everything from `keep` on once `until` tokens are there, forbids what stood there, and goes on.
struct Rewinding {
    keep: usize,
    until: usize,
    ids: Vec<u32>,
    banned: Option<u32>,
}

impl Mask for Rewinding {
    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }
    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String> {
        if let (Some(id), true) = (self.banned, self.ids.len() == self.keep) {
            logits[id as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }
    fn accept(&mut self, token: u32) -> Result<Verdict, String> {
        self.ids.push(token);
        if self.banned.is_none() && self.ids.len() == self.until {
            self.banned = Some(self.ids[self.keep]);
            self.ids.truncate(self.keep);
            return Ok(Verdict::Rewind { keep: self.keep });
        }
        Ok(Verdict::Continue)
    }
}

#[test]
fn after_a_rewind_it_is_as_if_the_rest_had_never_been() {
    let engine = engine(2048);
    let plain = run(&engine, request(prompt(70), Unmasked)).unwrap().ids;
    for (keep, until) in [(0, 1), (0, 5), (3, 4), (3, 12)] {
        engine.clear_cache();
        let rewinding = Rewinding { keep, until, ids: Vec::new(), banned: None };
        let report = run(&engine, request(prompt(70), rewinding)).unwrap();
        assert_eq!(report.ids[..keep], plain[..keep]);
        assert_ne!(report.ids[keep], plain[keep]);
        let whole: Vec<u32> = prompt(70).into_iter().chain(report.ids[..keep + 1].to_vec()).collect();
        engine.clear_cache();
        let follow = run(&engine, request(whole, Unmasked)).unwrap();
        assert_eq!(report.ids[keep + 1..], follow.ids[..19 - keep], "keep {keep} of {until}");
    }
}

#[test]
fn overflow_is_refused_before_any_work() {
    let engine = engine(100);
    let refused = run(&engine, request(prompt(81), Unmasked)).unwrap_err();
    assert_eq!(refused, Failure::Overflow { prompt_tokens: 81, reserved_tokens: 20, context_tokens: 100 });
    let mut endless = request(prompt(1), Unmasked);
    endless.max_output_tokens = usize::MAX;
    let refused = run(&engine, endless).unwrap_err();
    assert_eq!(refused, Failure::Overflow { prompt_tokens: 1, reserved_tokens: usize::MAX, context_tokens: 100 });
    assert!(matches!(run(&engine, request(Vec::new(), Unmasked)), Err(Failure::Failed(_))));
    assert_eq!(engine.cache_stats().bytes, 0);
    assert_eq!(run(&engine, request(prompt(80), Unmasked)).unwrap().finish, FinishReason::Length);
}

#[test]
fn a_cancelled_request_keeps_what_it_computed() {
    let engine = engine(4096);
    let mut asked = request(prompt(2000), Unmasked);
    let cancel = asked.cancel.clone();
    asked.max_output_tokens = 1;
    let mut events = engine.submit(asked);
    let mut done_before = VecDeque::new();
    let report = loop {
        match events.blocking_recv().unwrap() {
            Event::Prefill { done, .. } => {
                done_before.push_back(done);
                if done >= 512 {
                    cancel.cancel();
                }
            }
            Event::Finished(report) => break report,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(report.finish, FinishReason::Cancelled);
    assert!(report.ids.is_empty() && report.usage.prefilled_tokens < 2000, "{report:?}");
    let again = run(&engine, request(prompt(2000), Unmasked)).unwrap();
    assert_eq!(again.usage.cached_tokens, report.usage.prefilled_tokens);
}

struct Panicking;

impl Mask for Panicking {
    fn forced(&mut self) -> Vec<u32> {
        panic!("a fault in a mask")
    }
    fn allow(&mut self, _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }
    fn accept(&mut self, _: u32) -> Result<Verdict, String> {
        Ok(Verdict::Continue)
    }
}

#[test]
fn a_panic_ends_the_request_and_is_said_ever_after() {
    let engine = engine(2048);
    for _ in 0..2 {
        let Err(Failure::Failed(why)) = run(&engine, request(prompt(5), Panicking)) else { panic!("it must fail") };
        assert!(why.contains("a fault in a mask"), "{why}");
    }
}

/// Lets the output go round in a pattern, and leave it at every `breaks`-th token, so that drafts come true in part.
struct Circling {
    pattern: Vec<u32>,
    breaks: usize,
    ids: Vec<u32>,
}

impl Mask for Circling {
    fn forced(&mut self) -> Vec<u32> {
        // Now and then what comes is known beforehand.
        let at = self.ids.len();
        if at % 31 == 30 { vec![self.pattern[at % self.pattern.len()], 3, 4] } else { Vec::new() }
    }
    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let at = self.ids.len();
        let pattern = self.pattern[at % self.pattern.len()];
        let leaves = at % self.breaks == self.breaks - 1;
        for (id, logit) in logits.iter_mut().enumerate() {
            if (id as u32 == pattern) == leaves {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
    fn accept(&mut self, token: u32) -> Result<Verdict, String> {
        self.ids.push(token);
        Ok(Verdict::Continue)
    }
}

/// Greedy or drawn, with forced tokens and rewinds: the output, and what the next request finds, are the same.
#[test]
fn drafts_change_nothing_but_the_number_of_passes() {
    let (with, without) = (engine_with(2048, true), engine_with(2048, false));
    let (mut drafted, mut accepted) = (0, 0);
    for case in 0..60u64 {
        let mask = || -> Box<dyn Mask> {
            let pattern = (0..3 + case as u32 % 7).map(|i| 20 + i).collect();
            match case % 4 {
                0 => Box::new(Unmasked),
                1 => Box::new(Rewinding { keep: 5, until: 40, ids: Vec::new(), banned: None }),
                2 => Box::new(Circling { pattern, breaks: 9 + case as usize % 5, ids: Vec::new() }),
                _ => Box::new(Circling { pattern, breaks: 1000, ids: Vec::new() }),
            }
        };
        let ask = |engine: &Engine| {
            let prompt: Vec<u32> = prompt(30).into_iter().cycle().take(70 + case as usize).collect();
            let sampling = Sampling {
                temperature: if case % 3 == 0 { 0.0 } else { 0.7 },
                top_k: 3,
                seed: case,
                ..Sampling::default()
            };
            let asked = Request { sampling, max_output_tokens: 120, mask: mask(), ..request(prompt, Unmasked) };
            run(engine, asked).unwrap()
        };
        let (a, b) = (ask(&with), ask(&without));
        assert_eq!((&a.ids, a.finish), (&b.ids, b.finish), "case {case}");
        assert_eq!((b.usage.drafted_tokens, a.usage.sampled_tokens), (0, b.usage.sampled_tokens), "case {case}");
        drafted += a.usage.drafted_tokens;
        accepted += a.usage.accepted_tokens;
        let next: Vec<u32> =
            prompt(30).into_iter().cycle().take(70 + case as usize).chain(a.ids).chain([7, 8]).collect();
        let (a, b) = (run(&with, request(next.clone(), Unmasked)), run(&without, request(next, Unmasked)));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!((&a.ids, a.usage.cached_tokens), (&b.ids, b.usage.cached_tokens), "case {case}");
    }
    assert!(accepted > 1000 && accepted < drafted, "{accepted} of {drafted}");
}

/// Requests of all kinds at the same time, more than run together: each has the output that it has alone.
#[test]
fn requests_that_run_together_change_nothing_for_each_other() {
    let (together, alone) = (engine(2048), engine(2048));
    let ask = |case: u64| {
        let mask: Box<dyn Mask> = match case % 5 {
            0 | 1 => Box::new(Unmasked),
            2 => Box::new(Rewinding { keep: 5, until: 20 + case as usize, ids: Vec::new(), banned: None }),
            3 => Box::new(Forcing { at: case as usize % 7, tokens: vec![9, 8, 7, 6], seen: 0 }),
            _ => Box::new(Circling { pattern: vec![20, 21, 22], breaks: 10, ids: Vec::new() }),
        };
        let mut ids: Vec<u32> = prompt(30).into_iter().cycle().take(40 + 37 * case as usize).collect();
        if case.is_multiple_of(2) {
            ids[0] = case as u32;
        }
        let sampling =
            Sampling { temperature: if case.is_multiple_of(3) { 0.0 } else { 0.7 }, seed: case, ..Sampling::default() };
        Request { sampling, mask, max_output_tokens: 10 + 9 * case as usize, ..request(ids, Unmasked) }
    };
    let mut running: Vec<_> = (0..20).map(|case| together.submit(ask(case))).collect();
    for (case, events) in running.iter_mut().enumerate() {
        let mut streamed: Vec<u32> = Vec::new();
        let report = loop {
            match events.blocking_recv().unwrap() {
                Event::Token { id, .. } => streamed.push(id),
                Event::Rewind { keep } => streamed.truncate(keep),
                Event::Finished(report) => break report,
                Event::Failed(failure) => panic!("{failure:?}"),
                Event::Prefill { .. } => {}
            }
        };
        let expected = run(&alone, ask(case as u64)).unwrap();
        assert_eq!((&report.ids, report.finish), (&expected.ids, expected.finish), "case {case}");
        assert_eq!(streamed, report.ids, "case {case}");
        let usage = &report.usage;
        assert_eq!(usage.cached_tokens + usage.prefilled_tokens, usage.prompt_tokens, "case {case}");
    }
}

/// Eight at once with one system prompt: it is prefilled once, and a fork of a sequence that is still being decoded prefills what is its own.
#[test]
fn what_runs_together_shares_its_prefix_and_a_live_sequence_can_be_forked() {
    let engine = engine(4096);
    let asked = |i: u32| {
        let ids = prompt(500).into_iter().chain([i, i + 1, i + 2]).collect();
        Request { pinned: 500, ..request(ids, Unmasked) }
    };
    let running: Vec<_> = (0..8).map(|i| engine.submit(asked(100 + i))).collect();
    let mut prefilled = Vec::new();
    for mut events in running {
        while let Some(event) = events.blocking_recv() {
            if let Event::Finished(report) = event {
                prefilled.push(report.usage.prefilled_tokens);
            }
        }
    }
    assert_eq!(prefilled, [503, 3, 3, 3, 3, 3, 3, 3]);

    let long = Request { max_output_tokens: 3000, ..request(prompt(70).into_iter().rev().collect(), Unmasked) };
    let cancel = long.cancel.clone();
    let mut events = engine.submit(long);
    let mut output = Vec::new();
    while output.len() < 40 {
        if let Event::Token { id, .. } = events.blocking_recv().expect("it runs") {
            output.push(id);
        }
    }
    let known: Vec<u32> = prompt(70).into_iter().rev().chain(output.clone()).collect();
    let fork = run(&engine, request(known.iter().copied().chain([5, 6, 7]).collect(), Unmasked)).unwrap();
    assert!(fork.usage.prefilled_tokens <= 5, "{:?}", fork.usage);
    cancel.cancel();
    let report = loop {
        if let Event::Finished(report) = events.blocking_recv().expect("it ends") {
            break report;
        }
    };
    assert_eq!(report.finish, FinishReason::Cancelled);
    engine.clear_cache();
    let cold = run(&engine, request(known.into_iter().chain([5, 6, 7]).collect(), Unmasked)).unwrap();
    assert_eq!((cold.usage.cached_tokens, &cold.ids), (0, &fork.ids));
    // The live one went on with its own tokens.
    let whole: Vec<u32> = prompt(70).into_iter().rev().chain(report.ids[..report.ids.len() - 1].to_vec()).collect();
    engine.clear_cache();
    let follow = run(&engine, Request { max_output_tokens: 1, ..request(whole, Unmasked) }).unwrap();
    assert_eq!(follow.ids, report.ids[report.ids.len() - 1..]);
}

struct Failing(usize);

impl Mask for Failing {
    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }
    fn allow(&mut self, _: &mut [f32]) -> Result<(), String> {
        if self.0 == 0 { Err("nothing can come here".into()) } else { Ok(()) }
    }
    fn accept(&mut self, _: u32) -> Result<Verdict, String> {
        self.0 -= 1;
        Ok(Verdict::Continue)
    }
}

#[test]
fn one_that_fails_or_is_cancelled_leaves_the_others_alone() {
    let engine = engine(2048);
    let expected = run(&engine, request(prompt(90), Unmasked)).unwrap().ids;
    engine.clear_cache();
    let mut plain = engine.submit(request(prompt(90), Unmasked));
    let mut failing = engine.submit(request(prompt(80), Failing(5)));
    let cancelled = request(prompt(60), Unmasked);
    cancelled.cancel.cancel();
    let mut cancelled = engine.submit(cancelled);
    let last = |events: &mut tokio::sync::mpsc::UnboundedReceiver<Event>| {
        let mut last = None;
        while let Some(event) = events.blocking_recv() {
            last = Some(event);
        }
        last.expect("there is an end")
    };
    assert!(matches!(last(&mut failing), Event::Failed(Failure::Failed(why)) if why == "nothing can come here"));
    let Event::Finished(report) = last(&mut cancelled) else { panic!("it ends") };
    assert_eq!((report.finish, report.ids.len()), (FinishReason::Cancelled, 0));
    let Event::Finished(report) = last(&mut plain) else { panic!("it ends") };
    assert_eq!(report.ids, expected);
}

/// Forces one token.
struct ForcingOnce(Option<u32>);

impl Mask for ForcingOnce {
    fn forced(&mut self) -> Vec<u32> {
        self.0.take().into_iter().collect()
    }
    fn allow(&mut self, _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }
    fn accept(&mut self, _: u32) -> Result<Verdict, String> {
        Ok(Verdict::Continue)
    }
}

#[test]
fn a_token_that_does_not_exist_fails_alone() {
    let engine = engine(2048);
    let expected = run(&engine, request(prompt(90), Unmasked)).unwrap().ids;
    engine.clear_cache();
    let mut plain = engine.submit(request(prompt(90), Unmasked));
    let mut forcing = engine.submit(request(prompt(80), ForcingOnce(Some(4_000_000_000))));
    let why = |failure: Failure| match failure {
        Failure::Failed(why) => why,
        other => panic!("{other:?}"),
    };
    let asked = run(&engine, request(vec![5, 4_000_000_000], Unmasked)).unwrap_err();
    assert!(why(asked).contains("token id 4000000000 of the prompt is outside"));
    let mut failed = None;
    while let Some(event) = forcing.blocking_recv() {
        if let Event::Failed(failure) = event {
            failed = Some(why(failure));
        }
    }
    assert!(failed.unwrap().contains("token id 4000000000 is outside the vocabulary"));
    let mut ids = Vec::new();
    while let Some(event) = plain.blocking_recv() {
        match event {
            Event::Finished(report) => ids = report.ids,
            Event::Failed(failure) => panic!("{failure:?}"),
            _ => {}
        }
    }
    assert_eq!(ids, expected);
}

#[test]
fn a_request_that_waits_is_cancelled_at_once() {
    let engine = engine(1 << 16);
    // Long enough for a test to see what comes first.
    let long = request((0..20_000).map(|i| i % 290).collect(), Unmasked);
    let cancel = long.cancel.clone();
    let mut first = engine.submit(long);
    let waiting = request(prompt(90), Unmasked);
    let cancelled = waiting.cancel.clone();
    let mut waiting = engine.submit(waiting);
    cancelled.cancel();
    let report = loop {
        match waiting.blocking_recv() {
            Some(Event::Finished(report)) => break report,
            Some(_) => {}
            None => panic!("it ends"),
        }
    };
    assert_eq!((report.finish, report.usage.prefilled_tokens), (FinishReason::Cancelled, 0));
    cancel.cancel();
    let mut ended = None;
    while let Some(event) = first.blocking_recv() {
        ended = Some(event);
    }
    let Some(Event::Finished(report)) = ended else { panic!("it ends") };
    assert_eq!(report.finish, FinishReason::Cancelled, "the first was still on its way");
}
