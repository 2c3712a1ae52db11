//! A language model that plays what it is told: for tests, demos, and the harness without weights.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde_json::Value;

use super::{Completion, CompletionRequest, Delta, LanguageModel, ModelError, ModelInfo};
use crate::message::{AssistantMessage, FinishReason, Message, ToolCall, Usage};

/// One assistant message to play.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub text: String,
    pub calls: Vec<ToolCall>,
    /// Waited before anything is said; a cancel token ends it early.
    pub delay: Duration,
    /// Play the output-token limit instead of a natural end.
    pub cut: bool,
    /// Fail with this instead of replying.
    pub failure: Option<String>,
}

impl Reply {
    pub fn text(text: impl Into<String>) -> Reply {
        Reply { text: text.into(), ..Reply::default() }
    }

    /// A call. `arguments` need not be an object: a string stands for text that is not JSON.
    pub fn call(name: impl Into<String>, arguments: Value) -> Reply {
        Reply::default().and_call(name, arguments)
    }

    pub fn and_call(mut self, name: impl Into<String>, arguments: Value) -> Reply {
        self.calls.push(ToolCall { id: String::new(), name: name.into(), arguments, rescued: false });
        self
    }

    pub fn failure(why: impl Into<String>) -> Reply {
        Reply { failure: Some(why.into()), ..Reply::default() }
    }
}

type Script = Box<dyn FnMut(&CompletionRequest) -> Option<Reply> + Send>;

/// Plays a list of replies, or a function of the request. It obeys no tool choice and knows no grammar: what is scripted
/// is what comes, malformed calls included.
///
/// Tokens are counted as one for every four bytes begun, which is near enough for budgets and the same everywhere.
pub struct Scripted {
    script: Mutex<Script>,
    context_tokens: usize,
}

impl Scripted {
    /// One reply for each completion, in order; asking for more is [`ModelError::Failed`].
    pub fn new(replies: impl IntoIterator<Item = Reply>) -> Scripted {
        let mut replies: VecDeque<Reply> = replies.into_iter().collect();
        Scripted::from_fn(move |_| replies.pop_front())
    }

    /// `script` is called once for each completion; `None` says that it is at its end.
    pub fn from_fn(script: impl FnMut(&CompletionRequest) -> Option<Reply> + Send + 'static) -> Scripted {
        Scripted { script: Mutex::new(Box::new(script)), context_tokens: 32_768 }
    }

    /// Another context length than 32,768 tokens.
    pub fn with_context_tokens(mut self, context_tokens: usize) -> Scripted {
        self.context_tokens = context_tokens;
        self
    }
}

fn count(text: &str) -> usize {
    text.len().div_ceil(4)
}

/// Name and tokens of each message, and of the tools.
fn segments(request: &CompletionRequest) -> Vec<(String, usize)> {
    let mut out = Vec::new();
    for (i, message) in request.messages.iter().enumerate() {
        out.push(match message {
            Message::System { text } => ("system".to_owned(), count(text)),
            Message::User { text } => (format!("message:{i}:user"), count(text)),
            Message::Assistant(message) => (format!("message:{i}:assistant"), count_message(message)),
            Message::Tool(result) => {
                let reminder = result.reminder.as_deref().map_or(0, count);
                (format!("tool_result:{i}:{}", result.name), count(&result.text) + reminder)
            }
        });
    }
    for tool in &request.tools {
        let schema = tool.parameters.to_string();
        out.push((format!("tool:{}", tool.name), count(&tool.name) + count(&tool.description) + count(&schema)));
    }
    out
}

fn count_message(message: &AssistantMessage) -> usize {
    let calls = message.calls.iter().map(|call| count(&call.name) + count(&call.arguments.to_string()));
    count(&message.text) + calls.sum::<usize>()
}

#[async_trait]
impl LanguageModel for Scripted {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            id: "scripted".into(),
            digest: String::new(),
            kernel_tier: "none".into(),
            context_tokens: self.context_tokens,
        }
    }

    async fn complete(
        &self,
        request: CompletionRequest,
        sink: &mut (dyn FnMut(Delta) + Send),
    ) -> Result<Completion, ModelError> {
        let begin = Instant::now();
        let segments = segments(&request);
        let prompt_tokens: usize = segments.iter().map(|(_, n)| n).sum();
        if prompt_tokens.saturating_add(request.max_output_tokens) > self.context_tokens {
            return Err(ModelError::Overflow {
                prompt_tokens,
                reserved_tokens: request.max_output_tokens,
                context_tokens: self.context_tokens,
                segments,
            });
        }
        let reply = {
            let mut script = self.script.lock().unwrap_or_else(|e| e.into_inner());
            script(&request)
        };
        let reply = reply.ok_or_else(|| ModelError::Failed("the script has no reply left for this step".into()))?;
        let cancelled = tokio::select! {
            biased;
            () = request.cancel.cancelled() => true,
            () = tokio::time::sleep(reply.delay) => false,
        };
        let usage = |sampled_tokens| Usage {
            prompt_tokens,
            prefilled_tokens: prompt_tokens,
            sampled_tokens,
            total_ms: begin.elapsed().as_secs_f64() * 1e3,
            ..Usage::default()
        };
        if cancelled {
            let message = AssistantMessage::default();
            return Ok(Completion { message, finish: FinishReason::Cancelled, usage: usage(0), notes: Vec::new() });
        }
        if let Some(why) = reply.failure {
            return Err(ModelError::Failed(why));
        }
        if !reply.text.is_empty() {
            sink(Delta::Text(reply.text.clone()));
        }
        for call in &reply.calls {
            sink(Delta::CallStarted { name: call.name.clone(), rescued: call.rescued });
        }
        let message = AssistantMessage { text: reply.text, calls: reply.calls, ids: None };
        let finish = if reply.cut { FinishReason::Length } else { FinishReason::Stop };
        let usage = usage(count_message(&message));
        Ok(Completion { message, finish, usage, notes: Vec::new() })
    }

    fn count_tokens(&self, text: &str) -> usize {
        count(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Sampling, ToolChoice};
    use tokio_util::sync::CancellationToken;

    fn request(text: &str) -> CompletionRequest {
        CompletionRequest {
            messages: vec![Message::User { text: text.into() }],
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            withheld: Vec::new(),
            prose: false,
            routing: false,
            optional_margin: 0.0,
            sampling: Sampling::default(),
            max_output_tokens: 64,
            rescue: true,
            cancel: CancellationToken::new(),
        }
    }

    #[tokio::test]
    async fn plays_its_list_and_then_says_that_it_is_at_its_end() {
        let bad = Reply::text("First.").and_call("Read", Value::String("{not json".into()));
        let model = Scripted::new([bad, Reply::failure("out of memory")]);
        let mut deltas = Vec::new();
        let done = model.complete(request("go"), &mut |d| deltas.push(d)).await.unwrap();
        assert_eq!(done.message.text, "First.");
        assert_eq!(done.message.calls[0].arguments, Value::String("{not json".into()));
        assert_eq!(deltas, [Delta::Text("First.".into()), Delta::CallStarted { name: "Read".into(), rescued: false }]);
        for want in ["out of memory", "no reply left"] {
            let failed = model.complete(request("go"), &mut |_| ()).await.unwrap_err();
            assert!(failed.to_string().contains(want), "{failed}");
        }
    }

    #[tokio::test]
    async fn a_function_sees_the_request_a_cancel_ends_the_wait_and_an_overflow_is_refused() {
        let model = Scripted::from_fn(|r| {
            let delay = Duration::from_secs(if r.cancel.is_cancelled() { 3600 } else { 0 });
            Some(Reply { delay, ..Reply::text(format!("{} messages", r.messages.len())) })
        });
        let done = model.complete(request("a"), &mut |_| ()).await.unwrap();
        assert_eq!(done.message.text, "1 messages");
        let cancelled = request("a");
        cancelled.cancel.cancel();
        let done = model.complete(cancelled, &mut |_| ()).await.unwrap();
        assert_eq!(done.finish, FinishReason::Cancelled);
        let small = model.with_context_tokens(70);
        match small.complete(request(&"x".repeat(40)), &mut |_| ()).await {
            Err(ModelError::Overflow { prompt_tokens: 10, segments, .. }) => {
                assert_eq!(segments, [("message:0:user".to_owned(), 10)]);
            }
            other => panic!("{other:?}"),
        }
    }
}
