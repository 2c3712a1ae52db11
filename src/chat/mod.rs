//! Qwen's wire format: messages ↔ token ids.
//!
//! * [`tokenizer`]: text ↔ ids; text never becomes a control token.
//! * [`template`]: messages and tools → a prompt, each of its tokens with a segment.
//! * [`bundled`]: Qwen2.5's tokenizer and template, for where there is no model.
//! * [`grammar`]: the tools' schemas → what may stand inside a call.
//! * [`mask`]: the constraint on one completion, the view that streams it, the parser that reads it.
//! * [`rescue`]: finds calls in a foreign form.
//! * [`scripted`]: a model that plays what it is told.

pub mod bundled;
pub mod grammar;
pub mod mask;
pub mod qwen;
pub mod rescue;
pub mod scripted;
pub mod template;
pub mod tokenizer;

pub use mask::{ROUTE_ANSWER, ROUTE_TOOL};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::message::{AssistantMessage, FinishReason, Message, Sampling, ToolChoice, ToolSpec, Usage};

/// Something that continues a conversation. Implementations: `Qwen` (in process) and `Scripted` (tests, demos).
#[async_trait]
pub trait LanguageModel: Send + Sync {
    fn info(&self) -> ModelInfo;

    /// Continues `request.messages` by one assistant message.
    ///
    /// `sink` is called in order, on the caller's task, as things happen; text that might still turn out to be a call
    /// is held back from it until that is decided, so what it was given stands.
    async fn complete(
        &self,
        request: CompletionRequest,
        sink: &mut (dyn FnMut(Delta) + Send),
    ) -> Result<Completion, ModelError>;

    /// The number of tokens of `text` as it would stand in a prompt; bounds what enters the context.
    fn count_tokens(&self, text: &str) -> usize;

    /// Keeps what the last completion computed for another process, where the model has a place for it. Returns at once.
    fn keep(&self) {}
}

/// What a session records of the model that ran it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ModelInfo {
    pub id: String,
    /// SHA-256 of the weights, hexadecimal; empty for a scripted model.
    pub digest: String,
    /// e.g. `avx2`, `scalar`, `cuda`.
    pub kernel_tier: String,
    pub context_tokens: usize,
}

#[derive(Clone, Debug)]
pub struct CompletionRequest {
    pub messages: Vec<Message>,
    pub tools: Vec<ToolSpec>,
    pub tool_choice: ToolChoice,
    /// Tools that stand in the prompt and may not be called this time.
    pub withheld: Vec<String>,
    /// The reply begins with a word and not with a bracket, a tag or a fence: for a model that has been asked to answer
    /// and would rather write its call again.
    pub prose: bool,
    /// The reply begins with a line that says whether a call follows, and of which tool. It is decided before anything else is
    /// written, among the names that are offered, and is no part of the text.
    pub routing: bool,
    /// Where a call could end, another (optional) argument must be likelier by this much, in nats.
    pub optional_margin: f32,
    pub sampling: Sampling,
    /// Reserved in the context before any work.
    pub max_output_tokens: usize,
    /// Whether a call in a foreign form is made a real one.
    pub rescue: bool,
    pub cancel: CancellationToken,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Delta {
    /// Prompt tokens evaluated so far, of `total` that were not cached.
    Prefill { done: usize, total: usize },
    /// Text of the answer.
    Text(String),
    /// A call begins; its name is decided.
    CallStarted { name: String, rescued: bool },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Call ids are empty here: the loop numbers them.
    pub message: AssistantMessage,
    pub finish: FinishReason,
    pub usage: Usage,
    /// Things that did not stop the completion but must be said (a schema keyword that is checked only afterwards …).
    pub notes: Vec<String>,
}

#[derive(Debug)]
pub enum ModelError {
    /// Refused before any work. `segments` are `(name, tokens)` and sum to `prompt_tokens`.
    Overflow {
        prompt_tokens: usize,
        reserved_tokens: usize,
        context_tokens: usize,
        segments: Vec<(String, usize)>,
    },
    /// The request cannot be served as asked (a named tool that is not offered, a schema that cannot be obeyed).
    Refused(String),
    Failed(String),
}

impl std::fmt::Display for ModelError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ModelError::Overflow { prompt_tokens, reserved_tokens, context_tokens, segments } => {
                let sizes: Vec<String> = segments.iter().map(|(name, n)| format!("{name} {n}")).collect();
                write!(
                    f,
                    "the prompt ({prompt_tokens} tokens: {}) and the reserved output ({reserved_tokens}) do not fit the \
                     context of {context_tokens} tokens; shorten the task, offer fewer tools, or raise --context-tokens",
                    sizes.join(", ")
                )
            }
            ModelError::Refused(why) | ModelError::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for ModelError {}
