//! `cob bench`: how fast a model reads (prefill) and writes (decode) here.

use std::fmt::Write;

use clap::Args;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::args::ModelOptions;
use super::setup::{Fault, load_model};
use super::{interrupts::Interrupts, pretty, show};
use crate::chat::{CompletionRequest, LanguageModel, ModelError};
use crate::message::{Message, Sampling, ToolChoice, Usage};

#[derive(Args)]
pub struct BenchArgs {
    /// Tokens of the prompt, about
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens to write, at most
    #[arg(long, value_name = "N", default_value_t = 64)]
    output_tokens: usize,
    /// How often; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// One object on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
}

pub fn run(args: BenchArgs) -> u8 {
    let runtime = match super::runtime() {
        Ok(runtime) => runtime,
        Err(fault) => return show(Err(fault)),
    };
    let code = show(measure(&args, &runtime));
    runtime.shutdown_background();
    code
}

fn measure(args: &BenchArgs, runtime: &Runtime) -> Result<String, Fault> {
    let stop = Interrupts::listen(runtime.handle()).begin();
    let model = load_model(&args.model, false, runtime, &stop)?.model;
    let context = model.info().context_tokens;
    if args.prompt_tokens.saturating_add(args.output_tokens) > context {
        return Err(Fault::refused(format!(
            "--prompt-tokens {} and --output-tokens {} do not fit the context of {context} tokens; ask for fewer",
            args.prompt_tokens, args.output_tokens
        )));
    }
    let mut usages = Vec::new();
    for number in 0..args.runs {
        let request = request(&*model, args, number, stop.token().clone());
        let completion = runtime.block_on(model.complete(request, &mut |_| {}));
        if let Some(reason) = stop.reason() {
            return Err(Fault::stopped(reason));
        }
        let completion = completion.map_err(|error| match error {
            ModelError::Overflow { .. } | ModelError::Refused(_) => Fault::refused(error.to_string()),
            ModelError::Failed(why) => Fault::failed(why),
        });
        usages.push(completion?.usage);
    }
    let info = model.info();
    let reading = usages.iter().map(|u| rate(u.prefilled_tokens, u.prefill_ms));
    let reading = median(reading);
    let writing = usages.iter().map(|u| rate(u.forced_tokens + u.sampled_tokens, u.decode_ms));
    let writing = median(writing);
    if args.json {
        return Ok(pretty(&json!({
            "model": info,
            "prefill_tokens_per_s": reading,
            "decode_tokens_per_s": writing,
            "runs": usages,
        })));
    }
    let mut text = format!("{} ({})\n", info.id, info.kernel_tier);
    for Usage { prefilled_tokens, prefill_ms, sampled_tokens, forced_tokens, decode_ms, .. } in &usages {
        let written = sampled_tokens + forced_tokens;
        let _ = writeln!(text, "  read {prefilled_tokens} in {prefill_ms:.0} ms, wrote {written} in {decode_ms:.0} ms");
    }
    let _ = writeln!(text, "prefill {reading:.1} tok/s, decode {writing:.1} tok/s (the median of {})", usages.len());
    Ok(text)
}

/// A prompt of about the wanted length that begins differently each time, so that no cache helps.
fn request(model: &dyn LanguageModel, args: &BenchArgs, number: u32, cancel: CancellationToken) -> CompletionRequest {
    let mut text = format!("Story number {number}, to be continued at length. ");
    let sentence = "The small horse pulled the cart up the long hill while the rain fell on the road. ";
    let each = model.count_tokens(sentence).max(1);
    text.push_str(&sentence.repeat(args.prompt_tokens.saturating_sub(model.count_tokens(&text)) / each));
    CompletionRequest {
        // The system turn differs too: it stands before everything else.
        messages: vec![Message::System { text: format!("You tell story {number}.") }, Message::User { text }],
        tools: Vec::new(),
        tool_choice: ToolChoice::None,
        withheld: Vec::new(),
        prose: false,
        routing: false,
        optional_margin: 0.0,
        sampling: Sampling::default(),
        max_output_tokens: args.output_tokens.max(1),
        rescue: false,
        cancel,
    }
}

fn median(rates: impl Iterator<Item = f64>) -> f64 {
    let mut rates: Vec<f64> = rates.collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

fn rate(tokens: usize, ms: f64) -> f64 {
    if ms > 0.0 { tokens as f64 * 1e3 / ms } else { 0.0 }
}
