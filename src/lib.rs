//! **cob** runs an AI agent on a small Qwen2.5 that lives in the same process.
//!
//! # Layout
//! * [`message`]: the words every room shares.
//! * [`model`]: Qwen2.5: files → weights, forward pass, KV storage, CPU kernels. Token ids → logits.
//! * [`engine`]: the thread that owns the model: prefill, decode, sampler, prefix cache. Token ids → token ids.
//! * [`chat`]: Qwen's wire format: tokenizer, template, grammar, parser. Messages ↔ token ids.
//! * [`hub`]: model files on disk: manifests, pull, verify.
//! * [`permission`]: what a call touches, the rules, one decision.
//! * [`process`]: the one place that starts a child.
//! * [`tools`]: the trait, the registry, one file a tool.
//! * [`session`]: the append-only log and its readers.
//! * [`context`]: events → messages.
//! * [`agent`]: the loop, one turn, one tool call, limits.
//! * [`config`]: the user's settings file.
//! * [`cli`]: the front end.

pub mod agent;
pub mod chat;
pub mod cli;
pub mod config;
pub mod context;
pub mod engine;
pub mod hub;
pub mod message;
pub mod model;
pub mod permission;
pub mod process;
pub mod session;
pub mod tools;
