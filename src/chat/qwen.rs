//! The model in this process: a [`LanguageModel`] over the engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use sha2::{Digest, Sha256};

use super::grammar::Grammars;
use super::mask::CallMask;
use super::template::{Prompt, Template};
use super::tokenizer::Tokenizer;
use super::{Completion, CompletionRequest, Delta, LanguageModel, ModelError, ModelInfo};
use crate::engine::store::StoreSettings;
use crate::engine::{self, Engine, Event, Failure, Request};
use crate::message::{AssistantMessage, Message, ToolSpec};
use crate::model::gguf::Gguf;
use crate::model::{Backend, KvType, Model, Source};

/// How to open a model.
#[derive(Clone, Debug)]
pub struct Options {
    pub backend: Backend,
    pub kv_type: KvType,
    /// Of prompt and output together; at most what the model was trained for.
    pub context_tokens: usize,
    /// What the prefix cache may hold.
    pub cache_bytes: usize,
    /// Where prefixes are kept for the next process; `None`: nowhere.
    pub store: Option<Store>,
    /// Whether what stood in the prompt or the output before is guessed to come again (prompt lookup). The output is the same.
    pub drafts: bool,
    /// The id and SHA-256 that sessions record.
    pub id: String,
    pub digest: String,
}

/// The prefix store on disk.
#[derive(Clone, Debug)]
pub struct Store {
    pub dir: PathBuf,
    /// Of all its files together.
    pub bytes_max: u64,
}

/// Below this many tokens a prefix is not kept on disk: it is computed in a few seconds at most.
const STORED_TOKENS_MIN: usize = 128;

/// A Qwen2.5 in this process.
pub struct Qwen {
    engine: Engine,
    format: ChatFormat,
    info: ModelInfo,
}

/// Tokenizer, template and grammars of a model: all that is needed to see a prompt, without its weights.
pub struct ChatFormat {
    pub template: Template,
    pub grammars: Arc<Grammars>,
}

impl ChatFormat {
    /// From a GGUF file, or a folder with `tokenizer.json` and `tokenizer_config.json`. `vocab`: the width of the logits;
    /// the tokenizer's own when the weights are not there.
    pub fn open(path: &Path, vocab: Option<usize>) -> Result<Self, String> {
        let text = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let (tokenizer, template) = if path.is_dir() {
            let tokenizer = Arc::new(Tokenizer::from_file(&path.join("tokenizer.json")).map_err(|e| e.to_string())?);
            let template = Template::from_config(&path.join("tokenizer_config.json"), tokenizer.clone());
            (tokenizer, template.map_err(|e| e.to_string())?)
        } else {
            let file = Gguf::open(path)?;
            let missing =
                |key: &str| format!("{}: the file has no {key}; it cannot be used for a chat", path.display());
            let strings = |key: &str| file.strings(key).ok_or_else(|| missing(key));
            if let Some(kind) = file.str("tokenizer.ggml.model").filter(|&kind| kind != "gpt2") {
                return Err(text(&format!("its tokenizer.ggml.model is `{kind}`; only `gpt2` is built in")));
            }
            let tokens = strings("tokenizer.ggml.tokens")?;
            let eos = file.metadata().get("tokenizer.ggml.eos_token_id");
            if eos.is_some() && file.usize("tokenizer.ggml.eos_token_id").is_none_or(|id| id >= tokens.len()) {
                let why =
                    format!("its tokenizer.ggml.eos_token_id is none of its {} tokens: it is damaged", tokens.len());
                return Err(text(&why));
            }
            let tokenizer = Tokenizer::from_vocab(
                &tokens,
                &strings("tokenizer.ggml.merges")?,
                &file.i32s("tokenizer.ggml.token_type").ok_or_else(|| missing("tokenizer.ggml.token_type"))?,
                file.str("tokenizer.ggml.pre").ok_or_else(|| missing("tokenizer.ggml.pre"))?,
            );
            let tokenizer = Arc::new(tokenizer.map_err(|e| text(&e))?);
            let source = file.str("tokenizer.chat_template").ok_or_else(|| missing("tokenizer.chat_template"))?;
            let template = Template::new(source, tokenizer.clone()).map_err(|e| text(&e))?;
            (tokenizer, template)
        };
        let vocab = vocab.unwrap_or(tokenizer.vocab_size());
        let grammars = Arc::new(Grammars::new(tokenizer, vocab).map_err(|e| text(&e))?);
        Ok(ChatFormat { template, grammars })
    }

    /// The prompt of a conversation, exactly as the model gets it.
    pub fn prompt(&self, messages: &[Message], tools: &[ToolSpec]) -> Result<Prompt, String> {
        self.template.render(messages, self.grammars.compile(tools).specs(), true).map_err(|e| e.to_string())
    }
}

/// Of everything that keys and values depend on, and of tokenizer and template, so that what is kept is found by whoever renders the
/// same prompts. The version of the format of our own kernels' results is part of it.
fn fingerprint(info: &ModelInfo, format: &ChatFormat, kv_type: KvType) -> [u8; 32] {
    const NUMERICS: u32 = 1;
    let tokenizer = format.grammars.tokenizer();
    let mut hash = Sha256::new();
    for part in [info.digest.as_bytes(), info.kernel_tier.as_bytes(), format.template.source().as_bytes()] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.update(format!("{NUMERICS} {kv_type:?} {}", tokenizer.vocab_size()));
    for id in 0..tokenizer.vocab_size() as u32 {
        let bytes = tokenizer.token_bytes(id);
        hash.update((bytes.len() as u32).to_le_bytes());
        hash.update(bytes);
    }
    hash.finalize().into()
}

impl Qwen {
    /// Loads the weights and, on another thread, the tokenizer. Costs the time to read the file once.
    pub fn open(path: &Path, options: Options) -> Result<Self, String> {
        Self::load(Source::open(path)?, path, options)
    }

    /// As [`Qwen::open`], from an opened source; `path` is where its tokenizer lies.
    pub fn load(source: Source, path: &Path, options: Options) -> Result<Self, String> {
        let config = source.config()?;
        let chat_path: PathBuf = path.to_owned();
        let chat = std::thread::Builder::new()
            .spawn(move || ChatFormat::open(&chat_path, Some(config.vocab)))
            .map_err(|error| format!("cannot start the tokenizer's thread: {error}"))?;
        let model = Model::load(source, options.backend.clone(), options.kv_type)?;
        let format = chat.join().map_err(|_| "the tokenizer's thread panicked".to_owned())??;
        let context_tokens = options.context_tokens.min(config.context);
        let info =
            ModelInfo { id: options.id, digest: options.digest, kernel_tier: options.backend.name(), context_tokens };
        let store = options.store.map(|store| StoreSettings {
            dir: store.dir,
            fingerprint: fingerprint(&info, &format, options.kv_type),
            bytes_max: store.bytes_max,
            tokens_min: STORED_TOKENS_MIN,
        });
        let cache_bytes = options.cache_bytes;
        let engine =
            Engine::start(model, engine::Settings { context_tokens, cache_bytes, store, drafts: options.drafts })?;
        Ok(Qwen { engine, format, info })
    }

    pub fn format(&self) -> &ChatFormat {
        &self.format
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

#[async_trait]
impl LanguageModel for Qwen {
    fn info(&self) -> ModelInfo {
        self.info.clone()
    }

    async fn complete(
        &self,
        request: CompletionRequest,
        sink: &mut (dyn FnMut(Delta) + Send),
    ) -> Result<Completion, ModelError> {
        let grammar = self.format.grammars.compile(&request.tools);
        let mut notes = grammar.notes().to_vec();
        notes.extend(grammar.refused().iter().map(|r| format!("the tool `{}` is not offered: {}", r.name, r.why)));
        if !grammar.specs().is_empty() {
            // The token trie is built beside the prefill.
            let grammars = self.format.grammars.clone();
            let _ = std::thread::Builder::new().spawn(move || grammars.warm());
        }
        let prompt = self.format.template.render(&request.messages, grammar.specs(), true);
        let prompt = prompt.map_err(|e| ModelError::Failed(e.to_string()))?;
        let mask = CallMask::new(self.format.grammars.clone(), grammar, request.tool_choice, request.rescue)
            .map_err(ModelError::Refused)?
            .withhold(&request.withheld)
            .prose(request.prose)
            .routing(request.routing)
            .optional_margin(request.optional_margin);
        let mut view = mask.view();
        // Dropping this future ends the work in the engine too.
        let cancel = request.cancel.child_token();
        let _guard = cancel.clone().drop_guard();
        let mut events = self.engine.submit(Request {
            pinned: prompt.pinned,
            prompt: prompt.ids.clone(),
            mask: Box::new(mask),
            sampling: request.sampling,
            stop_ids: self.format.grammars.stop_ids(),
            max_output_tokens: request.max_output_tokens,
            cancel,
        });
        while let Some(event) = events.recv().await {
            match event {
                Event::Prefill { done, total } => sink(Delta::Prefill { done, total }),
                Event::Token { id, .. } => view.token(id, &mut *sink),
                Event::Rewind { keep } => view.rewind(keep),
                Event::Finished(report) => {
                    let (ids, parsed) = view.finish(&mut *sink);
                    debug_assert_eq!(ids, report.ids);
                    notes.extend(report.notes);
                    return Ok(Completion {
                        message: AssistantMessage { text: parsed.text, calls: parsed.calls, ids: Some(report.ids) },
                        finish: report.finish,
                        usage: report.usage,
                        notes,
                    });
                }
                Event::Failed(Failure::Overflow { prompt_tokens, reserved_tokens, context_tokens }) => {
                    let segments = prompt.sizes();
                    return Err(ModelError::Overflow { prompt_tokens, reserved_tokens, context_tokens, segments });
                }
                Event::Failed(Failure::Failed(why)) => return Err(ModelError::Failed(why)),
            }
        }
        Err(ModelError::Failed("the engine ended without an answer".into()))
    }

    fn keep(&self) {
        self.engine.keep();
    }

    fn count_tokens(&self, text: &str) -> usize {
        self.format.grammars.tokenizer().encode_text(text).len()
    }
}
