//! Logits → one token.

use std::collections::BTreeSet;

use crate::message::Sampling;

/// Draws tokens. The generator is SplitMix64, written out here and not taken from a library, because a replay must draw
/// the same tokens under every later version.
pub(crate) struct Sampler {
    sampling: Sampling,
    state: u64,
    /// What the repetition penalty is for.
    seen: BTreeSet<u32>,
    candidates: Vec<(f32, u32)>,
}

/// How many temperatures below the best logit a token may lie and still be a candidate of top-p: what is left out has
/// less than e⁻³⁰ of the best token's probability.
const DEPTH: f32 = 30.0;

impl Sampler {
    /// `prompt`: its tokens count as seen.
    pub fn new(sampling: Sampling, prompt: &[u32]) -> Self {
        let penalised = sampling.repetition_penalty != 1.0;
        let seen = if penalised { prompt.iter().copied().collect() } else { BTreeSet::new() };
        Sampler { sampling, state: sampling.seed, seen, candidates: Vec::new() }
    }

    /// Uniform in [0, 1).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// `logits`: [vocab]; those of forbidden tokens are −∞. `structured`: inside a call. `None` if nothing is allowed.
    pub fn sample(&mut self, logits: &mut [f32], structured: bool) -> Option<u32> {
        let Sampling { temperature, call_temperature, top_k, top_p, min_p, repetition_penalty, .. } = self.sampling;
        let temperature = call_temperature.filter(|_| structured).unwrap_or(temperature);
        if !structured && repetition_penalty != 1.0 {
            for &id in &self.seen {
                if let Some(x) = logits.get_mut(id as usize) {
                    *x = if *x > 0.0 { *x / repetition_penalty } else { *x * repetition_penalty };
                }
            }
        }
        let (best, best_logit) = argmax(logits)?;
        let id = if temperature <= 0.0 {
            best
        } else {
            let t = temperature as f32;
            let floor = if min_p > 0.0 { best_logit + t * (min_p as f32).ln() } else { best_logit - t * DEPTH };
            let candidates = &mut self.candidates;
            candidates.clear();
            candidates.extend(logits.iter().zip(0u32..).filter(|(x, _)| **x >= floor).map(|(&x, id)| (x, id)));
            let by_logit = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
            if top_k > 0 && top_k < candidates.len() {
                candidates.select_nth_unstable_by(top_k - 1, by_logit);
                candidates.truncate(top_k);
            }
            candidates.sort_unstable_by(by_logit);
            let weight = |x: f32| (((x - best_logit) / t) as f64).exp();
            let mut total: f64 = candidates.iter().map(|&(x, _)| weight(x)).sum();
            if top_p < 1.0 {
                let (mut kept, mut n) = (0.0, 0);
                while n < candidates.len() && (n == 0 || kept < top_p * total) {
                    kept += weight(candidates[n].0);
                    n += 1;
                }
                candidates.truncate(n);
                total = kept;
            }
            let mut left = self.uniform() * total;
            let chosen = self.candidates.iter().find(|&&(x, _)| {
                left -= weight(x);
                left < 0.0
            });
            // Rounding can leave a crumb: it belongs to the last candidate.
            chosen.or(self.candidates.last())?.1
        };
        Some(id)
    }

    /// Notes a token of the output.
    pub fn note(&mut self, id: u32) {
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.insert(id);
        }
    }
}

/// The first of the largest finite logits.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    for (i, &x) in logits.iter().enumerate() {
        if x > best.map_or(f32::NEG_INFINITY, |(_, b)| b) {
            best = Some((i as u32, x));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(sampling: Sampling, logits: &[f32], n: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(sampling, &[]);
        let mut counts = vec![0; logits.len()];
        for _ in 0..n {
            counts[sampler.sample(&mut logits.to_vec(), false).unwrap() as usize] += 1;
        }
        counts
    }

    const INF: f32 = f32::NEG_INFINITY;

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        assert_eq!(draw(Sampling::default(), &[1.0, 3.0, 3.0, INF], 5), [0, 5, 0, 0]);
        assert_eq!(Sampler::new(Sampling::default(), &[]).sample(&mut [INF, INF], false), None);
    }

    #[test]
    fn frequencies_follow_the_softmax_and_the_cuts() {
        let logits = [0.0, 4f32.ln(), 3f32.ln(), INF, 2f32.ln()];
        let base = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        let check = |sampling, expected: [f64; 5]| {
            let counts = draw(sampling, &logits, 20_000);
            for (count, expected) in counts.into_iter().zip(expected) {
                assert!((count as f64 / 20_000.0 - expected).abs() < 0.015, "{count} for {expected} of {sampling:?}");
            }
        };
        check(base, [0.1, 0.4, 0.3, 0.0, 0.2]);
        check(Sampling { top_k: 2, ..base }, [0.0, 4.0 / 7.0, 3.0 / 7.0, 0.0, 0.0]);
        check(Sampling { top_p: 0.65, ..base }, [0.0, 4.0 / 7.0, 3.0 / 7.0, 0.0, 0.0]);
        check(Sampling { min_p: 0.4, ..base }, [0.0, 4.0 / 9.0, 3.0 / 9.0, 0.0, 2.0 / 9.0]);
        check(Sampling { temperature: 0.5, ..base }, [1.0 / 30.0, 16.0 / 30.0, 9.0 / 30.0, 0.0, 4.0 / 30.0]);
    }

    #[test]
    fn a_seed_fixes_the_draws_and_the_penalty_works() {
        let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
        let run = |s: Sampling| {
            let mut sampler = Sampler::new(s, &[]);
            (0..50).map(|_| sampler.sample(&mut vec![0.0; 100], false).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(sampling), run(sampling));
        assert_ne!(run(sampling), run(Sampling { seed: 4, ..sampling }));
        // These five are the generator's: a change here breaks every recorded session.
        assert_eq!(run(sampling)[..5], [11, 70, 61, 7, 21]);
        let mut sampler = Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::default() }, &[0]);
        assert_eq!(sampler.sample(&mut [2.0, 1.5], false), Some(1));
        assert_eq!(sampler.sample(&mut [2.0, 1.5], true), Some(0));
    }

    #[test]
    fn a_call_has_a_temperature_of_its_own() {
        let sampling = Sampling { temperature: 2.0, call_temperature: Some(0.0), seed: 5, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling, &[]);
        let mut drawn =
            |structured| (0..200).filter(|_| sampler.sample(&mut [1.0, 1.1], structured) == Some(1)).count();
        assert_eq!(drawn(true), 200);
        assert!((50..150).contains(&drawn(false)));
    }
}
