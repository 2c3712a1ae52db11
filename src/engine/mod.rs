//! The thread that owns the model: prefill, decode, sampling, prefix cache. Token ids → token ids; it knows
//! constraints only as a [`Mask`].

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
    /// `logits`: [vocab]. At least one stays finite, or `Err` names the fault.
    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String>;
    /// Takes note of one token that was sampled or forced (stop ids are not passed on).
    fn accept(&mut self, token: u32) -> Result<Verdict, String>;
    /// Whether the next token is inside a structure (a call), where no repetition penalty applies.
    fn structured(&self) -> bool {
        false
    }
}
