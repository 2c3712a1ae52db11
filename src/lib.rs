//! **cob** runs an AI agent on a small Qwen2.5 that lives in the same process.
//!
//! # Layout
//! * [`message`]: the words every room shares.
//! * [`model`]: Qwen2.5: files → weights, forward pass, KV storage, CPU kernels. Token ids → logits.
//! * [`engine`]: the thread that owns the model: prefill, decode, drafts, sampler, prefix cache and its store on disk. Token ids → token
//!   ids.
//! * [`chat`]: Qwen's wire format: tokenizer, template, grammar, parser. Messages ↔ token ids.
//! * [`hub`]: model files on disk: manifests, pull, verify.
//! * [`permission`]: what a call touches, the rules, one decision.
//! * [`process`]: the one place that starts a child.
//! * [`tools`]: the trait, the registry, one file a tool.
//! * [`session`]: the append-only log and its readers.
//! * [`context`]: events → messages.
//! * [`measure`]: what a prompt costs: tokens by segment, prefill time, broken prefixes.
//! * [`agent`]: the loop, one turn, one tool call, limits.
//! * [`config`]: the user's settings file.
//! * [`cli`]: the front end.
//!
//! # Arrows
//! Each room may use those on its right, and every room may use [`message`]; `tests/it/tidy.rs` holds them to it.
//!
//! ```text
//! cli → agent → context → session → chat → engine → model
//! cli → measure → context, session, chat, engine
//!       agent → tools → permission, process
//! cli → hub → process
//! cli, config → all that has settings
//! ```
//!
//! # Invariants
//! 1. [`model`] and [`engine`] know no roles, text, JSON or tools. [`agent`] knows no candle.
//! 2. Only [`session`] writes the log. Only [`process`] starts children. Only front ends print.
//! 3. A turn's rendered prompt is a token prefix of the next turn's. The assistant event keeps the sampled ids: re-encoding decoded
//!    text need not reproduce them.
//! 4. Whatever enters the context has a stated token bound. Nothing is cut without a logged event that says so.
//! 5. A tool never returns `Err` to the loop: expected failures are data that the model can act on.
//! 6. Every loop has a limit, and its end is a named [`message::StopReason`]. Hitting a limit is never reported as success.
//! 7. Text that did not come from us (user, tool result, file) is encoded so that it cannot produce a control token.
//! 8. What the harness skips, refuses, defers or falls back from, it says.

pub mod agent;
pub mod chat;
pub mod cli;
pub mod config;
pub mod context;
pub mod engine;
pub mod hub;
pub mod measure;
pub mod message;
pub mod model;
pub mod permission;
pub mod process;
pub mod session;
pub mod tools;
